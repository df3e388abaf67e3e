"""What does training into a bucket cost over training onto a disk?

The demo is trained into gs:// and onto a disk in turn, with its snapshots and states. The bucket is a server of Google
Cloud Storage's interface on this machine (fake-gcs-server, of the extra `test`), which keeps objects in memory and
takes a share of its cores, as no real bucket does. Bar: 1.05 times the wall time. The first round of each is discarded,
as it compiles what later ones read from JAX's compilation cache.

Command:   python experiments/benchmarks/bucket_train.py SCRATCH

    --tokens 2048000  of each run: 20 snapshots of the demo
    --rounds 3        in turn, after the discarded one
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # the server is that of the tests

import fake_gcs  # noqa: E402

BAR = 1.05


def train(workdir: str, tokens: int, environment: dict[str, str]) -> float:
    """Train the demo into `workdir`, and return the seconds of the whole process."""
    command = [sys.executable, "-m", "pma_jax.cli", "train", "--config", "demo", "--workdir", workdir]
    started = time.monotonic()
    subprocess.run(
        [*command, f"--config.training.total_tokens={tokens}"], check=True, env=environment, stderr=subprocess.DEVNULL
    )
    return time.monotonic() - started


def main() -> None:
    """Measure and print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--tokens", type=int, default=2_048_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(options.scratch.resolve() / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    seconds: dict[str, list[float]] = {"bucket": [], "disk": []}
    with fake_gcs.serve("bucket") as url:
        proxy = fake_gcs.Proxy(url)  # only for its environment: the runs use the server itself
        to_bucket = {name: value.replace(proxy.url, url) for name, value in proxy.environment.items()}
        proxy.close()
        for number in range(options.rounds + 1):
            took = {"bucket": train(f"gs://bucket/run{number}", options.tokens, environment | to_bucket)}
            took["disk"] = train(str(options.scratch / "run"), options.tokens, environment)
            shutil.rmtree(options.scratch / "run")
            print(", ".join(f"{place} {took[place]:.1f} s" for place in took), flush=True)
            if number:
                for place in took:
                    seconds[place].append(took[place])
    bucket, disk = (statistics.median(seconds[place]) for place in ("bucket", "disk"))
    print(f"bucket {bucket:.1f} s, disk {disk:.1f} s: {bucket / disk:.3f}x (bar {BAR}x)")


if __name__ == "__main__":
    main()
