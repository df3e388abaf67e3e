"""Merging snapshots of ours: on the mesh as arrays, or from storage to storage."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from numpy.typing import ArrayLike

from pma_jax.merging import from_storage
from pma_jax.merging.averager import average_stream
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.snapshots import Snapshot, check_one_kind, read_snapshot, restore_params
from pma_jax.runtime.mesh import local_mesh
from pma_jax.storage.paths import absolute_path


def average(snapshots: Sequence[Snapshot], weights: ArrayLike, mesh: jax.sharding.Mesh | None = None) -> Any:
    """sum_k weights[k] * snapshots[k], float32, sharded on `mesh` (default: all devices).

    Reads one snapshot at a time: each device holds the sum and one model. Raises ValueError when the counts differ or
    a snapshot does not fit the first one's model, or is of another kind (points and block means do not mix).
    """
    if len(snapshots) != np.size(weights):
        raise ValueError(f"{np.size(weights)} weights for {len(snapshots)} snapshots: give one weight a snapshot")
    check_one_kind(snapshots)
    mesh = mesh or local_mesh()
    abstract = abstract_params(snapshots[0].config.model, mesh)
    with jax.set_mesh(mesh):
        (merged,) = average_stream((restore_params(s, abstract) for s in snapshots), np.atleast_2d(weights))
        return merged


def merge(snapshots: Sequence[Snapshot], weights: ArrayLike, out: epath.PathLike, recipe: str = "weights") -> Snapshot:
    """Write the merge of `snapshots` at `out`, as a snapshot that says what it was made of.

    From storage to storage: no model is ever held, in memory or on a device. Its tokens and step are those of the
    newest input, its kind that of all. Raises ValueError when `out` exists, the inputs do not fit, or a value is not
    finite.
    """
    target = absolute_path(out)
    from_storage.merge_one([str(s.path) for s in snapshots], weights, str(target), recipe)
    return read_snapshot(target)
