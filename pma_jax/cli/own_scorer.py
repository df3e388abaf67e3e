"""The scorer of `pma sweep CHECKPOINTS` without --score: `pma evaluate`, for models of pma_jax and of Hugging Face.

Before the first merge, it scores the newest checkpoint (with tasks, on one document of each), so that what fails for
all merges is an error at once. Does not import JAX: each score is computed by a process of its own.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.data.sampling import SELECT
from pma_jax.evaluation import hf_directory, scorer
from pma_jax.evaluation.grid import Grid
from pma_jax.evaluation.grid_plan import SweepSettings, plan_sweep
from pma_jax.storage.formats.open import open_if_deferred
from pma_jax.storage.formats.source import CheckpointSource

_LOSS = "loss"
_ANSWER_BITS = "bits_per_byte_of_answer"
_PROGRAM = (sys.executable, "-m", "pma_jax.cli")


def words(options: argparse.Namespace, limit: int | None = None) -> tuple[str, ...]:
    """Return the words of `pma evaluate` that score a directory, without the program.

    Args:
        options: The options of `pma sweep`.
        limit: Number of documents of each task; None: as the options say.
    """
    limit = options.limit if limit is None else limit
    tasks = ["--tasks", ",".join(options.tasks)] if options.tasks is not None else []
    tasks += ["--limit", str(limit)] if limit is not None else []
    tasks += ["--shots", str(options.shots)] if options.shots is not None else []
    keys = [f"--config.{override}" for override in options.overrides]
    if any(scorer.PLACEHOLDER in word for word in [*tasks, *keys]):
        raise UserError(f"{scorer.PLACEHOLDER} stands for a merge's directory: name tasks and keys without it")
    return ("evaluate", scorer.PLACEHOLDER, "--numbers", "--part", SELECT, *tasks, *keys)


def command(options: argparse.Namespace) -> tuple[str, tuple[str, ...]]:
    """Return the command that scores a directory, as text for sweep.json, and as the words that run it."""
    text = shlex.join(("pma", *words(options))).replace(shlex.quote(scorer.PLACEHOLDER), scorer.PLACEHOLDER)
    return text, (*_PROGRAM, *words(options))


def check_checkpoints(sources: Iterable[CheckpointSource], options: argparse.Namespace) -> None:
    """Check that `pma evaluate` opens merges of the checkpoints, as far as it is known without reading them.

    Raises:
        UserError: A checkpoint is neither a model of pma_jax nor of Hugging Face, a package is not installed, or an
            option gives merges another layout.
    """
    for name, is_given in (("--subtree", bool(options.subtrees)), ("--format", options.format != "keep")):
        if is_given:
            raise UserError(
                f"{name} needs --score: without it, `pma evaluate` scores the merges, which opens models of pma_jax "
                f"and of Hugging Face as they were; leave out {name}"
            )
    for source in sources:
        if source.format == "deferred" or hf_directory.is_model_directory(source.path):
            hf_directory.check_installed()
        elif not (source.path / "params").is_dir():
            raise UserError(
                f"{source.origin} is neither a model of pma_jax nor of Hugging Face: give --score 'COMMAND {{}}', a "
                "program that scores the directory of a merge"
            )


def choose_metric(
    grid: Grid, settings: SweepSettings, options: argparse.Namespace, log: Callable[[str], None]
) -> SweepSettings:
    """Score the newest checkpoint if scores are missing; return the settings with the number that ranks the merges.

    Raises:
        UserError: As `plan_sweep`; `pma evaluate` fails; or it does not give the number.
    """
    printed: dict[str, Any] | None = None
    if plan_sweep(grid, settings).todo or options.tasks is not None:
        printed = _score_newest(grid, settings, options, log)
    names = [name for name, value in (printed or {}).items() if isinstance(value, int | float)]
    metric = options.metric or (_LOSS if options.tasks is None else _first_answer_bits(options.tasks, names))
    if printed is not None and metric not in names:
        raise UserError(f"`pma evaluate` gives {', '.join(names[:20])}, not {metric}: choose one with --metric")
    higher = printed.get("higher_is_better", []) if printed else []
    best = settings.best if "best" in getattr(options, "given", ()) else "highest" if metric in higher else "lowest"
    log(f"note: the merge with the {best} {metric} is the best; --metric and --best choose another")
    held_out, asked = (printed.get(name) if printed else None for name in ("held_out", "asked"))
    return dataclasses.replace(settings, metric=metric, best=best, held_out=held_out, asked=asked)


def _first_answer_bits(tasks: Sequence[str], names: Sequence[str]) -> str:
    """Return the name of the bits per byte of the answers of the first task, of which the names may be others'."""
    expected = f"{tasks[0]}/{_ANSWER_BITS}"
    found = [name for name in names if name.endswith(f"/{_ANSWER_BITS}")]
    return found[0] if len(found) == 1 else expected  # a path of a task is not its name


def _score_newest(
    grid: Grid, settings: SweepSettings, options: argparse.Namespace, log: Callable[[str], None]
) -> dict[str, Any]:
    """Return what `pma evaluate` prints of the newest checkpoint of the grid, which is downloaded if it is on the hub.

    Raises:
        UserError: It fails.
    """
    newest = max((cell for cell in grid.cells if cell.is_raw), key=lambda cell: cell.end)
    source = open_if_deferred(grid.series.sources[int(np.flatnonzero(newest.coefficients)[-1])])
    check_checkpoints([source], options)
    limit = None if options.tasks is None else 1
    log(f"checking that `pma evaluate` scores {source.path}")
    with tempfile.TemporaryDirectory() as folder, scorer.running_scorers() as scorers:
        log_path = Path(folder) / "check"
        score = scorers.score(
            (*_PROGRAM, *words(options, limit)), source.path.absolute(), log_path, settings.timeout_seconds
        )
        error = scorer.last_line(Path(f"{log_path}.err")).removeprefix("error: ")
        if score.failure is not None:
            raise UserError(f"`pma evaluate` does not score {source.path}: {error or score.failure}")
        return json.loads(scorer.last_line(Path(f"{log_path}.out")))
