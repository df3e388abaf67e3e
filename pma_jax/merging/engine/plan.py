"""Planning a merge: what is read and written and the memory it takes, checked before the first byte is written."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.merging.engine import sums
from pma_jax.storage.digests import CHECKSUMS, SEGMENT_ELEMENTS
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.outputs import plan_output
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource, LeafInfo, list_differences
from pma_jax.storage.formats.zstd import DECODER_BYTES
from pma_jax.storage.paths import RangeReader, is_bucket

DTYPES = ("keep", "float32", "bfloat16")
# Small enough for a core's share of the caches, large enough that threads seldom meet at the interpreter's lock.
BLOCK_ELEMENTS = 2**18
LEAST_BLOCK_ELEMENTS = 2**12
# What the interpreter, numpy and thread stacks take beside the buffers.
_BASE_BYTES = 48 * 2**20
# What a process must have to read before its start, a fifth of a second, is soon made good.
HELPED_BYTES = 2**30
# More only wait for each other, at the interpreter's lock.
_MOST_THREADS = 2
# tensorstore's own buffers: an array being decoded exists as its compressed bytes and as the result at once.
_DECODE_FACTOR = 2
_REGION_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Unit:
    """What is merged at one go, by one thread or process: elements [start, stop) of a leaf."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class MergePlan:
    """A merge that is ready to run.

    Attributes:
        sources: what is merged, oldest first.
        coefficients: float64 [R, K].
        recipes: R names, for people.
        dtype: "keep", "float32" or "bfloat16".
        checksum: "xxh3_128" or "sha256", of every segment read or written.
        leaves: the merged leaves.
        layout: the files of each merged checkpoint (the same for every recipe).
        kind: "safetensors" or "orbax".
        block_elements: elements that are summed at a time.
        threads: threads of this process that merge leaves which lie in plain runs of bytes.
        processes: processes that do so, this one and helpers.
        streamed: leaves that some source has as zstd frames, decoded block by block like a plain leaf is read.
        decoded: leaves that tensorstore decodes, name -> elements of one region.
        reads_ahead: decoded regions in flight at once.
        memory_bytes: an upper estimate of the peak resident memory.
        digest: what a resumed merge must agree with.
        notes: what the user should know, one line each.
    """

    sources: tuple[CheckpointSource, ...]
    coefficients: np.ndarray
    recipes: tuple[str, ...]
    dtype: str
    checksum: str
    leaves: Mapping[str, LeafInfo]
    layout: OutputLayout
    kind: str
    block_elements: int
    threads: int
    processes: int
    streamed: frozenset[str]
    decoded: Mapping[str, int]
    reads_ahead: int
    memory_bytes: int
    digest: str
    notes: tuple[str, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes of leaves that are read, over all sources."""
        return sum(source.nbytes for source in self.sources)

    @property
    def write_bytes(self) -> int:
        """Bytes of leaves that are written, over all recipes."""
        return len(self.recipes) * self.layout.nbytes

    def units(self) -> Iterator[Unit]:
        """The whole work, in the order of storage: a segment of a leaf, or a whole leaf that has to be decoded."""
        for name, leaf in self.leaves.items():
            step = leaf.elements if name in self.decoded or name in self.streamed else SEGMENT_ELEMENTS
            for start in range(0, leaf.elements, max(1, step)):
                yield Unit(name, start, min(start + step, leaf.elements))


def plan(
    sources: Sequence[CheckpointSource],
    coefficients: np.ndarray,
    *,
    recipes: Sequence[str] | None = None,
    dtype: str = "keep",
    format: str = "keep",
    memory_limit_bytes: int = 2**30,
    shard_bytes: int = 5 * 10**9,
    checksum: str = "xxh3_128",
    metadata: Mapping[str, Any] | None = None,
    cores: int | None = None,
) -> MergePlan:
    """Checks that the sources fit together and lays the merge out; writes nothing.

    Args:
        sources: checkpoints, oldest first, from `open_source`.
        coefficients: float64 [K] or [R, K]; row r makes merged checkpoint r.
        recipes: R names for the provenance; "weights" if None.
        dtype: storage dtype of the merged floating-point leaves.
        format: "keep" (that of the first source), "safetensors" or "orbax".
        memory_limit_bytes: the most resident memory the merge may take.
        shard_bytes: the most bytes in one safetensors file.
        checksum: "xxh3_128" or "sha256": what the provenance's digests are made from; see `digests`.
        metadata: custom metadata of a merged Orbax checkpoint; tokens and step of the newest source, if None.
        cores: cores to read and add with; those that this process may use, if None.

    Raises:
        ValueError: the sources differ, the coefficients do not fit, or the memory does not suffice; one line.
    """
    if not sources:
        raise ValueError("nothing to merge: give at least one checkpoint")
    rows = np.atleast_2d(np.asarray(coefficients, np.float64))
    names = tuple(recipes) if recipes is not None else ("weights",) * len(rows)
    _check_coefficients(rows, names, len(sources))
    if dtype not in DTYPES:
        raise ValueError(f"the dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if checksum not in CHECKSUMS:
        raise ValueError(f"the checksum {checksum!r} is not one of {', '.join(CHECKSUMS)}")
    _check_leaves(list(sources))
    kind = sources[0].kind if format == "keep" else format
    leaves = {name: _merged_leaf(leaf, dtype) for name, leaf in sources[0].leaves.items()}
    known = {"tokens": sources[-1].tokens, "step": sources[-1].step}
    custom = {key: value for key, value in known.items() if value is not None} if metadata is None else metadata
    layout = plan_output(list(sources), leaves, kind, shard_bytes, dtype, custom)
    decoded, reads_ahead, decode_bytes = _plan_decoding(sources, len(rows), memory_limit_bytes)
    # What all sources and recipes hold of a block stays in cache together.
    block_elements = (
        BLOCK_ELEMENTS if len(rows) == 1 else max(LEAST_BLOCK_ELEMENTS, 16 * BLOCK_ELEMENTS // sum(rows.shape))
    )
    dtypes = {leaf.dtype for leaf in sources[0].leaves.values()}
    each = sums.scratch_bytes(len(rows), len(sources), block_elements, dtypes)
    streamed = frozenset(
        name for name in leaves if name not in decoded and not all(name in s.byte_ranges for s in sources)
    )
    if streamed:
        each += len(sources) * DECODER_BYTES
    each += sum(is_bucket(source.path) for source in sources) * RangeReader.AHEAD_BYTES
    plain_bytes = sum(leaf.nbytes for s in sources for name, leaf in s.leaves.items() if name not in decoded)
    threads, processes = _plan_work(each, cores, plain_bytes, memory_limit_bytes - _BASE_BYTES - decode_bytes)
    notes = [note for source in sources for note in source.notes]
    if len({source.kind for source in sources}) > 1:
        notes.append("sources are of several formats; leaves are matched by name")
    made = MergePlan(
        tuple(sources),
        rows,
        names,
        dtype,
        checksum,
        leaves,
        layout,
        kind,
        block_elements,
        threads,
        processes,
        streamed,
        decoded,
        reads_ahead,
        decode_bytes + processes * (_BASE_BYTES + threads * each),
        "",
        (*dict.fromkeys(notes), *layout.notes),
    )
    return replace(made, digest=_digest(made))


def _check_coefficients(rows: np.ndarray, names: Sequence[str], count: int) -> None:
    if rows.ndim != 2 or rows.shape[1] != count or not len(rows):
        raise ValueError(
            f"{count} checkpoints need {count} coefficients a recipe, not an array of shape {list(rows.shape)}"
        )
    if len(names) != len(rows):
        raise ValueError(f"{len(rows)} rows of coefficients need as many recipe names, not {len(names)}")
    if not np.isfinite(rows).all():
        raise ValueError("a coefficient is not a finite number")
    for name, row in zip(names, rows, strict=True):
        if not row.any():
            raise ValueError(f"every coefficient of {name} is zero")


def _check_leaves(sources: list[CheckpointSource]) -> None:
    if not sources[0].leaves:
        raise ValueError(f"{sources[0].origin}: holds no arrays")
    found = list_differences(sources)
    if found:
        raise ValueError(f"the checkpoints differ in {len(found)} places: {'; '.join(found[:10])}")


def _merged_leaf(leaf: LeafInfo, dtype: str) -> LeafInfo:
    return LeafInfo(leaf.shape, dtype if dtype != "keep" and leaf.is_summed else leaf.dtype)


def _plan_work(each_bytes: int, cores: int | None, plain_bytes: int, budget_bytes: int) -> tuple[int, int]:
    """(threads of each process, processes): processes of one thread where each has enough to do, else threads here."""
    cores = cores or len(os.sched_getaffinity(0))
    if budget_bytes < each_bytes:
        short = (each_bytes - budget_bytes) // 2**20 + 1
        raise ValueError(f"{short} MiB more memory are needed; raise the limit or merge fewer recipes at once")
    room = (budget_bytes + _BASE_BYTES) // (each_bytes + _BASE_BYTES)
    processes = min(cores, plain_bytes // HELPED_BYTES, room)
    if processes > 1:
        return 1, processes
    return min(cores, _MOST_THREADS, budget_bytes // each_bytes), 1


def _plan_decoding(sources: Sequence[CheckpointSource], rows: int, limit_bytes: int) -> tuple[dict[str, int], int, int]:
    """(decoded leaf -> elements of a region, regions in flight, bytes they all take); empty if all leaves are plain."""
    regions: dict[str, int] = {}
    for name, leaf in sources[0].leaves.items():
        if all(name in source.byte_ranges or name in source.zstd_frames for source in sources):
            continue
        # A leaf is decoded in pieces that suit the source with the largest chunks; the others' smaller ones divide
        # badly at worst, which costs time, never a wrong sum.
        chunk_elements = max(source.leaves[name].chunk_elements for source in sources)
        most = max(1, _REGION_BYTES // ITEM_BYTES[leaf.dtype] // chunk_elements) * chunk_elements
        regions[name] = min(leaf.elements, most)
    if not regions:
        return {}, 0, 0
    largest = max(regions, key=lambda name: regions[name] * ITEM_BYTES[sources[0].leaves[name].dtype])
    leaf = sources[0].leaves[largest]
    region_bytes = regions[largest] * ITEM_BYTES[leaf.dtype]
    sum_bytes = regions[largest] * ITEM_BYTES[sums.accumulation_dtype(leaf.dtype)] * rows
    # tensorstore and the libraries under it, once loaded.
    loaded = 160 * 2**20
    for ahead in (3, 2, 1):
        total = loaded + sum_bytes + ahead * _DECODE_FACTOR * region_bytes
        if total + _BASE_BYTES <= limit_bytes or ahead == 1:
            break
    if total + _BASE_BYTES > limit_bytes:
        raise ValueError(
            f"{largest} is stored in pieces of {region_bytes // 2**20} MiB, and merging it needs "
            f"{(total + _BASE_BYTES) // 2**20 + 1} MiB of memory; raise the memory limit"
        )
    return regions, ahead, total


def _digest(made: MergePlan) -> str:
    """Identifies the merge: the same sources (by place, size and time), coefficients and output."""
    stamps = []
    for source in made.sources:
        paths = sorted({byte_range.path for byte_ranges in source.byte_ranges.values() for byte_range in byte_ranges})
        if not paths or made.decoded or made.streamed:
            paths += sorted(path for path in source.path.rglob("*") if path.is_file()) if source.path.is_dir() else []
        stamps.append([[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths])
    facts: list[Any] = [
        stamps,
        made.coefficients.tolist(),
        made.recipes,
        made.dtype,
        made.checksum,
        made.kind,
        sorted(made.layout.sizes.items()),
    ]
    facts += [sorted((name, text.hex()) for name, text in made.layout.texts.items())]
    facts += [[unit.name, unit.start, unit.stop] for unit in made.units()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def check_disk_space(made: MergePlan, outs: Sequence[Path]) -> None:
    """Checks that the outputs can be made: one for each recipe, all different, and room on the disk.

    Raises:
        ValueError: they are too few or too many, two are the same, or the disk has too little room.
    """
    if len(outs) != len(made.recipes):
        raise ValueError(f"{len(made.recipes)} recipes need as many output directories, not {len(outs)}")
    if len({out.absolute() for out in outs}) != len(outs):
        raise ValueError("two recipes have the same output directory")
    parent = outs[0].absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < made.write_bytes:
        raise ValueError(f"{parent}: {free} bytes are free and the merge writes {made.write_bytes}")
