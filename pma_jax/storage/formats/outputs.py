"""Plan the directory of a merged checkpoint: the leaves in the requested format, and the sidecar files.

Sidecar files, such as config.json and the tokenizer, are written only beside safetensors.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.storage.formats import big_vision, easydel, levanter, npz, t5x
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.orbax_write import merged_item, orbax_layout
from pma_jax.storage.formats.safetensors import CODE_OF_DTYPE, safetensors_layout
from pma_jax.storage.formats.source import ITEM_BYTES, PACKED_BITS, CheckpointSource, LeafInfo
from pma_jax.storage.json_files import read_json_object, serialize_json

# Files of a Hugging Face tokenizer.
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "tokenization_*.py",
)
# Files other than weights in the directory of a Hugging Face model, with its tokenizer.
SIDECAR_PATTERNS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    *TOKENIZER_PATTERNS,
    "vocab*",
    "configuration_*.py",
    "modeling_*.py",
)
_MAX_SIDECAR_BYTES = 256 * 2**20


_Writer = Callable[..., OutputLayout]


def _plan_orbax(
    sources: Sequence[CheckpointSource],
    leaves: Mapping[str, LeafInfo],
    custom_metadata: Mapping[str, Any],
    writers: int = 1,
) -> OutputLayout:
    return orbax_layout(leaves, merged_item(sources), custom_metadata, writers)


# Format -> function that plans its files, given the sources, the merged leaves and the custom metadata. All but Orbax
# are written only where the inputs have the format.
WRITERS: Mapping[str, _Writer] = {
    "orbax": _plan_orbax,
    "npz": npz.npz_layout,
    "big_vision": big_vision.big_vision_layout,
    "t5x": t5x.t5x_layout,
    "easydel": easydel.easydel_layout,
    "levanter": levanter.levanter_layout,
}
# Dtypes that a format can store; those that are absent here store all that zarr can.
_DTYPES: Mapping[str, Collection[str]] = {"safetensors": CODE_OF_DTYPE, "npz": npz.DTYPES}


def plan_output(
    sources: Sequence[CheckpointSource],
    leaves: Mapping[str, LeafInfo],
    format: str,
    shard_bytes: int,
    config_dtype: str,
    custom_metadata: Mapping[str, Any],
    writers: int = 1,
) -> OutputLayout:
    """Lay out the files of a merged checkpoint.

    Args:
        sources: The merged checkpoints, oldest first. Safetensors output copies the sidecar files of the newest, and
            the header metadata of the oldest if that is safetensors. Orbax output has the tree structure of the oldest
            Orbax checkpoint.
        leaves: Dtype and shape of each merged leaf, in the order to write them.
        format: "safetensors", or a key of `WRITERS`.
        shard_bytes: Maximum bytes of leaves per file (safetensors only).
        config_dtype: New value of the keys `dtype` and `torch_dtype` in config.json, where present, or "keep" to copy
            the file unchanged (safetensors only). Does not change the dtype of any leaf.
        custom_metadata: Custom metadata of the checkpoint (Orbax only).
        writers: Number of processes that write, each of them complete files (Orbax only).

    Raises:
        UserError: The format is unknown, or cannot store these leaves.
    """
    storable = _DTYPES.get(format, ITEM_BYTES.keys() - PACKED_BITS.keys())
    unsupported = next((f"{name} ({leaf.dtype})" for name, leaf in leaves.items() if leaf.dtype not in storable), None)
    if unsupported is not None:
        raise UserError(f"{unsupported} cannot be stored as {format}; choose another --format or --dtype")
    if format in WRITERS:
        options = {"writers": writers} if format == "orbax" else {}
        layout = WRITERS[format](sources, leaves, custom_metadata, **options)
        return replace(layout, notes=(*layout.notes, *_unlike_notes(sources, format)))
    if format != "safetensors":
        raise UserError(f"the output format {format!r} is not {', '.join(('safetensors', *WRITERS))}")
    if "__metadata__" in leaves:
        raise UserError("a leaf is named __metadata__, which safetensors reserves; write it as Orbax (--format orbax)")
    metadata = sources[0].metadata if sources[0].format == "safetensors" else {"format": "pt"}
    layout = safetensors_layout(leaves, shard_bytes, metadata)
    copies, texts, notes = _plan_sidecars(sources, config_dtype)
    notes = (*left_out_notes(sources), *notes)
    return replace(layout, texts={**texts, **layout.texts}, copies=copies, notes=notes)


def _unlike_notes(sources: Sequence[CheckpointSource], format: str) -> list[str]:
    others = [source.origin for source in sources if source.format != format]
    return (
        [f"written as {format}, unlike {others[0]} ({len(others)} such inputs)"] if others and format != "orbax" else []
    )


def left_out_notes(sources: Sequence[CheckpointSource]) -> list[str]:
    """Return messages about what safetensors cannot hold of the trees of the Orbax sources."""
    item = merged_item(sources)
    if item is None:
        return []
    leaves = [f"{leaf.name} ({leaf.value_type})" for leaf in item.tree.leaves if not leaf.is_array]
    keys = list(item.tree.random_keys)
    notes = [f"not written, because safetensors holds only arrays: {', '.join(leaves[:10])}"] if leaves else []
    return notes + ([f"written as numbers instead of random keys: {', '.join(keys[:10])}"] if keys else [])


def _plan_sidecars(
    sources: Sequence[CheckpointSource], config_dtype: str
) -> tuple[dict[str, Path], dict[str, bytes], tuple[str, ...]]:
    """Return the files to copy, the contents of files to write, and notes on files that are omitted or differ."""
    newest = sources[-1]
    copies = {path.name: path for path in newest.other_files if is_sidecar(path, SIDECAR_PATTERNS)}
    omitted = [path.name for path in newest.other_files if path.name not in copies]
    notes = []
    if omitted:
        notes.append(f"not copied from {newest.origin}: {', '.join(omitted[:10])} ({len(omitted)} files in all)")
    for name, path in copies.items():
        differing = (
            source
            for source in sources[:-1]
            for file in source.other_files
            if file.name == name and not _have_equal_bytes(file, path)
        )
        if other := next(differing, None):
            notes.append(f"{name} differs from that of {other.origin}; the one of {newest.origin} is copied")
    texts = {}
    if config_dtype != "keep" and "config.json" in copies:
        config = read_json_object(copies["config.json"])
        dtype_keys = [key for key in ("dtype", "torch_dtype") if key in config]
        if dtype_keys:
            del copies["config.json"]
            texts["config.json"] = serialize_json(config | dict.fromkeys(dtype_keys, config_dtype))
    return copies, texts, tuple(notes)


def is_sidecar(path: Path, patterns: Sequence[str]) -> bool:
    """Return whether a file's name matches one of `patterns` and the file is no larger than 256 MiB."""
    return any(path.match(pattern) for pattern in patterns) and path.stat().st_size <= _MAX_SIDECAR_BYTES


def _have_equal_bytes(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
