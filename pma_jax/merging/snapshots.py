"""Merging a run's snapshots: on the mesh as arrays, or from storage to storage."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from numpy.typing import ArrayLike

from pma_jax import checkpoint
from pma_jax.checkpoint import Snapshot
from pma_jax.merging.averager import average_stream
from pma_jax.mesh import local_mesh


def select(
    snapshots: Sequence[Snapshot], last: int | None = None, between: tuple[int, int] | None = None
) -> list[Snapshot]:
    """Those from `between[0]` to `between[1]` tokens, both included, and of these the newest `last`.

    Raises ValueError when there are fewer than `last`, or none.
    """
    first, end = between or (0, snapshots[-1].tokens)
    chosen = [s for s in snapshots if first <= s.tokens <= end]
    if not chosen or (last and len(chosen) < last):
        raise ValueError(
            f"{last or 'some'} snapshots were asked for, and {len(chosen)} lie between {first:,} and {end:,} tokens"
        )
    return chosen[-last:] if last else chosen


def average(snapshots: Sequence[Snapshot], weights: ArrayLike, mesh: jax.sharding.Mesh | None = None) -> Any:
    """sum_k weights[k] * snapshots[k], float32, sharded on `mesh` (default: all devices).

    Reads one snapshot at a time: each device holds the sum and one model. Raises ValueError when the counts differ or
    a snapshot does not fit the first one's model, or is of another kind (points and block means do not mix).
    """
    if len(snapshots) != np.size(weights):
        raise ValueError(f"{np.size(weights)} weights for {len(snapshots)} snapshots: give one weight a snapshot")
    checkpoint.check_one_kind(snapshots)
    mesh = mesh or local_mesh()
    abstract = checkpoint.abstract_params(snapshots[0].config, mesh)
    with jax.set_mesh(mesh):
        return average_stream((checkpoint.restore_params(s, abstract) for s in snapshots), weights)


def merge(
    snapshots: Sequence[Snapshot],
    weights: ArrayLike,
    out: epath.PathLike,
    recipe: str = "weights",
    mesh: jax.sharding.Mesh | None = None,
) -> Snapshot:
    """Write the merge of `snapshots` at `out`, as a snapshot that says what it was made of.

    Its tokens and step are those of the newest input, its kind that of all. Raises ValueError when `out`
    exists or the inputs do not fit.
    """
    if checkpoint.absolute(out).exists():
        raise ValueError(f"{out} exists already: choose another --out, or remove it")
    params = average(snapshots, weights, mesh)
    provenance = {
        "recipe": recipe,
        "coefficients": np.asarray(weights, np.float64).tolist(),
        "sources": [{"path": str(s.path), "step": s.step, "tokens": s.tokens, "loss": s.loss} for s in snapshots],
        "accumulation_dtype": "float32",
    }
    merged = dataclasses.replace(snapshots[-1], path=checkpoint.absolute(out), loss=None, merge=provenance)
    checkpoint.write_snapshot(params, merged)
    return merged
