"""The arms of the experiment: train those of a seed, and read how each went.

Command of a worker:   python experiments/spike_recovery/arms.py STUDY.json SEED
"""

import dataclasses
import functools
import itertools
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from etils import epath
from recovery_page import CLEAN, NOTHING, PASS_OVER, WINDOWS, arm_name

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.config.errors import UserError, error_line
from pma_jax.evaluation.sweep import RAW
from pma_jax.runs import states
from pma_jax.runs.directory import Run, create_run
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.signals import Stopped
from pma_jax.studies import run_cache
from pma_jax.studies.study import Study
from pma_jax.training import rollback

BEFORE = 3  # snapshots before the spike whose median loss is the reference
KEEP_ALL_STATES = ("checkpoint.keep_states=1000",)
FROM_SCRATCH = {  # arms that are trained from the first step
    CLEAN: ("schedule.peak_rate=0.01",),
    "skip updates": ("spikes.skip_gradient_z=4",),
}
ROLL_BACK = ("spikes.attempts=1",)
# Of the arms that go back: what each level sets. `recovery_page` reads the levels from the names of the arms.
FACTORS = {
    "optimizer": {"restored": ("spikes.optimizer=restore",), "reset": ("spikes.optimizer=reset",)},
    "warm-up": {"none": ("spikes.warmup_tokens=0",), "25 steps": ("spikes.warmup_tokens=12800",)},
    "N": {n: (f"spikes.snapshots={n}",) for n in WINDOWS},  # snapshots whose mean a run goes back to
}


def factorial() -> dict[str, tuple[str, ...]]:
    """Return the arms that go back to a mean of snapshots, one per combination of the levels of `FACTORS`."""
    return {
        arm_name(n, optimizer, warm_up): (
            *ROLL_BACK,
            *FACTORS["optimizer"][optimizer],
            *FACTORS["warm-up"][warm_up],
            *FACTORS["N"][n],
        )
        for optimizer, warm_up, n in itertools.product(*FACTORS.values())
    }


BEFORE_SPIKE = {  # arms that start before the spike of `nothing`
    PASS_OVER: (
        *ROLL_BACK,
        "spikes.optimizer=restore",
        "spikes.snapshots=1",
        "spikes.skip_data=true",
    ),
    **factorial(),
}


def arms_study(study: Study) -> Study:
    """Return the study with a cache of its own for the arms: their logs are read, which recorded runs do not have."""
    return dataclasses.replace(study, cache=study.cache / "spike_recovery")


def read_seed(study: Study, seed: int) -> dict[str, dict[str, Any]]:
    """Train the arms of a seed that the cache does not have, and read all; without a collapse, only `nothing`.

    `study` is that of `arms_study`.
    """
    source, error = train(study, make_config(study, seed, KEEP_ALL_STATES))
    arms = {NOTHING: read_arm(study, source, error)}
    onset = arms[NOTHING]["onset_tokens"]
    if onset is None:
        return arms
    for arm, changes in BEFORE_SPIKE.items():
        config = make_config(study, seed, changes)
        start = functools.partial(copy_before_spike, source, onset, config)
        key = f"{run_cache.entry_key(study.cache, source)}-{configuration.digest(config)}"
        arms[arm] = read_arm(study, *train(study, config, key, start))
    for arm, changes in FROM_SCRATCH.items():
        arms[arm] = read_arm(study, *train(study, make_config(study, seed, changes)))
    return arms


def make_config(study: Study, seed: int, changes: Iterable[str] = ()) -> Config:
    """Return the configuration of a run: a log of every step, points, and a state with each of them."""
    trunk = study.trunk_config(study.sizes[0], seed)
    fixed = (
        f"training.log_interval_tokens={trunk.batch_tokens}",
        f"checkpoint.state_interval_tokens={trunk.checkpoint.interval_tokens}",
        "checkpoint.keep_states=3",
        "checkpoint.keep_states_at_tokens=()",
        "checkpoint.kinds=point",
    )
    return study.trunk_config(study.sizes[0], seed, (*fixed, *changes))


def train(
    study: Study, config: Config, key: str = "", start: Callable[[epath.Path], Any] | None = None
) -> tuple[Run, str]:
    """Return the run of an arm, trained until it completes or gives up, and why it gave up."""
    run, error = run_cache.get_even_if_diverged(study.cache, config, key, start)
    study.runs_used[str(run.path)] = run
    return run, error


def read_arm(study: Study, run: Run, error: str) -> dict[str, Any]:
    """Return how an arm went, in the layout of results.json."""
    records, events = run.metrics, rollback.events(run)
    declared = [r for r in records if r["kind"] == "spike" and r["verdict"] == "irrecoverable"]
    steps = [r for r in records if r["kind"] == "train"]
    onset = declared[0]["onset_tokens"] if declared else None
    before = [s.tokens for s in run.snapshots if onset is not None and s.tokens < onset][-BEFORE:]
    unit = study.unit_tokens(run)
    ends = [tokens // unit for tokens in (*before, run.snapshots[-1].tokens)]
    losses = {end * unit: loss for (_, end), loss in study.losses(run, [RAW], ends).items()}
    return {
        "onset_tokens": onset,
        "went_back_to_tokens": [event["tokens"] for event in events],
        "optimizers": [event["optimizer"] for event in events],
        "declared_tokens": [event["spike"]["tokens"] for event in events] + [r["tokens"] for r in declared],
        "gave_up": error or None,
        "final_tokens": ends[-1] * unit,
        "final_loss": losses[ends[-1] * unit],
        "skipped_updates": steps[-1].get("skipped_updates"),
        "evaluations": sorted([tokens, loss] for tokens, loss in losses.items()),
        "curve": thin_curve(steps),
    }


def copy_before_spike(source: Run, onset_tokens: int, config: Config, path: epath.Path) -> None:
    """Create an arm's run from the collapsing run before its spike: its state, snapshots and metrics."""
    state = [s for s in source.states if s.tokens < onset_tokens][-1]
    if path.exists():
        shutil.rmtree(path)
    states.copy_state(state, path)
    for snapshot in source.snapshots:
        if snapshot.tokens <= state.tokens:
            shutil.copytree(snapshot.path, path / "snapshots" / snapshot.path.name)
    shutil.copy(source.path / "metrics.jsonl", path / "metrics.jsonl")
    origin = {"path": str(source.path), "tokens": state.tokens, "step": state.step}
    create_run(path, config, source.metadata | {"forked_from": origin})


def thin_curve(steps: list[dict[str, Any]], every: int = 20) -> list[list[float]]:
    """Return [tokens, median loss] of every `every` steps."""
    groups = [steps[i : i + every] for i in range(0, len(steps), every)]
    return [[group[-1]["tokens"], round(statistics.median(r["loss"] for r in group), 4)] for group in groups]


if __name__ == "__main__":
    keep_freed_memory()
    try:
        read_seed(Study.from_settings(json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2]))
    except Stopped as stopped:
        raise SystemExit(stopped.status) from stopped
    except UserError as error:
        raise SystemExit(f"error: {error_line(error)}") from error
