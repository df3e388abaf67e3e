"""Merging a run's snapshots: into arrays on a mesh, or from storage to storage."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from numpy.typing import ArrayLike

from pma_jax.merging import from_storage
from pma_jax.merging.averager import weighted_sums_of_stream
from pma_jax.merging.engine.rounding import validate_weights
from pma_jax.merging.selection import check_one_snapshot_kind
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.snapshots import Snapshot, read_snapshot, restore_params
from pma_jax.runtime.mesh import data_parallel_mesh
from pma_jax.storage.paths import absolute_path


def average(snapshots: Sequence[Snapshot], weights: ArrayLike, mesh: jax.sharding.Mesh | None = None) -> Any:
    """Return the weighted sum of the snapshots' parameters, sum_k weights[k] · snapshots[k], computed in float32.

    Snapshots are read one at a time: each device holds its shards of the sum and of at most two snapshots.

    Args:
        snapshots: K snapshots of one model and one kind: all points (the parameters after one step) or all block means
            (averages over the steps of one interval).
        weights: [K], one per snapshot; not normalised.
        mesh: The mesh of the result. Defaults to a mesh of all devices.

    Returns:
        The parameters, sharded on the mesh.

    Raises:
        UserError: The number of weights and snapshots differs, a weight is not finite, or a snapshot is corrupt, does
            not fit the model of the first one, or is of another kind.
    """
    weights_1xK = validate_weights(np.atleast_2d(weights), len(snapshots))
    check_one_snapshot_kind({str(s.path): s.kind for s in snapshots})
    mesh = mesh or data_parallel_mesh()
    abstract = abstract_params(snapshots[0].config.model, mesh)
    with jax.set_mesh(mesh):
        (merged,) = weighted_sums_of_stream((restore_params(s, abstract) for s in snapshots), weights_1xK)
        return merged


def merge(snapshots: Sequence[Snapshot], weights: ArrayLike, out: epath.PathLike, recipe: str = "weights") -> Snapshot:
    """Merge snapshots into a new snapshot, part by part, without holding a complete model in memory.

    Args:
        snapshots: K snapshots of one model and one kind: all points (the parameters after one step) or all block means
            (averages over the steps of one interval).
        weights: [K], one per snapshot; not normalised.
        out: The directory to create.
        recipe: Name of the merge method, recorded in the metadata. It does not affect the result.

    Returns:
        The merged snapshot, with the tokens and step of the newest input.

    Raises:
        UserError: `out` exists, the snapshots do not fit together, or a weight or a parameter is not finite.
    """
    target = absolute_path(out)
    from_storage.merge([str(s.path) for s in snapshots], weights, str(target), recipe)
    return read_snapshot(target)
