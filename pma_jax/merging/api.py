"""Merging checkpoints: snapshots into arrays on a mesh, or checkpoints of any format from storage to storage."""

import os
from collections.abc import Sequence
from typing import Any, overload

import jax
import numpy as np
from etils import epath
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError
from pma_jax.config.same_model import check_one_model
from pma_jax.merging import from_storage
from pma_jax.merging.averager import weighted_sums_of_stream
from pma_jax.merging.engine.rounding import validate_weights
from pma_jax.merging.gather import check_distinct
from pma_jax.merging.selection import check_one_snapshot_kind
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.directory import is_run
from pma_jax.runs.snapshots import Snapshot, is_snapshot, read_snapshot, restore_params
from pma_jax.runtime.mesh import data_parallel_mesh
from pma_jax.storage.formats import hub
from pma_jax.storage.paths import absolute_path, expand_user


def average(
    snapshots: Sequence[Snapshot | epath.PathLike], weights: ArrayLike, mesh: jax.sharding.Mesh | None = None
) -> Any:
    """Return the weighted sum of the snapshots' parameters, sum_k weights[k] · snapshots[k], computed in float32.

    Snapshots are read one at a time: each device holds its shards of the sum and of at most two snapshots.

    Args:
        snapshots: K snapshots, or their paths, of one model and one kind: all points (the parameters after one step) or
            all block means (averages over the steps of one interval), in any order.
        weights: [K], the weight of each element of `snapshots`; not normalised.
        mesh: The mesh of the result. Defaults to a mesh of all devices.

    Returns:
        The parameters, sharded on the mesh.

    Raises:
        UserError: The number of weights and snapshots differs, a weight is not finite, one snapshot is given twice, a
            path is not a snapshot, or a snapshot is corrupt, or of another model or kind than the first one.
    """
    elements = _check_sequence(snapshots)
    weights_K = validate_weights(np.atleast_2d(weights), len(elements))[0]
    opened = [x if isinstance(x, Snapshot) else _read_one_snapshot(x) for x in elements]
    check_distinct([str(s.path) for s in opened])
    check_one_snapshot_kind({str(s.path): s.kind for s in opened})
    check_one_model({str(s.path): s.config.model for s in opened})
    # `merge` adds the newest last too: both return the same bits.
    newest = max(range(len(opened)), key=lambda k: (opened[k].tokens, k))
    order = [*(k for k in range(len(opened)) if k != newest), newest]
    mesh = mesh or data_parallel_mesh()
    abstract = abstract_params(opened[order[0]].config.model, mesh)
    with jax.set_mesh(mesh):
        (merged,) = weighted_sums_of_stream(
            (restore_params(opened[k], abstract) for k in order), weights_K[None, order]
        )
        return merged


@overload
def merge(
    snapshots: Sequence[Snapshot], weights: ArrayLike, out: epath.PathLike, recipe: str = "weights"
) -> Snapshot: ...
@overload
def merge(
    snapshots: Sequence[Snapshot | epath.PathLike], weights: ArrayLike, out: epath.PathLike, recipe: str = "weights"
) -> Snapshot | epath.Path: ...
def merge(
    snapshots: Sequence[Snapshot | epath.PathLike], weights: ArrayLike, out: epath.PathLike, recipe: str = "weights"
) -> Snapshot | epath.Path:
    """Merge checkpoints into a new one, part by part, without holding a complete model in memory.

    Args:
        snapshots: K snapshots, or paths of checkpoints in any format that `pma merge` reads. All are of one model;
            snapshots are of one kind: all points (the parameters after one step) or all block means (averages over the
            steps of one interval). They may be in any order.
        weights: [K], the weight of each element of `snapshots`; not normalised.
        out: The directory to create.
        recipe: Name of the merge method, recorded in the metadata. It does not affect the result.

    Returns:
        The merged snapshot, with the tokens and step of the newest input. If the inputs are not snapshots of pma_jax,
        the directory that was written.

    Raises:
        UserError: `out` exists, a path stands for several checkpoints, a checkpoint is given twice, the checkpoints do
            not agree, or a weight or a parameter is not finite.
    """
    target = absolute_path(out)
    addresses = [str(x.path) if isinstance(x, Snapshot) else _address(x) for x in _check_sequence(snapshots)]
    from_storage.merge(addresses, weights, str(target), recipe)
    return read_snapshot(target) if is_snapshot(target) else target


def _check_sequence(snapshots: Any) -> list[Any]:
    """Return the snapshots and paths as a list.

    Raises:
        UserError: They are not a sequence of snapshots and paths.
    """
    if isinstance(snapshots, str | os.PathLike | Snapshot) or not hasattr(snapshots, "__iter__"):
        raise UserError(f"{snapshots} is one checkpoint: give a list of snapshots or paths, such as run.snapshots[-5:]")
    elements = list(snapshots)
    for element in elements:
        if not isinstance(element, Snapshot | str | os.PathLike):
            raise UserError(f"{element!r} is neither a snapshot nor a path: give run.snapshots, or paths")
    if not elements:
        raise UserError("there is nothing to merge: give at least one snapshot or path")
    return elements


def _address(path: epath.PathLike) -> str:
    text = str(path)
    # Symbolic links are kept, because the name of a link may state the step.
    return text if "://" in text else str(expand_user(text).absolute())


def _read_one_snapshot(path: epath.PathLike) -> Snapshot:
    if is_run(path):
        raise UserError(f"{path} is a run with many snapshots: give those that you mean, such as run.snapshots[-5:]")
    if not is_snapshot(path) and not str(path).startswith(hub.PREFIX) and absolute_path(path).exists():
        raise UserError(
            f"{path} is not a snapshot of pma_jax, so the sharding of its parameters is not known: "
            "use pma_jax.merge, or `pma import` it first"
        )
    return read_snapshot(path)
