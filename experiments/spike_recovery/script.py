"""Does a collapsed run recover from the mean of earlier snapshots? (PMA, Section 4.5, Figure 7)

Command:   python experiments/spike_recovery/script.py --runs runs/science --jobs 2

For each seed, in order, a small decoder is trained at a rate that is far too high. The first ten seeds whose runs
collapse permanently are used: each arm starts from the collapsing run's own state and snapshots from before the spike,
reaches the spike, and reacts to it as its configuration specifies.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arms import BEFORE_SPIKE, FROM_SCRATCH, arms_study, make_config, read_seed
from recovery_page import NOTHING, draw, judge, report, summarize

from pma_jax.studies import run_cache
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import OtherWork, Plan, run_workers
from pma_jax.studies.study import Study

COLLAPSES = 10  # collapsed seeds to use
# Tried in this order; the setting and the detector were chosen on seeds 0 to 3.
DEFAULTS = {"sizes": ("science_spikes",), "seeds": tuple(range(10, 30))}
TRAINED_SHARE = 0.6  # of the tokens that an arm from before the spike trains, for the estimate
EVALUATIONS = 4  # of an arm


def plan(study: Study) -> Plan:
    """Estimate the arms of the first seeds that the cache does not have; which seeds collapse is not known before."""
    size = study.sizes[0]
    tokens = study.trunk_config(size, study.seeds[0]).training.total_tokens
    trained = round((1 + len(FROM_SCRATCH) + TRAINED_SHARE * len(BEFORE_SPIKE)) * tokens)
    read = EVALUATIONS * (1 + len(FROM_SCRATCH) + len(BEFORE_SPIKE)) * study.evaluation_tokens
    missing = [seed for seed in study.seeds if not has_arms(study, seed)]
    cached = len(study.seeds) - len(missing)
    return [OtherWork(f"{size}, all arms", size, seed, trained, read) for seed in missing[: COLLAPSES - cached]]


def has_arms(study: Study, seed: int) -> bool:
    """Return whether the cache has the arm of a seed that is trained last."""
    study, config = arms_study(study), make_config(study, seed, list(FROM_SCRATCH.values())[-1])
    return run_cache.find(study.cache, config) is not None or run_cache.has_diverged(study.cache, config)


def measure(study: Study) -> dict[str, Any]:
    """Return how each arm went, for the first seeds that collapse, and the seeds before them that did not."""
    seeds: dict[str, dict[str, Any]] = {}
    never_collapsed: list[int] = []
    remaining = list(study.seeds)
    while remaining and len(seeds) < COLLAPSES:
        batch = remaining[: COLLAPSES - len(seeds)]
        remaining = remaining[len(batch) :]
        train_seeds(study, batch)
        for seed in batch:
            arms = read_seed(arms_study(study), seed)
            if arms[NOTHING]["onset_tokens"] is None:
                never_collapsed.append(seed)
            else:
                seeds[str(seed)] = judge(arms)
    return study.describe_size(study.sizes[0]) | {"seeds": seeds, "never_collapsed": never_collapsed}


def train_seeds(study: Study, seeds: Sequence[int]) -> None:
    """Train the arms of seeds that the cache does not have, one process per seed, as many at a time as workers.

    Raises:
        UserError: There are fewer cores than workers, or a worker failed.
    """
    if study.workers < 2:  # `read_seed` trains them
        return
    missing = [seed for seed in seeds if not has_arms(study, seed)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "study.json")
        path.write_text(json.dumps(arms_study(study).settings()))
        command = (str(Path(__file__).with_name("arms.py")), str(path))
        run_workers({f"seed {seed}": (*command, str(seed)) for seed in missing}, study.workers)


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS)
