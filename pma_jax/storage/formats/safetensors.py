"""The safetensors format: validate headers as untrusted input, and write headers and shard indexes deterministically.

A file consists of the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets),
and the data. The safetensors library is not used, because it gives no byte offsets and cannot write a header without
the data. This module imports no third-party package except NumPy, so that a merge starts in a tenth of a second.
"""

import functools
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pma_jax.config.errors import UserError
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.source import ITEM_BYTES, PACKED_BITS, ZARR_DTYPES, ByteRange, LeafInfo, are_sizes
from pma_jax.storage.json_files import MAX_JSON_BYTES, parse_untrusted_json, read_json_object, serialize_json
from pma_jax.storage.paths import name_file, open_regular_file

_ABBREVIATIONS = {"FLOAT4_E2M1FN": "F4", "FLOAT": "F", "UINT": "U", "INT": "I", "COMPLEX": "C"}
# bfloat16 -> BF16, float8_e4m3fn -> F8_E4M3, uint8 -> U8, bool -> BOOL, complex64 -> C64, float4_e2m1fn -> F4.
CODE_OF_DTYPE = {
    dtype: re.sub("FNU?$", "", re.sub("|".join(_ABBREVIATIONS), lambda word: _ABBREVIATIONS[word[0]], dtype.upper()))
    for dtype in ITEM_BYTES
    if dtype not in ZARR_DTYPES
}
DTYPE_OF_CODE = {code: dtype for dtype, code in CODE_OF_DTYPE.items()}
_PACKED_CODES = {CODE_OF_DTYPE[dtype]: bits for dtype, bits in PACKED_BITS.items()}
_MAX_DIMENSIONS = 64
# Holds the headers of most files; what is read of the data too is read again.
_HEADER_BUFFER_BYTES = 2**16


_KnownLeaves = dict[tuple[Any, ...], tuple[LeafInfo, int]]  # (dtype's code, *shape) -> leaf, and its bytes


@dataclass(frozen=True)
class Header:
    """A validated header, of one file or of all shards of a checkpoint.

    Attributes:
        leaves: Name -> shape and dtype, in the order of the data.
        byte_ranges: Name -> where the leaf's bytes are stored.
        metadata: The header's `__metadata__`.
    """

    leaves: Mapping[str, LeafInfo]
    byte_ranges: Mapping[str, tuple[ByteRange, ...]]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Read and validate the header of one file; the data is not read.

    Raises:
        UserError: The file violates the safetensors specification.
    """
    with name_file(path), open_regular_file(path, buffering=_HEADER_BUFFER_BYTES) as file:
        file_bytes = path.stat().st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise UserError(f"{path}: {file_bytes} bytes is too short for a safetensors file; fetch it again")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > min(MAX_JSON_BYTES, file_bytes - 8):
            raise UserError(
                f"{path}: the header claims {header_bytes} bytes and the file has {file_bytes}; "
                "it is cut short or not a safetensors file"
            )
        text = file.read(header_bytes)
    try:
        parsed = _parse_header(text, data_bytes=file_bytes - 8 - header_bytes)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    data_start = 8 + header_bytes
    byte_ranges = {
        name: (ByteRange(path, data_start + start, end - start),) for name, (start, end) in parsed.spans.items()
    }
    return Header(parsed.leaves, byte_ranges, parsed.metadata)


class _ParsedHeader(NamedTuple):
    """What a header says, without the file in which it is; `spans` has the start and the end of each leaf's data."""

    leaves: Mapping[str, LeafInfo]
    spans: Mapping[str, tuple[int, int]]
    metadata: Mapping[str, str]


@functools.lru_cache(maxsize=1)  # the checkpoints of a merge often have the same header, of up to a million leaves
def _parse_header(text: bytes, data_bytes: int) -> _ParsedHeader:
    """Parse and validate a header for `data_bytes` bytes of data. The messages of errors lack the path."""
    entries = parse_untrusted_json(text, "header")
    if not isinstance(entries, dict):
        raise UserError("the header is not a JSON object; it is not a safetensors file")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError("__metadata__ must map strings to strings")
    parsed: list[tuple[int, int, LeafInfo, str]] = []
    known: _KnownLeaves = {}  # leaves of one shape share their description
    for name in list(entries):  # freed one by one, because they take more memory than what is kept of them
        # The checkpoints of a merge have the same names, which `intern` stores once.
        parsed.append((*_parse_entry(name, entries.pop(name), known), sys.intern(name)))
    parsed.sort(key=lambda entry: entry[:2])
    previous_end, leaves, spans = 0, {}, {}
    for start, end, leaf, name in parsed:
        if start != previous_end:
            how = "overlaps the one before it" if start < previous_end else "leaves a hole before it"
            raise UserError(f"{name[:80]!r} at bytes {start}:{end} {how}; safetensors allows neither")
        leaves[name] = leaf
        spans[name] = start, end
        previous_end = end
    if previous_end != data_bytes:
        raise UserError(f"the header describes {previous_end} bytes of data and the file has {data_bytes}")
    return _ParsedHeader(leaves, spans, metadata)


def _parse_entry(name: str, entry: Any, known: _KnownLeaves) -> tuple[int, int, LeafInfo]:
    """Return (start, end, leaf) of one header entry; add its leaf to those that are known."""

    def wrong(problem: str) -> UserError:
        return UserError(f"{name[:80]!r} {problem}")

    # Names appear in messages and become file names, so line breaks and lone surrogates are refused.
    if not name.isprintable():
        raise wrong("is not a printable Unicode name")
    if not isinstance(entry, dict):
        raise wrong("is not described by a JSON object")
    code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(code, str) or code not in DTYPE_OF_CODE:
        raise wrong(f"has the dtype {str(code)[:40]!r}; known are {', '.join(DTYPE_OF_CODE)}")
    if not are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise wrong(f"has no valid shape: {str(shape)[:80]}")
    if not are_sizes(offsets) or len(offsets) != 2:
        raise wrong(f"has no valid data_offsets: {str(offsets)[:80]}")
    key = (code, *shape)
    if key not in known:
        if code in _PACKED_CODES and math.prod(shape) * _PACKED_CODES[code] % 8:
            raise wrong(f"has the shape {str(shape)[:80]}, which does not fill whole bytes of {code}")
        leaf = LeafInfo(tuple(shape), DTYPE_OF_CODE[code])
        known[key] = leaf, leaf.nbytes
    leaf, nbytes = known[key]
    start, end = offsets
    if end - start != nbytes:
        raise wrong(f"has {end - start} bytes, and its shape and dtype need {str(nbytes)[:40]}")
    return start, end, leaf


def read_index(path: Path) -> dict[str, list[str]]:
    """Read a shard index (`model.safetensors.index.json`) as {shard file name: names of its leaves}.

    Raises:
        UserError: The file is not an index, or refers to a file outside its own directory.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: has no weight_map; it is not an index of safetensors shards")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or "\0" in shard or PurePosixPath(shard).name != shard or shard in {"", ".."}:
            raise UserError(f"{path}: {name[:80]!r} points to {str(shard)[:80]!r}; a shard must be next to its index")
        if not shard.endswith(".safetensors"):
            raise UserError(
                f"{path}: {name[:80]!r} is in {shard[:80]!r}, which is not a safetensors file; convert it first"
            )
        shards.setdefault(shard, []).append(name)
    return shards


def read_sharded_header(index_path: Path) -> Header:
    """Read the headers of all shards that an index lists, validate them against the index, and join them.

    Raises:
        UserError: A shard is missing, or its leaves are not those that the index lists for it.
    """
    leaves: dict[str, LeafInfo] = {}
    byte_ranges: dict[str, tuple[ByteRange, ...]] = {}
    metadata: dict[str, str] = {}
    for shard, names in sorted(read_index(index_path).items()):
        path = index_path.parent / shard
        if not path.is_file():
            raise UserError(f"{index_path}: the shard {shard} is missing; fetch it")
        header = read_header(path)
        wrong = sorted(header.leaves.keys() ^ set(names))
        if wrong:
            raise UserError(f"{path}: index and shard disagree about {wrong[0][:80]!r} ({len(wrong)} names in all)")
        leaves |= header.leaves
        byte_ranges |= header.byte_ranges
        metadata |= header.metadata
    return Header(leaves, byte_ranges, metadata)


def safetensors_layout(leaves: Mapping[str, LeafInfo], shard_bytes: int, metadata: Mapping[str, str]) -> OutputLayout:
    """Plan the shards for `leaves`, in order, and the index if there are several shards.

    Args:
        leaves: Name -> leaf to write.
        shard_bytes: Maximum bytes of leaves per shard; a larger leaf gets a shard of its own.
        metadata: The `__metadata__` of each shard.
    """
    shards = _split_into_shards(leaves, shard_bytes)
    sizes, headers, byte_ranges = {}, {}, {}
    for file, names in shards.items():
        headers[file] = _header_bytes([(name, leaves[name]) for name in names], metadata)
        path, end = Path(file), len(headers[file])
        for name in names:
            byte_ranges[name] = (ByteRange(path, end, leaves[name].nbytes),)
            end += leaves[name].nbytes
        sizes[file] = end
    if len(shards) == 1:
        return OutputLayout({}, sizes, byte_ranges, headers)
    index = {
        "metadata": {
            "total_parameters": sum(leaf.elements for leaf in leaves.values()),
            "total_size": sum(leaf.nbytes for leaf in leaves.values()),
        },
        "weight_map": dict(sorted((name, file) for file, names in shards.items() for name in names)),
    }
    return OutputLayout({"model.safetensors.index.json": serialize_json(index)}, sizes, byte_ranges, headers)


def _split_into_shards(leaves: Mapping[str, LeafInfo], shard_bytes: int) -> dict[str, list[str]]:
    """Return file name -> leaf names, with the file names that transformers expects."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, leaf in leaves.items():
        if shards[-1] and filled + leaf.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += leaf.nbytes
    count = len(shards)
    return {
        # Dtypes with larger items first, as the safetensors library orders them: each tensor is aligned to its items.
        "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors": sorted(
            shard, key=lambda name: -ITEM_BYTES[leaves[name].dtype]
        )
        for number, shard in enumerate(shards, 1)
    }


def _header_bytes(leaves: Iterable[tuple[str, LeafInfo]], metadata: Mapping[str, str]) -> bytes:
    """Return the length prefix and header of a file with `leaves` in this order, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    start = 0
    for name, leaf in leaves:
        end = start + leaf.nbytes
        entries[name] = {"dtype": CODE_OF_DTYPE[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
