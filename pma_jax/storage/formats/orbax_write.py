"""Plan the files of an Orbax checkpoint with uncompressed zarr 2 arrays, in which each byte has a known offset.

Orbax writes the same layout with use_ocdbt=False, use_zarr3=False and no compression, so Orbax and any zarr reader can
open it. Because no OCDBT database must be kept consistent, threads, processes and a resumed merge can write in any
order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.storage.digests import METADATA_DIGEST_KEY
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.orbax_read import INDICATOR_FILE
from pma_jax.storage.formats.orbax_tree import (
    NUMPY_ARRAY,
    SEQUENCE_KEY,
    OrbaxItem,
    TreeStructure,
    flat_tree,
    structure_differences,
    tree_texts,
)
from pma_jax.storage.formats.source import ByteRange, CheckpointSource, LeafInfo
from pma_jax.storage.formats.zarr_write import check_name, check_paths, json_bytes, plan_array

_V1_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_V0_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def orbax_layout(
    leaves: Mapping[str, LeafInfo], item: OrbaxItem | None, custom_metadata: Mapping[str, Any], writers: int = 1
) -> OutputLayout:
    """Plan the files of an Orbax checkpoint.

    Args:
        leaves: The leaves to write, by name.
        item: The tree of the leaves. If None, they become one flat dictionary of NumPy arrays, as
            `orbax.checkpoint.v1.save` writes it.
        custom_metadata: The checkpoint's custom metadata.
        writers: Number of processes that write the arrays, each of them complete files.

    Raises:
        UserError: A leaf's name cannot be a path, or the tree has a part of a list.
    """
    item = item or OrbaxItem("state", flat_tree(leaves, NUMPY_ARRAY))
    _check_lists_are_complete(item.tree)
    folder = f"{item.name}/" if item.name else ""
    texts: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    byte_ranges: dict[str, tuple[ByteRange, ...]] = {}
    shapes = {}
    for name, leaf in leaves.items():
        check_name(name)
        array = plan_array(folder + name, leaf, writers=writers)
        shapes[name] = (leaf.shape, array.chunk)
        texts |= dict([array.metadata])
        byte_ranges[name] = array.byte_ranges
        sizes |= array.sizes
    texts |= {folder + path: json_bytes(value) for path, value in tree_texts(item.tree, shapes).items()}
    if item.sharding:
        texts[f"{folder}_sharding"] = json_bytes(item.sharding)
    handler = item.handler or (_V1_HANDLER if item.name and item.is_v1 else _V0_HANDLER)
    texts["_CHECKPOINT_METADATA"] = json_bytes(
        {
            "item_handlers": {item.name: handler} if item.name else handler,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": 0,
            "commit_timestamp_nsecs": 0,
            "custom_metadata": dict(custom_metadata),
        }
    )
    texts["commit_success.txt"] = b""
    if item.is_v1:
        texts[INDICATOR_FILE] = b""
    check_paths([*texts, *sizes])
    return OutputLayout(texts, sizes, byte_ranges)


def _check_lists_are_complete(tree: TreeStructure) -> None:
    """Check that each list has its elements from the first on, without which Orbax restores none of the tree.

    Raises:
        UserError: A subtree was chosen without the elements before it.
    """
    indexes: dict[str, set[int]] = {}
    for leaf in tree.leaves:
        for depth, (key, kind) in enumerate(leaf.keys):
            if kind == SEQUENCE_KEY:
                indexes.setdefault("/".join(leaf.key_names[:depth]), set()).add(int(key))
    for name, present in indexes.items():
        if max(present) >= len(present):
            raise UserError(
                f"of the list {name[:80]!r}, element {max(present)} is to be written without those before it, which "
                "Orbax does not restore; merge the complete list"
            )


def merged_item(sources: Sequence[CheckpointSource]) -> OrbaxItem | None:
    """Return the item of the first source that is Orbax, which a merged checkpoint has too; None if none is.

    Raises:
        UserError: The sources differ in leaves that are no arrays.
    """
    items = [(source.origin, source.metadata["item"]) for source in sources if source.format == "orbax"]
    if not items:
        return None
    origin, first = items[0]
    for other, item in items[1:]:
        differences = structure_differences(first.tree, item.tree)
        if differences:
            raise UserError(
                f"{other} differs from {origin} in {len(differences)} leaves that cannot be averaged: "
                f"{'; '.join(differences[:10])}; merge a subtree without them (--subtree)"
            )
    # The text of a typed tree also has shapes and types of leaves; it is left out unless all sources agree on it.
    is_same = all(item.tree.typed_tree == first.tree.typed_tree for _, item in items)
    return first if is_same else replace(first, tree=replace(first.tree, typed_tree=None))


def shared_custom_metadata(sources: Sequence[CheckpointSource]) -> dict[str, Any]:
    """Return the custom metadata that are the same in all Orbax sources, without the step and the tokens.

    They describe the model, as MaxText's `scan_layers`, by which it loads parameters. Those of pma_jax's own snapshots
    describe a snapshot, and are left out.
    """
    metadata = [source.metadata["custom"] for source in sources if source.format == "orbax"]
    if not metadata or any(METADATA_DIGEST_KEY in custom or {"config", "kind"} <= custom.keys() for custom in metadata):
        return {}
    return {
        key: value
        for key, value in metadata[0].items()
        if key not in ("step", "tokens") and all(key in custom and custom[key] == value for custom in metadata[1:])
    }
