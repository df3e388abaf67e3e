"""Restore the arrays of a snapshot or a state, checked by names, shapes and digests; list what is stored."""

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from pma_jax.runs import integrity, steps
from pma_jax.runtime.errors import error_line
from pma_jax.storage.digests import CHECKSUM
from pma_jax.storage.formats.source import leaf_differences


def restore_tree(path: epath.Path, name: str, abstract: Any) -> Any:
    """Restore the pytree stored as `name` at `path` with the shapes, dtypes and shardings of `abstract`.

    Raises:
        ValueError: Leaves are missing, unknown, of another shape, or corrupt (by their digest). The message gives their
            number and names the first ten.
    """
    metadata = read_array_metadata(path).get(name)
    if not jax.tree.leaves(metadata):
        raise ValueError(f"{path} is corrupt or incomplete: it lists no arrays")
    differences = shape_differences(metadata, abstract)
    if differences:
        listed = "; ".join(differences[:10])
        raise ValueError(f"{path} does not fit the model: {len(differences)} leaves differ: {listed}")
    # Restore in the stored dtypes, which the digests cover, and convert afterwards.
    dtypes = {key: leaf.dtype for key, leaf in integrity.named_leaves(metadata).items()}
    as_stored = jax.tree.structure(abstract).unflatten(
        jax.ShapeDtypeStruct(leaf.shape, dtypes[key], sharding=leaf.sharding)
        for key, leaf in integrity.named_leaves(abstract).items()
    )
    with report_read_errors(path):
        restored = jax.block_until_ready(ocp.load_checkpointables(path, {name: as_stored})[name])
    # Leaf names of a snapshot have no prefix; those of a state start with the name of their item.
    changed = integrity.mismatched_leaves(restored, recorded_digests(path), "" if name == "params" else f"{name}.")
    if changed:
        raise ValueError(
            f"{path} is corrupt: {len(changed)} leaves do not match their digests: {', '.join(changed[:10])}"
        )
    return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), restored, abstract)


def read_array_metadata(path: epath.Path) -> dict[str, Any]:
    """Read the shape and dtype of each leaf by item (params; state, block), without the arrays."""
    with report_read_errors(path):
        return ocp.checkpointables_metadata(path).metadata


def stored_leaves(path: epath.Path) -> dict[str, dict[str, Any]]:
    """Map each stored parameter to its shape, dtype and number of elements, without reading arrays."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "size": math.prod(leaf.shape)}
        for name, leaf in integrity.named_leaves(read_array_metadata(path)["params"], "/").items()
    }


def recorded_digests(path: epath.Path) -> dict[str, str]:
    """Read the digest of each leaf of a snapshot, merge or state; empty if an earlier version wrote it without them."""
    digests = steps.read_metadata(path, ()).get("leaves")
    if digests is None:
        provenance = read_provenance(path)
        digests = provenance.get("leaves") if provenance.get("checksum") == CHECKSUM else None
    return digests if isinstance(digests, dict) else {}


def read_provenance(path: epath.Path) -> dict[str, Any]:
    """Read the provenance of a merged snapshot; empty if the snapshot was not made by a merge."""
    file = path / "provenance.json"
    if not file.exists():
        return {}
    with report_read_errors(file):
        return json.loads(file.read_text())


@contextlib.contextmanager
def report_read_errors(path: epath.Path) -> Iterator[None]:
    """Convert read errors of Orbax and TensorStore, of many types and often long, to a ValueError of one line."""
    try:
        yield
    except Exception as error:
        reason = error_line(error)
        reason = reason if len(reason) <= 300 else f"{reason[:300]} ..."
        raise ValueError(f"{path} is corrupt or incomplete: {type(error).__name__}: {reason}") from error


def shape_differences(metadata: Any, abstract: Any) -> list[str]:
    """List how the names and shapes of stored leaves differ from those of `abstract`.

    Leaves are compared by name, because Orbax's metadata turn dataclasses into dicts.
    """
    wanted, leaves = integrity.named_leaves(abstract, "/"), integrity.named_leaves(metadata, "/")
    return leaf_differences(wanted, leaves, dtype_of=lambda leaf: "any")
