"""Does a collapsed run recover from the mean of earlier snapshots? (PMA, Section 4.5, Figure 7)

Command:   python experiments/spike_recovery/script.py --runs runs/spike_recovery

For each seed, in order, a small decoder is trained at a rate that is far too high. The first ten seeds whose runs
collapse permanently are used: each arm starts from the collapsing run's own state and snapshots from before the spike,
reaches the spike, and reacts to it as its configuration specifies. Arms that --runs already contains are not repeated,
so several processes can share the seeds (--seeds), and one more collects the results. Other options
(`--config.key=value`) apply to every run.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import jax
from recovery_page import NOTHING, arm_name, draw, format_report, judge

from pma_jax import config as configuration
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.held_out import read_sample_of_run
from pma_jax.evaluation.sweep import RAW
from pma_jax.evaluation.trajectory import evaluate_pairs
from pma_jax.runs import states
from pma_jax.runs.directory import create_run, is_run, open_run
from pma_jax.storage.paths import absolute_path
from pma_jax.studies import pages
from pma_jax.training import loop, rollback

FOLDER = Path(__file__).parent
COLLAPSES = 10  # collapsed seeds to use
SEEDS = range(10, 40)  # tried in this order; the setting and the detector were chosen on seeds 0 to 3
STEP = 512  # tokens per step
TRAINING_EVALUATION_TOKENS = 8192
EVALUATION_TOKENS = 131_072  # of the losses that decide whether an arm passes
BEFORE = 3  # snapshots before the spike whose median loss is the reference
RATE, CLEAN_RATE = 0.08, 0.01  # peak learning rates: of the runs that collapse, and of the arm `clean`
BASE = [
    "data.package=stdlib-without-tests",
    "model.width=32",
    "model.layers=4",
    "model.heads=2",
    "model.kv_heads=2",
    "model.head_dim=16",
    "model.hidden=96",
    "training.sequence_length_tokens=64",
    "training.batch_size_sequences=8",
    f"training.total_tokens={1000 * STEP}",
    f"training.log_interval_tokens={STEP}",
    f"schedule.peak_rate={RATE}",
    f"schedule.warmup_tokens={50 * STEP}",
    # Everything that stabilises a run at such a rate is off, and b2 is that of the original Adam paper.
    "optimizer.clip_norm=0",
    "optimizer.weight_decay=0",
    "optimizer.b2=0.999",
    f"checkpoint.interval_tokens={25 * STEP}",
    "checkpoint.kinds=point",
    f"checkpoint.state_interval_tokens={25 * STEP}",
    "checkpoint.keep_states=1000",
    "checkpoint.keep_states_at_tokens=()",
    f"evaluation.tokens={TRAINING_EVALUATION_TOKENS}",
    "preview.windows=()",
    "mesh.cpu_devices=1",
    # A batch of 512 tokens is noisy (spread 0.2 nats): a collapse rises only a few spreads, but it lasts.
    f"spikes.window_tokens={100 * STEP}",
    f"spikes.patience_tokens={60 * STEP}",
    "spikes.loss_z=1.7",
    "spikes.minimum_rise_nats=0.2",
    "spikes.confirm_steps=20",
]
FROM_SCRATCH = {  # arms that are trained from the first step
    "clean": [f"schedule.peak_rate={CLEAN_RATE}"],
    "skip updates": ["spikes.skip_gradient_z=4"],
}
ROLL_BACK = ("spikes.attempts=1",)
WINDOWS = (1, 3, 5)  # snapshots whose mean a run goes back to
# Of the arms that go back: what each level sets. `recovery_page` reads the levels from the names of the arms.
FACTORS = {
    "optimizer": {"restored": "spikes.optimizer=restore", "reset": "spikes.optimizer=reset"},
    "warm-up": {"none": "spikes.warmup_tokens=0", "25 steps": f"spikes.warmup_tokens={25 * STEP}"},
    "N": {str(n): f"spikes.snapshots={n}" for n in WINDOWS},
}


def factorial() -> dict[str, list[str]]:
    """Return the arms that go back to a mean of snapshots, one per combination of the levels of `FACTORS`."""
    names = [list(levels) for levels in FACTORS.values()]
    return {
        arm_name(n, optimizer, warm_up): [
            *ROLL_BACK,
            FACTORS["optimizer"][optimizer],
            FACTORS["warm-up"][warm_up],
            FACTORS["N"][n],
        ]
        for optimizer, warm_up, n in itertools.product(*names)
    }


ARMS = {  # arms that start before the spike of `nothing`
    "restart, pass over data": [*ROLL_BACK, "spikes.optimizer=restore", "spikes.snapshots=1", "spikes.skip_data=true"],
    **factorial(),
}


def main() -> None:
    """Train the arms that --runs does not contain yet, then write results.json and figure.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="seeds, tried in this order")
    parser.add_argument("--out", type=Path, default=FOLDER, help="directory of results.json and figure.png")
    parser.add_argument("--evaluation-tokens", type=int, default=EVALUATION_TOKENS, help="held-out tokens of verdicts")
    options, rest = parser.parse_known_args()
    overrides = [word.removeprefix("--config.") for word in rest]
    train_arm = functools.partial(train, evaluation_tokens=options.evaluation_tokens)
    options.runs.mkdir(parents=True, exist_ok=True)
    # All runs share a few programs: compile each of them once.
    jax.config.update("jax_compilation_cache_dir", str(options.runs.resolve() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    seeds: dict[str, dict[str, Any]] = {}
    never_collapsed = []
    for seed in map(int, options.seeds.split(",")):
        folder = options.runs / str(seed)
        nothing = train_arm(folder, NOTHING, seed, overrides)
        if nothing["onset_tokens"] is None:
            never_collapsed.append(seed)
            continue
        arms = {NOTHING: nothing}
        arms |= {arm: train_arm(folder, arm, seed, [*overrides, *keys]) for arm, keys in FROM_SCRATCH.items()}
        for arm, keys in ARMS.items():
            copy_before_spike(folder, arm, seed, [*overrides, *keys], nothing["onset_tokens"])
            arms[arm] = train_arm(folder, arm, seed, [*overrides, *keys])
        seeds[str(seed)] = judge(arms)
        if len(seeds) == COLLAPSES:
            break
    results = {
        "rate": RATE,
        "clean_rate": CLEAN_RATE,
        "text": next((arms[NOTHING]["text"] for arms in seeds.values()), None),
        "seeds": seeds,
        "never_collapsed": never_collapsed,
        "machine_hours": sum(arm["seconds"] for arms in seeds.values() for arm in arms.values()) / 3600,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if seeds:
        (options.out / "figure.png").write_bytes(draw(results))
        page = options.out / "README.md"
        if page.exists():
            page.write_text(pages.replace_results(page.read_text(), format_report(results)))
        print(format_report(results))


def make_config(seed: int, overrides: list[str]) -> Any:
    """Return the configuration of a run."""
    raw = configuration.load("demo")
    configuration.override(raw, [*BASE, *overrides, f"training.seed={seed}"])
    return configuration.resolve(raw)


def train(folder: Path, arm: str, seed: int, overrides: list[str], evaluation_tokens: int) -> dict[str, Any]:
    """Train one arm until it completes or gives up; return its record, which is stored next to the run."""
    path = folder / folder_name(arm)
    record_path = path.with_suffix(".json")
    if record_path.exists():
        return json.loads(record_path.read_text())
    began, error = time.perf_counter(), None
    try:
        loop.train(make_config(seed, overrides), path)
    except ValueError as raised:
        error = str(raised)
    run = open_run(path)
    records, events = run.metrics, rollback.events(run)
    declared = [r for r in records if r["kind"] == "spike" and r["verdict"] == "irrecoverable"]
    steps = [r for r in records if r["kind"] == "train"]
    onset = declared[0]["onset_tokens"] if declared else None
    before = [s.tokens for s in run.snapshots if onset is not None and s.tokens < onset][-BEFORE:]
    # The losses of the marks are on the part `select`; what is published is on the part `report`.
    config = dataclasses.replace(run.config.evaluation, tokens=evaluation_tokens)
    wanted = [*before, run.snapshots[-1].tokens]
    evaluated = evaluate_pairs(run, [(RAW, tokens) for tokens in wanted], REPORT, config)
    evaluations = sorted([tokens, loss.loss] for (_, tokens), loss in evaluated.items())
    record = {
        "onset_tokens": onset,
        "went_back_to_tokens": [event["tokens"] for event in events],
        "declared_tokens": [event["spike"]["tokens"] for event in events] + [r["tokens"] for r in declared],
        "gave_up": error,
        "final_tokens": evaluations[-1][0],
        "final_loss": evaluations[-1][1],
        "skipped_updates": steps[-1].get("skipped_updates"),
        "seconds": time.perf_counter() - began,
        "evaluations": evaluations,
        "text": read_sample_of_run(run, REPORT, config).describe(),
        "curve": thin_curve(steps),
    }
    record_path.write_text(json.dumps(record) + "\n")
    return record


def copy_before_spike(folder: Path, arm: str, seed: int, overrides: list[str], onset_tokens: int) -> None:
    """Create an arm's run from the collapsing run before its spike: its state, snapshots and metrics."""
    path = folder / folder_name(arm)
    if path.with_suffix(".json").exists() or is_run(path):
        return
    source = open_run(folder / folder_name(NOTHING))
    state = [s for s in source.states if s.tokens < onset_tokens][-1]
    if path.exists():
        shutil.rmtree(path)
    states.copy_state(state, absolute_path(path))
    for snapshot in source.snapshots:
        if snapshot.tokens <= state.tokens:
            shutil.copytree(snapshot.path, path / "snapshots" / snapshot.path.name)
    shutil.copy(source.path / "metrics.jsonl", path / "metrics.jsonl")
    create_run(path, make_config(seed, overrides), source.metadata)


def thin_curve(steps: list[dict[str, Any]], every: int = 10) -> list[list[float]]:
    """Return [tokens, median loss, largest gradient norm] of every `every` steps."""
    groups = [steps[i : i + every] for i in range(0, len(steps), every)]
    return [
        [
            group[-1]["tokens"],
            round(statistics.median(r["loss"] for r in group), 4),
            round(max(r["gradient_norm"] for r in group), 4),
        ]
        for group in groups
    ]


def folder_name(arm: str) -> str:
    """Return the name of an arm's run directory."""
    return arm.lower().replace(", ", "-").replace(" ", "-").replace("=", "")


if __name__ == "__main__":
    main()
