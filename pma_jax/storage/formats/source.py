"""A checkpoint in storage as the readers describe it: named leaves, their shapes and dtypes, and where their bytes are.

Opening a checkpoint of any format gives a `CheckpointSource`; nothing here depends on a format.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

# Size in bytes of every supported storage dtype, by its numpy (or ml_dtypes) name.
ITEM_BYTES = (
    dict.fromkeys(("float64", "int64", "uint64"), 8)
    | dict.fromkeys(("float32", "int32", "uint32"), 4)
    | dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2)
    | dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8", "bool"), 1)
)
# float8_e8m0fnu holds exponents that scale other values: a sum of exponents is meaningless, so they must be equal.
SUMMED_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})


@dataclass(frozen=True)
class LeafInfo:
    """Shape, dtype and chunking of one stored array.

    Attributes:
        shape: The array's shape.
        dtype: A key of `ITEM_BYTES`.
        chunk_elements: Number of consecutive elements (C order) that are decoded together; 1 where any range is cheap.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_elements: int = 1

    @property
    def elements(self) -> int:
        """The number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The decoded size in bytes."""
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def is_summed(self) -> bool:
        """Whether merging averages the leaf (floating point) instead of requiring equal values in every source."""
        return self.dtype in SUMMED_DTYPES


@dataclass(frozen=True)
class ByteRange:
    """`nbytes` bytes of one file, starting at `offset`."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint whose leaves can be read one by one: its metadata, without its arrays.

    Attributes:
        format: "safetensors" or "orbax"; "deferred" if only the name of a hub revision is known.
        path: The directory or file that was opened.
        origin: The address that the user gave: the same path, or an hf:// address with its resolved commit.
        leaves: Name -> LeafInfo, in storage order.
        byte_ranges: Name -> where the leaf's raw little-endian bytes are stored, in C order. Leaves that are not here
            are decoded: see `zstd_frames` and `tensorstore_specs`.
        tokens: Tokens seen when the checkpoint was saved, if known.
        step: The optimizer step, if known.
        files: Small files beside the weights (config, tokenizer).
        metadata: Metadata that the format itself stores: safetensors' `__metadata__`, Orbax's tree metadata.
        notes: Messages for the user about inferred settings, one line each.
        zstd_frames: Name -> `ZstdFrames` of the leaves that can be decoded sequentially without tensorstore.
        tensorstore_specs: Name -> tensorstore spec, for Orbax.
    """

    format: str
    path: Path
    origin: str
    leaves: Mapping[str, LeafInfo]
    byte_ranges: Mapping[str, tuple[ByteRange, ...]]
    tokens: int | None = None
    step: int | None = None
    files: tuple[Path, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    zstd_frames: Mapping[str, Any] = field(default_factory=dict)
    tensorstore_specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The decoded size in bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @property
    def identity(self) -> dict[str, Any]:
        """Address, format, tokens and step, by which descriptions of a merge identify an input; ready for JSON."""
        return {"source": self.origin, "kind": self.format, "tokens": self.tokens, "step": self.step}


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy dtype for a key of `ITEM_BYTES`; imports ml_dtypes only for the types that numpy lacks."""
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def are_sizes(values: Any) -> TypeGuard[list[int]]:
    """Return whether untrusted metadata is a list of integers from 0 to 2^63 - 1, as shapes and offsets must be."""
    # bool is a subclass of int. Each size is bounded so that the product of 64 dimensions stays cheap to compute.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def leaf_differences(
    expected: Mapping[str, Any],
    actual: Mapping[str, Any],
    dtype_of: Callable[[Any], str] = lambda leaf: str(leaf.dtype),
) -> list[str]:
    """List how named leaves differ from the expected ones in names, shapes and dtypes, one line each.

    Args:
        expected: Name -> object with `shape` and `dtype`.
        actual: The leaves to compare.
        dtype_of: What to compare of a leaf's dtype.
    """
    differences = [f"{name} is missing" for name in expected if name not in actual]
    differences += [f"{name} is not expected" for name in actual if name not in expected]
    for name in (name for name in expected if name in actual):
        wanted, leaf = expected[name], actual[name]
        if tuple(leaf.shape) != tuple(wanted.shape):
            differences.append(f"{name} has shape {tuple(leaf.shape)}, not {tuple(wanted.shape)}")
        elif dtype_of(leaf) != dtype_of(wanted):
            differences.append(f"{name} is {leaf.dtype}, not {wanted.dtype}")
    return differences
