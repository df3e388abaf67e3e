"""Cost of snapshots: wall time of training with snapshots at the demo's interval, relative to training without.

Command:   python experiments/benchmarks/snapshots.py [--rounds 5] [--tokens 1.5e6]
Floor:     copying the bytes of one model from the devices and writing them; everything else is overhead.

Runs of the demo's model and batch in alternating processes: without snapshots, with points, and with both kinds that
the demo saves (which also computes the block mean). No run makes previews, and evaluations take 256 tokens, so that the
runs differ only in saving. The time from `WARM_TOKENS` to the horizon counts: the programs of a step, of an evaluation
and of a save are compiled at the first of them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM_TOKENS = 256_000  # after the first marks


def main() -> None:
    """Print the seconds of each kind of run, and its cost relative to a run without snapshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--tokens", type=float, default=1.5e6, help="tokens per run")
    options = parser.parse_args()
    times: dict[str, list[float]] = {"no": [], "point": [], "point,block_mean": []}
    for turn in range(options.rounds):
        # Reverse the order in each round: a machine that slows down must not favour one kind.
        for kind in list(times)[:: 1 if turn % 2 else -1]:
            times[kind].append(_training_seconds(options.tokens, kind))
    medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    for kind, seconds in times.items():
        cost = medians[kind] / medians["no"] - 1
        runs = ", ".join(f"{s:.2f}" for s in seconds)
        print(f"{kind} snapshots: {cost:+.2%} (bar: at most 2%), median {medians[kind]:.2f} s of {runs}")


def _training_seconds(tokens: float, kinds: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "training.total_tokens": tokens,
            "training.log_interval_tokens": 51_200,
            "evaluation.tokens": 256,
            "evaluation.batch_size_sequences": 2,
            "preview.windows": "",
            "checkpoint.keep_states_at_tokens": "",
            "checkpoint.state_interval_tokens": 1e12,
            "checkpoint.kinds": "point" if kinds == "no" else kinds,
        }
        if kinds == "no":
            keys["checkpoint.interval_tokens"] = 1e12
        overrides = [f"--config.{key}={value}" for key, value in keys.items()]
        pma = [sys.executable, "-m", "pma_jax.cli"]
        command = [*pma, "train", "--config", "demo", "--workdir", f"{folder}/run", *overrides]
        subprocess.run(command, check=True, capture_output=True)
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [r["seconds"] for r in records if r["kind"] == "train" and r["tokens"] >= WARM_TOKENS]
    return seconds[-1] - seconds[0]


if __name__ == "__main__":
    main()
