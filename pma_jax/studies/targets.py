"""The best annealing that ends at a horizon, by the results of the experiment annealing: what merges are judged by.

Also the best cosine of the same results, which is what many runs are planned with.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.sweep import RAW
from pma_jax.storage.json_files import parse_untrusted_json
from pma_jax.studies.planned import PlannedEvaluation, PlannedRun, get_by_seed
from pma_jax.studies.study import Study

HORIZONS = {"a quarter": 4, "half": 2, "all": 1}  # of a size's tokens: name -> divisor
ALL_SHAPES, COSINE = "best", "cosine"  # keys of the results; a cosine takes all tokens of its run


def horizon_units(study: Study) -> dict[str, int]:
    """Return the horizons in units of a trunk."""
    return {name: study.units // divisor for name, divisor in HORIZONS.items()}


def target_runs(study: Study, results: Path, size: str, which: str = ALL_SHAPES) -> dict[str, list[PlannedRun]]:
    """List the runs of the best annealing of each horizon, one per seed of the study.

    Args:
        study: The study; one that does not search settings, as in tests, takes a decay over half of the tokens.
        results: results.json of the experiment annealing.
        size: The size.
        which: The best of `ALL_SHAPES`, or the best `COSINE`.

    Raises:
        UserError: The results do not exist, lack the size, or are of another text or number of tokens.
    """
    runs = {}
    for horizon, divisor in HORIZONS.items():
        total = study.trunk_config(size, study.seeds[0]).training.total_tokens // divisor
        if study.searches_settings:
            units, setting = _read_best(study, results, size, which, horizon, total)
        else:
            units = study.units // 4
            decay = [
                f"schedule.decay={'cosine' if which == COSINE else 'linear'}",
                f"schedule.decay_start_tokens={total // 2}",
            ]
            setting = [f"training.total_tokens={total}", *decay]
        judged = PlannedEvaluation((RAW,), (units,), REPORT)
        changes = (*setting, "checkpoint.kinds=point")
        runs[horizon] = [PlannedRun(size, seed, changes, None, (judged,), units) for seed in study.seeds]
    return runs


def read_target(study: Study, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return the losses of the best annealing of a horizon, and its setting, in the layout of results.json.

    Returns:
        "setting": overrides. "end": its last unit. "document_tokens" and "nats", as
        `Study.document_losses_over_seeds` returns them.
    """
    losses = study.document_losses_over_seeds(get_by_seed(study, runs), [RAW], [runs[0].units], REPORT)
    return {"setting": list(runs[0].changes), "end": runs[0].units, **losses}


def _read_best(
    study: Study, path: Path, size: str, which: str, horizon: str, total_tokens: int
) -> tuple[int, list[str]]:
    """Return the units and the setting of the best annealing; raises UserError, see `target_runs`."""
    if not path.exists():
        raise UserError(f"no tuned annealing in {path}: run experiments/annealing/script.py first")
    results = parse_untrusted_json(path.read_bytes(), str(path), True)
    if results["made"]["text"]["corpus_digest"] != study.describe_text()["corpus_digest"]:
        raise UserError(f"{path} was made on another text: run experiments/annealing/script.py on this one")
    if size not in results["sizes"]:
        raise UserError(f"{path} has no annealing of {size}: run experiments/annealing/script.py --add")
    if which not in results["sizes"][size]:
        raise UserError(f"{path} has no {which} of {size}: run its script again")
    best = results["sizes"][size][which][horizon]
    if f"training.total_tokens={total_tokens}" not in best["setting"]:
        raise UserError(f"{path} has no annealing of {size} over {total_tokens:,} tokens: run its script again")
    return best["units"], best["setting"]
