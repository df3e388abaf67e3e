"""A grid of merges of a run's newest snapshots, each evaluated."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pma_jax import checkpoint
from pma_jax.checkpoint import Run
from pma_jax.evaluation.held_out import evaluate_all
from pma_jax.merging import recipes
from pma_jax.merging.averager import average_many
from pma_jax.mesh import make_mesh


def sweep(run: Run, recipe_texts: Sequence[str], windows: Sequence[int]) -> dict[str, Any]:
    """Evaluate every recipe over every window, at the newest snapshot; writes RUN/sweep.json.

    Each snapshot is read once; the same grid at the same tokens is not computed again. Raises ValueError when the run
    has fewer snapshots than the largest window.
    """
    snapshots = run.snapshots[-max(windows) :]
    if len(snapshots) < max(windows):
        raise ValueError(f"{run.path} has {len(snapshots)} snapshots, fewer than the window of {max(windows)}")
    tokens = [s.tokens for s in snapshots]
    grid = [(recipe, n) for recipe in recipe_texts for n in windows]
    stored = _stored(run)
    if stored and stored["tokens"] == tokens[-1] and [r["text"] for r in stored["rows"]] == [_text(*g) for g in grid]:
        return stored
    coefficients_RxK = np.zeros((len(grid), len(snapshots)))
    for row, (recipe, n) in zip(coefficients_RxK, grid, strict=True):
        row[-n:] = recipes.coefficients(recipe, tokens[-n:])

    mesh = make_mesh(run.config.mesh)
    abstract = checkpoint.abstract_params(run.config, mesh)
    params = [checkpoint.restore_params(s, abstract) for s in snapshots]
    merged = average_many(params, coefficients_RxK)
    raw_loss, *losses = evaluate_all(run.config, [params[-1], *merged], mesh)
    rows = [
        {"recipe": recipe, "window": n, "text": _text(recipe, n), "loss": loss}
        for (recipe, n), loss in zip(grid, losses, strict=True)
    ]
    result = {"tokens": tokens[-1], "raw_loss": raw_loss, "rows": rows}
    checkpoint.write_text(run.path / "sweep.json", json.dumps(result, indent=2) + "\n")
    return result


def _text(recipe: str, window: int) -> str:
    return f"{recipe}:{window}"


def _stored(run: Run) -> dict[str, Any] | None:
    path = run.path / "sweep.json"
    return json.loads(path.read_text()) if path.exists() else None
