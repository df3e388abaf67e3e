"""Arrays in a snapshot or a state: what lies there, and reading it back, checked by names, shapes and digests."""

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


def restore_tree(path: epath.Path, name: str, abstract: Any) -> Any:
    """The pytree `name` that lies at `path`, with the shapes, dtypes and shardings of `abstract`.

    Raises ValueError that names every leaf (the first ten, and a count) that is missing, unknown, of another shape, or
    not what was written (by its digest).
    """
    metadata = stored(path).get(name)
    lies = shapes(metadata)
    if not lies:
        raise ValueError(f"{path} is damaged or incomplete: it lists no arrays")
    differences = _leaf_differences(lies, shapes(abstract))
    if differences:
        listed = "; ".join(differences[:10])
        raise ValueError(f"{path} does not fit the model: {len(differences)} leaves differ: {listed}")
    # As stored, so that the digests are of what is there; then as wanted.
    dtypes = {_text(key): leaf.dtype for key, leaf in jax.tree_util.tree_flatten_with_path(metadata)[0]}
    as_stored = jax.tree_util.tree_map_with_path(
        lambda key, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes[_text(key)], sharding=leaf.sharding), abstract
    )
    with report_read_errors(path):
        restored = jax.block_until_ready(ocp.load_checkpointables(path, {name: as_stored})[name])
    # A snapshot's leaves are those of its one item; a state's are named after the item that they lie in.
    changed = integrity.changed_leaves(restored, recorded_digests(path), "" if name == "params" else f"{name}.")
    if changed:
        raise ValueError(
            f"{path} is damaged: {len(changed)} leaves are not what was written: {', '.join(changed[:10])}"
        )
    return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), restored, abstract)


def stored(path: epath.Path) -> dict[str, Any]:
    """What lies there, by name (params; state, block), with the shape and dtype of every leaf; reads no array."""
    with report_read_errors(path):
        return ocp.checkpointables_metadata(path).metadata


def stored_leaves(path: epath.Path) -> dict[str, dict[str, Any]]:
    """Name -> shape, dtype and number of elements of each stored parameter; reads no array."""
    leaves = jax.tree_util.tree_flatten_with_path(stored(path)["params"])[0]
    return {
        _text(key): {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "size": math.prod(leaf.shape),
        }
        for key, leaf in leaves
    }


def recorded_digests(path: epath.Path) -> dict[str, str]:
    """Leaf -> digest, of a snapshot, a merge or a state; empty where an earlier version wrote it, without digests."""
    digests_of = steps.read_metadata(path, ()).get("leaves")
    if digests_of is None and (path / "provenance.json").exists():
        with report_read_errors(path / "provenance.json"):
            facts = json.loads((path / "provenance.json").read_text())
        digests_of = facts.get("leaves") if facts.get("checksum") == integrity.CHECKSUM else None
    return digests_of if isinstance(digests_of, dict) else {}


@contextlib.contextmanager
def report_read_errors(path: epath.Path) -> Iterator[None]:
    """What Orbax and TensorStore raise over broken files, of many types and pages long, as one error."""
    try:
        yield
    except Exception as error:
        said = error_line(error)
        said = said if len(said) <= 300 else f"{said[:300]} ..."
        raise ValueError(f"{path} is damaged or incomplete: {type(error).__name__}: {said}") from error


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every leaf; Orbax's metadata of a dataclass is a dict, so names are text, whatever the key."""
    return {_text(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _text(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _leaf_differences(stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    found = [f"{name} is missing" for name in wanted if name not in stored]
    found += [f"{name} is unknown" for name in stored if name not in wanted]
    both = [name for name in wanted if name in stored and stored[name] != wanted[name]]
    return found + [f"{name} is {stored[name]}, not {wanted[name]}" for name in both]
