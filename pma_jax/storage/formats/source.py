"""Description of a stored checkpoint in any format: names, shapes and dtypes of its leaves, and where their bytes are.

The readers of all formats return a `CheckpointSource`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

# Bits per element of the dtypes that are stored without padding between elements.
PACKED_BITS = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
# Size in bytes of one stored item of every supported storage dtype, by its numpy (or ml_dtypes) name. An item is an
# element, or a byte of a dtype in `PACKED_BITS`.
ITEM_BYTES = (
    dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8)
    | dict.fromkeys(("float32", "int32", "uint32"), 4)
    | dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2)
    | dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1)
    | dict.fromkeys(("int8", "uint8", "bool", *PACKED_BITS), 1)
)
# The other dtypes must be equal in all sources. Not float8_e8m0fnu: it holds exponents that scale other values, and a
# sum of exponents is meaningless.
SUMMED_DTYPES = frozenset(
    ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)
# Dtypes that are read from zarr arrays only. Numbers of less than a byte take a whole byte there.
ZARR_DTYPES = {"complex128": 16, "float8_e3m4": 1, "float8_e4m3b11fnuz": 1, "int4": 1, "int2": 1}
ITEM_BYTES |= ZARR_DTYPES
# Dtypes of the package ml_dtypes, which NumPy lacks.
ML_DTYPES = frozenset(name for name in ITEM_BYTES if name.startswith(("bfloat", "float8", "int4", "int2")))


@dataclass(frozen=True)
class LeafInfo:
    """Shape, dtype and chunking of one stored array.

    Attributes:
        shape: The array's shape.
        dtype: A key of `ITEM_BYTES`.
        chunk_elements: Number of consecutive elements (C order) that are decoded together; 1 if any range can be read
            without decoding others.
        is_python_number: Whether the leaf is a Python number instead of an array: it keeps its dtype in every output.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_elements: int = 1
    is_python_number: bool = False

    # Cached, because leaves of one shape may share one object, and there may be a million of them.
    @functools.cached_property
    def elements(self) -> int:
        """The number of stored items: of elements (1 for a scalar), or of bytes if the dtype is in `PACKED_BITS`."""
        count = math.prod(self.shape)
        return count * PACKED_BITS[self.dtype] // 8 if self.dtype in PACKED_BITS else count

    @functools.cached_property
    def nbytes(self) -> int:
        """The decoded size in bytes."""
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def is_summed(self) -> bool:
        """Whether merging averages the leaf (floating point) instead of taking its values from one source."""
        return self.dtype in SUMMED_DTYPES

    @property
    def is_integer(self) -> bool:
        """Whether the dtype is integer or boolean."""
        return self.dtype.startswith(("int", "uint", "bool"))


class ByteRange(NamedTuple):
    """A contiguous part of one file: `nbytes` bytes, starting at `offset`."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointSource:
    """Description of a checkpoint: its leaves, and where they are stored. `formats.open.read_leaf` reads one leaf.

    Attributes:
        format: "safetensors" or "orbax"; "deferred" for a hub revision that has not been opened.
        path: The directory or file that was opened.
        origin: The address that the user gave: the same path, or an hf:// address with its resolved commit.
        leaves: Name -> LeafInfo, in storage order.
        byte_ranges: Name -> where the leaf's raw little-endian bytes are stored, in C order. Leaves that are absent
            here must be decoded: see `zstd_frames` and `tensorstore_specs`.
        tokens: Tokens seen when the checkpoint was saved, if known.
        step: The optimizer step, if known.
        epoch: The epoch, if the name states it.
        other_files: Files in the same directory that hold no leaves (config, tokenizer).
        metadata: Metadata that the format itself stores: safetensors' `__metadata__`, Orbax's tree metadata.
        notes: Messages for the user about inferred settings, one line each.
        zstd_frames: Name -> `ZstdFrames` of the leaves that can be decoded sequentially without tensorstore.
        grids: Name -> `ChunkGrid` of the leaves that can be unpacked without tensorstore.
        tensorstore_specs: Name -> tensorstore spec, for Orbax.
    """

    format: str
    path: Path
    origin: str
    leaves: Mapping[str, LeafInfo]
    byte_ranges: Mapping[str, tuple[ByteRange, ...]]
    tokens: int | None = None
    step: int | None = None
    epoch: int | None = None
    other_files: tuple[Path, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    zstd_frames: Mapping[str, Any] = field(default_factory=dict)
    grids: Mapping[str, Any] = field(default_factory=dict)
    tensorstore_specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The decoded size in bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies an input in a merge's provenance: origin (key "source"), format ("kind"), tokens and step."""
        return {"source": self.origin, "kind": self.format, "tokens": self.tokens, "step": self.step}


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype for a key of `ITEM_BYTES`; import ml_dtypes only for dtypes that NumPy lacks.

    It is uint8 for a dtype in `PACKED_BITS`, which NumPy cannot index.
    """
    if name in PACKED_BITS:
        return np.dtype(np.uint8)
    if name in ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def are_sizes(values: Any) -> TypeGuard[list[int]]:
    """Return whether `values`, from untrusted metadata, is a valid shape or list of offsets: integers in [0, 2^63)."""
    # `type`, because bool is a subclass of int. Bounded sizes keep the product of a shape's sizes cheap to compute.
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        return False
    return not values or 0 <= min(values) <= max(values) < 2**63


def leaf_differences(
    expected: Mapping[str, Any],
    actual: Mapping[str, Any],
    dtype_of: Callable[[Any], str] = lambda leaf: str(leaf.dtype),
) -> list[str]:
    """List the differences between leaves and the expected ones in names, shapes and dtypes, one line each.

    Args:
        expected: Name -> object with `shape` and `dtype`.
        actual: The leaves to compare.
        dtype_of: Returns the name of a leaf's dtype, for comparison; a function that returns a constant ignores dtypes.
    """
    if actual is expected:
        return []
    differences = [f"{name} is missing" for name in expected if name not in actual]
    differences += [f"{name} is not expected" for name in actual if name not in expected]
    for name in (name for name in expected if name in actual):
        wanted, leaf = expected[name], actual[name]
        if tuple(leaf.shape) != tuple(wanted.shape):
            differences.append(f"{name} has shape {tuple(leaf.shape)}, not {tuple(wanted.shape)}")
        elif dtype_of(leaf) != dtype_of(wanted):
            differences.append(f"{name} is {leaf.dtype}, not {wanted.dtype}")
    return differences
