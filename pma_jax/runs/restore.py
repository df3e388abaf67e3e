"""Restoring of snapshots and states, with checks of leaf names, shapes and digests; reading of their metadata."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from pma_jax.config.errors import DamageError, error_line
from pma_jax.runs import integrity, steps
from pma_jax.runtime import hosts
from pma_jax.runtime.failures import as_read_error, deciding_cause, is_damage
from pma_jax.storage.digests import CHECKSUM
from pma_jax.storage.formats.source import leaf_differences
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.paths import as_path, check_readable, exists, file_sizes, is_bucket

T = TypeVar("T")


class ArrayMetadata(NamedTuple):
    """What is recorded of the arrays of a checkpoint."""

    items: dict[str, Any]  # item -> pytree of the shapes and dtypes of its leaves
    digests: dict[str, str]  # leaf -> digest; see `read_digests`


def restore_tree(path: epath.Path, item: str, abstract: Any) -> Any:
    """Restore one item of the checkpoint at `path`; see `restore_trees`."""
    metadata = hosts.run_in_all(lambda: read_array_metadata(path))
    return restore_trees(path, {item: abstract}, metadata)[item]


def restore_trees(path: epath.Path, items: Mapping[str, Any], metadata: ArrayMetadata) -> dict[str, Any]:
    """Restore items of the checkpoint at `path` as pytrees. If it fails in one process, it fails in all.

    Args:
        path: Directory of a snapshot or a training state.
        items: Names of stored pytrees -> pytree of `jax.ShapeDtypeStruct` with shardings, whose shapes, dtypes and
            shardings the result has. The names are `params` in a snapshot; `state`, or an optional field of the train
            state, such as `block` (the block mean), in a training state.
        metadata: The result of `read_array_metadata`.

    Raises:
        DamageError: An item or a file is missing or cannot be parsed, or leaves are missing, unexpected, of another
            shape, or do not match their digests. The message gives the number of such leaves and names the first ten.
        StorageError: Reading failed in this or another process, which says nothing about the checkpoint.
    """
    as_stored = hosts.run_in_all(lambda: _as_stored(path, items, metadata.items))
    try:
        restored = hosts.run_in_all(lambda: _load(path, as_stored))
    except DamageError:
        # As in `confirm_damage`, but in all processes: each call of Orbax takes a number that they must share.
        hosts.run_in_all(lambda: check_readable(path))
        restored = hosts.run_in_all(lambda: _load(path, as_stored))
    problem = None
    for item, tree in restored.items():
        # In the digests, leaf names of a snapshot have no prefix; those of a training state start with the item's name.
        changed = integrity.mismatched_leaves(tree, metadata.digests, "" if item == "params" else f"{item}.")
        if changed:
            listed = ", ".join(changed[:10])
            problem = DamageError(f"{path} is corrupt: {len(changed)} leaves do not match their digests: {listed}")
    hosts.raise_if_any_failed(problem)  # each process reads replicated leaves itself
    return {
        item: jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), tree, items[item])
        for item, tree in restored.items()
    }


def _as_stored(path: epath.Path, items: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return `items` with their stored dtypes, which the digests cover."""
    as_stored = {}
    for item, abstract in items.items():
        if not jax.tree.leaves(stored.get(item)):
            raise DamageError(
                f"{path} has no arrays in item {item!r}: corrupt, incomplete or another kind of checkpoint?"
            )
        differences = shape_differences(stored[item], abstract)
        if differences:
            listed = "; ".join(differences[:10])
            raise DamageError(f"{path} does not match the expected shapes: {len(differences)} leaves differ: {listed}")
        dtypes = {key: leaf.dtype for key, leaf in integrity.named_leaves(stored[item]).items()}
        as_stored[item] = jax.tree.structure(abstract).unflatten(
            jax.ShapeDtypeStruct(leaf.shape, dtypes[key], sharding=leaf.sharding)
            for key, leaf in integrity.named_leaves(abstract).items()
        )
    return as_stored


def _load(path: epath.Path, items: Mapping[str, Any]) -> dict[str, Any]:
    """Read this process's shards of `items`."""
    context = ocp.Context()
    # Without Orbax's barriers: a process that cannot read would leave the others waiting in them.
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    with report_read_errors(path), context:
        return jax.block_until_ready(ocp.load_checkpointables(path, dict(items)))


def confirm_damage(path: epath.Path, read: Callable[[], T]) -> T:
    """Call `read`; if it raises `DamageError`, check that every file below `path` can be read, and call it again.

    Orbax continues without a file that it cannot read, and then reports that something is missing. Nothing counts as
    damage that a second attempt can read.

    Raises:
        DamageError: `read` raised it twice.
        OSError: A file cannot be read.
    """
    try:
        return read()
    except DamageError:
        check_readable(path)
        return read()


def read_array_metadata(path: epath.Path) -> ArrayMetadata:
    """Read the shapes and dtypes of all leaves, without reading the arrays.

    The keys are the items of the checkpoint: `params` in a snapshot; `state`, and any of the optional fields of the
    train state that were saved (such as `block`, the block mean), in a training state.

    Raises:
        DamageError: The metadata of an item are missing or cannot be parsed.
        StorageError: The metadata cannot be read.
    """
    return confirm_damage(path, lambda: _read_array_metadata(path))


def _read_array_metadata(path: epath.Path) -> ArrayMetadata:
    if not is_bucket(path):
        file_sizes(as_path(path))  # raises if TensorStore would wait for a named pipe
    with report_read_errors(path):
        read = ocp.checkpointables_metadata(path)
        stored, metadata = read.metadata, steps.check_metadata(read.custom_metadata, path)
        digests = _recorded_digests(path, metadata)
    is_state = "position" in metadata
    # A folder without tree metadata, such as an imported model's tokenizer, holds no arrays.
    items = {name.partition(".")[0] if is_state else "params" for name in digests}
    items |= {name for name in stored if exists(path / name / "_METADATA")}
    missing = sorted(name for name in items if stored.get(name) is None)  # Orbax returns None if it cannot read an item
    if missing:
        raise DamageError(f"cannot read {path}: corrupt or incomplete: {', '.join(missing)} is missing")
    return ArrayMetadata(stored, digests)


def read_params_metadata(path: epath.Path) -> dict[str, dict[str, Any]]:
    """Read the shape, dtype and size (number of elements) of each parameter of a snapshot, without its arrays."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "size": math.prod(leaf.shape)}
        for name, leaf in integrity.named_leaves(read_array_metadata(path).items["params"], "/").items()
    }


def read_digests(path: epath.Path) -> dict[str, str]:
    """Read the recorded digest of each leaf of a snapshot (trained or merged) or of a training state.

    Return an empty dict for checkpoints that earlier versions of pma_jax wrote without digests.
    """
    return _recorded_digests(path, steps.read_metadata(path, ()))


def _recorded_digests(path: epath.Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    digests = metadata.get("leaves")
    if digests is None:
        provenance = read_provenance(path)
        digests = provenance.get("leaves") if provenance.get("checksum") == CHECKSUM else None
    return digests if isinstance(digests, dict) else {}


def read_provenance(path: epath.Path) -> dict[str, Any]:
    """Read the provenance of a merged snapshot; return an empty dict if the snapshot was not made by a merge."""
    file = path / "provenance.json"
    return read_json_object(as_path(file)) if exists(file) else {}


@contextlib.contextmanager
def report_read_errors(path: epath.Path) -> Iterator[None]:
    """Re-raise any exception of the `with` block as a `DamageError` or `StorageError` of one line that names `path`.

    Orbax and TensorStore raise many types, often with long messages.
    """
    try:
        yield
    except Exception as error:
        cause = deciding_cause(error)
        reason = error_line(cause).split(" [source locations")[0]
        reason = f"{type(cause).__name__}: {reason if len(reason) <= 300 else f'{reason[:300]} ...'}"
        hint = " (corrupt or incomplete?)" if is_damage(error) else ""
        raised = as_read_error(error, f"cannot read {path}{hint}: {reason}")
        if raised is error:
            raise
        raise raised from error


def shape_differences(metadata: Any, abstract: Any) -> list[str]:
    """List how the names and shapes of stored leaves differ from those of `abstract`.

    Leaves are compared by name, because Orbax returns dataclasses as dicts in its metadata. Dtypes may differ,
    because `restore_tree` casts.
    """
    wanted, leaves = integrity.named_leaves(abstract, "/"), integrity.named_leaves(metadata, "/")
    return leaf_differences(wanted, leaves, dtype_of=lambda leaf: "any")
