"""What a checkpoint is to the engine: named leaves, and where the bytes of each lie."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Every storage dtype the engine reads, by its numpy (or ml_dtypes) name, with its size in bytes.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
# float8_e8m0fnu is an exponent that scales other values: a sum of exponents means nothing, so it must be equal.
SUMMED = frozenset({"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})


@dataclass(frozen=True)
class LeafInfo:
    """One array: its shape and its dtype's numpy name, and how many leading elements can be read without waste.

    Attributes:
        shape: the array's shape.
        dtype: a key of `ITEM_BYTES`.
        granule: elements (C order) that are stored as one piece and so are read together; 1 where any range is cheap.
    """

    shape: tuple[int, ...]
    dtype: str
    granule: int = 1

    @property
    def elements(self) -> int:
        """The number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes, decoded."""
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def is_summed(self) -> bool:
        """Whether the leaf is averaged (floating point) or must be equal in every source."""
        return self.dtype in SUMMED


@dataclass(frozen=True)
class Extent:
    """A run of a leaf's raw little-endian bytes, in C order, inside one file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be read leaf by leaf, without loading it.

    Attributes:
        kind: "safetensors" or "orbax".
        path: the directory or file that was opened.
        origin: what the user named: the same path, or an hf:// address with its resolved commit.
        leaves: name -> LeafInfo, in the order of storage.
        extents: name -> the runs of its bytes, which together are exactly the leaf; a leaf that is not here is decoded
            by tensorstore through `handle`.
        frames: name -> `zstd_frames.Frames` of leaves that can be decoded from first to last without tensorstore.
        tokens: tokens seen when it was saved, if known.
        step: the optimizer step, if known.
        files: small files beside the weights (config, tokenizer).
        metadata: what the format itself carries: safetensors' `__metadata__`, Orbax's tree metadata.
        notes: what was guessed while opening, one line each; to be told to the user.
        handle: whatever decodes the leaves without extents (None for safetensors).
    """

    kind: str
    path: Path
    origin: str
    leaves: Mapping[str, LeafInfo]
    extents: Mapping[str, tuple[Extent, ...]]
    tokens: int | None = None
    step: int | None = None
    files: tuple[Path, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    handle: Any = None
    frames: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size in bytes of all leaves, decoded."""
        return sum(leaf.nbytes for leaf in self.leaves.values())


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a key of `ITEM_BYTES`; imports ml_dtypes only for the types that numpy lacks."""
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def differences(sources: list[Source]) -> list[str]:
    """Every way in which the sources' leaves differ from the first source's, one line each, in the leaves' order."""
    first, found = sources[0], []
    for other in sources[1:]:
        for name, want in first.leaves.items():
            have = other.leaves.get(name)
            if have is None:
                found.append(f"{name}: missing in {other.origin}")
            elif have.shape != want.shape:
                found.append(
                    f"{name}: shape {list(want.shape)} in {first.origin} but {list(have.shape)} in {other.origin}"
                )
            elif have.dtype != want.dtype:
                found.append(f"{name}: {want.dtype} in {first.origin} but {have.dtype} in {other.origin}")
        found.extend(f"{name}: only in {other.origin}" for name in other.leaves if name not in first.leaves)
    return found
