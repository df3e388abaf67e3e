"""Where a merged checkpoint's bytes go: every file, its size and the place of every leaf, known before any is read.

Both formats are laid out as plain runs of bytes at known offsets, so any thread or process can write any part at any
time, a crash loses nothing that was written, and the same inputs give the same files.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pma_jax.storage.formats import safetensors as safetensors_file
from pma_jax.storage.formats.orbax_write import orbax_files
from pma_jax.storage.formats.source import ByteRange, CheckpointSource, LeafInfo
from pma_jax.storage.json_files import json_bytes, read_object

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
# Files beside the weights without which the merged model does not load or does not tokenize.
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
_SIDECAR_LIMIT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class OutputLayout:
    """A checkpoint directory that is not written yet.

    Attributes:
        texts: relative path -> the whole content of a small file.
        copies: relative path -> the file it is a copy of.
        sizes: relative path -> size in bytes, of the files that hold leaves.
        preambles: relative path -> what such a file begins with.
        places: leaf -> the runs of its bytes, by relative path.
        notes: what the user should know, one line each.
    """

    texts: Mapping[str, bytes]
    copies: Mapping[str, Path]
    sizes: Mapping[str, int]
    preambles: Mapping[str, bytes]
    places: Mapping[str, tuple[ByteRange, ...]]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size in bytes of the files that hold leaves."""
        return sum(self.sizes.values())


def plan_output(
    sources: list[CheckpointSource],
    leaves: Mapping[str, LeafInfo],
    kind: str,
    shard_bytes: int,
    dtype: str,
    custom: Mapping[str, Any],
) -> OutputLayout:
    """The files of a merged checkpoint.

    Args:
        sources: what is merged; small files are carried over from the last, which is the newest.
        leaves: the merged leaves, in the order they shall have.
        kind: "safetensors" or "orbax".
        shard_bytes: the most bytes of leaves in one safetensors file.
        dtype: "keep", or the dtype that config.json shall name.
        custom: custom metadata of an Orbax checkpoint.

    Raises:
        ValueError: the format cannot hold these leaves.
    """
    if kind == "orbax":
        texts, sizes, places = orbax_files(leaves, sources[0], custom)
        return OutputLayout(texts, {}, sizes, {}, places)
    if kind != "safetensors":
        raise ValueError(f"the format {kind!r} is not one of keep, safetensors, orbax")
    copies, texts, notes = _carried(sources, dtype)
    if "__metadata__" in leaves:
        raise ValueError("a leaf is named __metadata__, which safetensors reserves; write it as Orbax (--format orbax)")
    metadata = sources[0].metadata if sources[0].kind == "safetensors" else {"format": "pt"}
    files = safetensors_files(leaves, shard_bytes, metadata)
    return replace(files, texts={**texts, **files.texts}, copies=copies, notes=notes)


def safetensors_files(leaves: Mapping[str, LeafInfo], shard_bytes: int, metadata: Mapping[str, str]) -> OutputLayout:
    """The shards that hold `leaves`, in their order, at most `shard_bytes` of them each, and the index of several."""
    shards = safetensors_file.split_into_shards(leaves, shard_bytes)
    names = safetensors_file.shard_names(len(shards))
    texts = {}
    if len(shards) > 1:
        texts["model.safetensors.index.json"] = safetensors_file.index_bytes(
            dict(zip(names, shards, strict=True)), leaves
        )
    sizes, preambles, places = {}, {}, {}
    for name, shard in zip(names, shards, strict=True):
        preambles[name] = safetensors_file.header_bytes([(leaf, leaves[leaf]) for leaf in shard], metadata)
        end = len(preambles[name])
        for leaf in shard:
            places[leaf] = (ByteRange(Path(name), end, leaves[leaf].nbytes),)
            end += leaves[leaf].nbytes
        sizes[name] = end
    return OutputLayout(texts, {}, sizes, preambles, places)


def _carried(sources: list[CheckpointSource], dtype: str) -> tuple[dict[str, Path], dict[str, bytes], tuple[str, ...]]:
    """Files to copy, files to write changed, and notes about those left behind or that differ between sources."""
    newest = sources[-1]
    copies, texts, left = {}, {}, []
    for path in newest.files:
        if is_sidecar(path, SIDECAR_PATTERNS):
            copies[path.name] = path
        else:
            left.append(path.name)
    notes = []
    if left:
        notes.append(f"not copied from {newest.origin}: {', '.join(left[:10])} ({len(left)} files in all)")
    for name, path in copies.items():
        others = [
            source for source in sources[:-1] for file in source.files if file.name == name and not _is_same(file, path)
        ]
        if others:
            notes.append(f"{name} differs between {others[0].origin} and {newest.origin}; the latter's is kept")
    if dtype != "keep" and "config.json" in copies:
        config = read_object(copies["config.json"])
        named = [key for key in ("dtype", "torch_dtype") if key in config]
        if named:
            del copies["config.json"]
            texts["config.json"] = json_bytes(config | dict.fromkeys(named, dtype))
    return copies, texts, tuple(notes)


def is_sidecar(path: Path, patterns: Sequence[str]) -> bool:
    """Whether a file's name is one of `patterns`, and it is of a size that such a file has."""
    return any(path.match(pattern) for pattern in patterns) and path.stat().st_size <= _SIDECAR_LIMIT_BYTES


def _is_same(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()


def create_files(plan: OutputLayout, directory: Path) -> None:
    """Makes the directory, every file at its full size and the leaves zeros; doing it again is harmless."""
    for name in [*plan.texts, *plan.copies, *plan.sizes]:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
    for name, size in plan.sizes.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, plan.preambles.get(name, b""), 0)
        finally:
            os.close(descriptor)
    for name, text in plan.texts.items():
        (directory / name).write_bytes(text)
    for name, path in plan.copies.items():
        with path.open("rb") as source, (directory / name).open("wb") as target:
            shutil.copyfileobj(source, target)


def byte_ranges_in(plan: OutputLayout, directory: Path) -> dict[str, tuple[ByteRange, ...]]:
    """The leaves' runs as absolute paths in `directory`."""
    return {
        name: tuple(
            ByteRange(directory / byte_range.path, byte_range.offset, byte_range.nbytes) for byte_range in byte_ranges
        )
        for name, byte_ranges in plan.places.items()
    }
