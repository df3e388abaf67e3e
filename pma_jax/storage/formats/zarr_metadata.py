"""Parse the metadata of zarr arrays, versions 2 and 3, as untrusted input.

What is not supported is refused with its name, so that no array is read by other rules than it was written by.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.storage.formats.source import ITEM_BYTES, PACKED_BITS, are_sizes

# What tensorstore decodes, besides zstd.
_V2_COMPRESSORS = frozenset({"zstd", "blosc", "zlib", "gzip", "bz2"})
_V3_CODECS = frozenset({"bytes", "blosc", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd"})
_SEPARATORS = (".", "/")
_MAX_DIMENSIONS = 32


@dataclass(frozen=True)
class Encoding:
    """How an array is divided into chunks, and how a chunk is stored.

    Attributes:
        shape: The array's shape.
        chunk: The shape of one chunk.
        dtype: A key of `ITEM_BYTES`.
        codec: "raw", "zstd" or "other".
        is_shard: Whether each chunk is stored in a shard of its own, followed by the shard's index.
        prefix: First part of a chunk's key; "" for none.
        separator: Text between the parts of a chunk's key.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str
    codec: str
    is_shard: bool
    prefix: str
    separator: str

    def chunk_key(self, indexes: tuple[int, ...]) -> str:
        """Return the key of the chunk at `indexes`, one per axis."""
        parts = map(str, indexes)
        return self.separator.join([self.prefix, *parts] if self.prefix else parts) or "0"


def parse_v2(metadata: Any) -> Encoding:
    """Parse the content of a .zarray file (zarr 2).

    Raises:
        UserError: The metadata is invalid or not supported.
        KeyError, TypeError, AttributeError, IndexError, ValueError: The metadata is malformed.
    """
    _check_equal("zarr_format", metadata["zarr_format"], (2,))
    code = metadata["dtype"]
    # Codes of numbers and booleans; others, of texts and times for example, are refused as they are.
    is_numpy_code = isinstance(code, str) and re.fullmatch(r"[<>|](b1|[iu][1248]|f[248]|c8|c16)", code) is not None
    dtype = np.dtype(code).newbyteorder("<").name if is_numpy_code else code
    compressor, order = metadata.get("compressor"), metadata["order"]
    codec = "raw"
    if compressor is not None:
        _check_equal("compressor", compressor["id"], _V2_COMPRESSORS)
        codec = "zstd" if compressor["id"] == "zstd" else "other"
    if metadata.get("filters"):
        raise UserError(f"its filters {_shorten(metadata['filters'])} are not supported")
    _check_equal("order", order, ("C", "F"))
    if order == "F" or (is_numpy_code and code[0] == ">"):
        codec = "other"
    separator = metadata.get("dimension_separator", ".")
    _check_equal("dimension_separator", separator, _SEPARATORS)
    shape, chunk = _check_array(metadata["shape"], metadata["chunks"], dtype)
    return Encoding(shape, chunk, dtype, codec, False, "", separator)


def parse_v3(metadata: Any) -> Encoding:
    """Parse the content of a zarr.json file (zarr 3).

    Raises:
        UserError: The metadata is invalid or not supported.
        KeyError, TypeError, AttributeError, IndexError, ValueError: The metadata is malformed.
    """
    _check_equal("zarr_format", metadata["zarr_format"], (3,))
    _check_equal("node_type", metadata["node_type"], ("array",))
    grid, keys, dtype, codecs = (metadata[key] for key in ("chunk_grid", "chunk_key_encoding", "data_type", "codecs"))
    _check_equal("chunk_grid", grid["name"], ("regular",))
    _check_equal("chunk_key_encoding", keys["name"], ("default", "v2"))
    if metadata.get("storage_transformers"):
        raise UserError(f"its storage_transformers {_shorten(metadata['storage_transformers'])} are not supported")
    shape, chunk = _check_array(metadata["shape"], grid["configuration"]["chunk_shape"], dtype)
    # Orbax stores each chunk in a shard of its own: the chunk's bytes, then the index of the shard.
    is_shard = _codec_names(codecs) == ("sharding_indexed",)
    if is_shard:
        inner = codecs[0]["configuration"]
        is_single = inner["chunk_shape"] == list(chunk) and inner.get("index_location", "end") == "end"
        has_checksum = _codec_names(inner["index_codecs"]) == ("bytes", "crc32c")
        codecs = inner["codecs"]
        codec = _codec_kind(codecs, dtype) if is_single and has_checksum else "other"
        _codec_kind(codecs, dtype)
    else:
        codec = _codec_kind(codecs, dtype)
    is_default = keys["name"] == "default"
    separator = keys.get("configuration", {}).get("separator", "/" if is_default else ".")
    _check_equal("chunk_key_encoding's separator", separator, _SEPARATORS)
    return Encoding(shape, chunk, dtype, codec, is_shard, "c" if is_default else "", separator)


def _codec_names(codecs: Any) -> tuple[str, ...]:
    names = tuple(codec["name"] for codec in codecs)
    for name in names:
        _check_equal("codec", name, _V3_CODECS)
    return names


def _codec_kind(codecs: Any, dtype: str) -> str:
    """Return "raw", "zstd" or "other" for the codecs of a chunk."""
    kind = {"bytes": "raw", "bytes zstd": "zstd"}.get(" ".join(_codec_names(codecs)), "other")
    if kind != "other" and ITEM_BYTES[dtype] > 1 and codecs[0].get("configuration", {}).get("endian") != "little":
        return "other"
    return kind


def _check_equal(what: str, value: Any, supported: Any) -> None:
    if type(value) not in (str, int) or value not in supported:
        names = ", ".join(sorted(map(str, supported)))
        raise UserError(f"its {what} {_shorten(value)} is not supported; supported: {names}")


def _check_array(shape: Any, chunk: Any, dtype: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES or dtype in PACKED_BITS:
        raise UserError(f"its dtype {_shorten(dtype)} is not supported")
    if not are_sizes(shape) or not are_sizes(chunk) or len(shape) != len(chunk) or 0 in chunk:
        raise UserError(f"the shape {_shorten(shape)} and the chunk shape {_shorten(chunk)} are invalid or do not fit")
    if len(shape) > _MAX_DIMENSIONS:
        raise UserError(f"it has {len(shape)} dimensions, more than {_MAX_DIMENSIONS}")
    return tuple(shape), tuple(chunk)


def _shorten(value: Any) -> str:
    return repr(value)[:60]
