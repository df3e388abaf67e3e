"""Restoring of snapshots and states, with checks of leaf names, shapes and digests; reading of their metadata."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from pma_jax.config.errors import UserError, error_line
from pma_jax.runs import integrity, steps
from pma_jax.storage.digests import CHECKSUM
from pma_jax.storage.formats.source import leaf_differences
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.paths import as_path


def restore_tree(path: epath.Path, item: str, abstract: Any) -> Any:
    """Restore an item of the checkpoint at `path` as a pytree with the shapes, dtypes and shardings of `abstract`.

    Args:
        path: Directory of a snapshot or a training state.
        item: Name of the stored pytree: `params` in a snapshot; `state`, or an optional field of the train state, such
            as `block` (the block mean), in a training state.
        abstract: Pytree of `jax.ShapeDtypeStruct` with shardings.

    Raises:
        UserError: The checkpoint cannot be read or lacks the item, or leaves are missing, unexpected, of another
            shape, or do not match their digests. The message gives the number of such leaves and names the first ten.
    """
    metadata = read_array_metadata(path).get(item)
    if not jax.tree.leaves(metadata):
        raise UserError(f"{path} has no arrays in item {item!r}: corrupt, incomplete or another kind of checkpoint?")
    differences = shape_differences(metadata, abstract)
    if differences:
        listed = "; ".join(differences[:10])
        raise UserError(f"{path} does not match the expected shapes: {len(differences)} leaves differ: {listed}")
    # Restore in the stored dtypes, because the digests cover those, and cast afterwards.
    dtypes = {key: leaf.dtype for key, leaf in integrity.named_leaves(metadata).items()}
    as_stored = jax.tree.structure(abstract).unflatten(
        jax.ShapeDtypeStruct(leaf.shape, dtypes[key], sharding=leaf.sharding)
        for key, leaf in integrity.named_leaves(abstract).items()
    )
    with report_read_errors(path):
        restored = jax.block_until_ready(ocp.load_checkpointables(path, {item: as_stored})[item])
    # In the digests, leaf names of a snapshot have no prefix; those of a training state start with the item's name.
    changed = integrity.mismatched_leaves(restored, read_digests(path), "" if item == "params" else f"{item}.")
    if changed:
        raise UserError(
            f"{path} is corrupt: {len(changed)} leaves do not match their digests: {', '.join(changed[:10])}"
        )
    return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), restored, abstract)


def read_array_metadata(path: epath.Path) -> dict[str, Any]:
    """Read the shapes and dtypes of all leaves, without reading the arrays.

    The keys are the items of the checkpoint: `params` in a snapshot; `state`, and any of the optional fields of the
    train state that were saved (such as `block`, the block mean), in a training state.
    """
    with report_read_errors(path):
        return ocp.checkpointables_metadata(path).metadata


def read_params_metadata(path: epath.Path) -> dict[str, dict[str, Any]]:
    """Read the shape, dtype and size (number of elements) of each parameter of a snapshot, without its arrays."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "size": math.prod(leaf.shape)}
        for name, leaf in integrity.named_leaves(read_array_metadata(path)["params"], "/").items()
    }


def read_digests(path: epath.Path) -> dict[str, str]:
    """Read the recorded digest of each leaf of a snapshot (trained or merged) or of a training state.

    Return an empty dict for checkpoints that earlier versions of pma_jax wrote without digests.
    """
    digests = steps.read_metadata(path, ()).get("leaves")
    if digests is None:
        provenance = read_provenance(path)
        digests = provenance.get("leaves") if provenance.get("checksum") == CHECKSUM else None
    return digests if isinstance(digests, dict) else {}


def read_provenance(path: epath.Path) -> dict[str, Any]:
    """Read the provenance of a merged snapshot; return an empty dict if the snapshot was not made by a merge."""
    file = path / "provenance.json"
    return read_json_object(as_path(file)) if file.exists() else {}


@contextlib.contextmanager
def report_read_errors(path: epath.Path) -> Iterator[None]:
    """Re-raise any exception of the `with` block as a ValueError with a one-line message that names `path`.

    Orbax and TensorStore raise many types, often with long messages.
    """
    try:
        yield
    except Exception as error:
        reason = error_line(error)
        reason = reason if len(reason) <= 300 else f"{reason[:300]} ..."
        raise UserError(f"cannot read {path} (corrupt or incomplete?): {type(error).__name__}: {reason}") from error


def shape_differences(metadata: Any, abstract: Any) -> list[str]:
    """List how the names and shapes of stored leaves differ from those of `abstract`.

    Leaves are compared by name, because Orbax returns dataclasses as dicts in its metadata. Dtypes may differ,
    because `restore_tree` casts.
    """
    wanted, leaves = integrity.named_leaves(abstract, "/"), integrity.named_leaves(metadata, "/")
    return leaf_differences(wanted, leaves, dtype_of=lambda leaf: "any")
