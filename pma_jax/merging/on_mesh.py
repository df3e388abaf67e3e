"""Merge checkpoints in storage on the devices of all processes (`pma merge --on mesh`).

Each process reads its parts of every checkpoint (see `shares`), adds them on its devices to float32 sums, and writes
its parts of the merged checkpoint to the output, on a shared disk or in a bucket. It holds its share of the sums and of
two checkpoints: the one that is added, and the next one, which is read meanwhile. No process sends values to another.
Process 0 commits the result once all have written. The arithmetic is that of `averager`, whose bits on CPU are those of
the engine on the host; provenance, digests and refusals are the engine's.

A merge that was interrupted starts again: it has no journal.
"""

import functools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.merging.averager import weighted_sums_of_stream
from pma_jax.merging.commit import PartHashes, begin, commit
from pma_jax.merging.engine import journal
from pma_jax.merging.engine.merge import (
    MergeResult,
    Output,
    ProgressCallback,
    remove_on_user_error,
    resolve_outputs,
)
from pma_jax.merging.engine.plan import MergePlan
from pma_jax.merging.engine.units import not_finite_message
from pma_jax.merging.shares import Part, assign_parts
from pma_jax.runtime import hosts
from pma_jax.storage.digests import SEGMENT_ELEMENTS, SegmentHasher
from pma_jax.storage.formats.byte_ranges import open_files, read_range, slice_ranges, write_range
from pma_jax.storage.formats.open import read_leaf_bytes
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource, numpy_dtype
from pma_jax.storage.paths import is_bucket, write_object

_THREADS = 8  # that read or write parts at once
_ALIGNMENT_BYTES = 64  # arrays at such addresses are used by devices of the CPU without a copy
_SAMPLE_ELEMENTS = 2**12  # of each segment, for the warning about rounding


class _Flat(NamedTuple):
    """The parts of this process of one input dtype and one output dtype, as one flat array over its devices.

    Attributes:
        dtype: Dtype of the sources.
        out_dtype: Dtype of the result.
        parts: Part -> its first element in the array.
        shard_elements: Elements on each device; the last ones of the array are padding.
    """

    dtype: str
    out_dtype: str
    parts: Mapping[Part, int]
    shard_elements: int


def merge(
    plan: MergePlan,
    output_paths: Sequence[str | Path],
    *,
    progress: ProgressCallback | None = None,
    command: str = "",
) -> MergeResult:
    """Run a merge plan on the devices of all processes. All processes must call it with the same plan.

    Args:
        plan: The merge plan, from `engine.plan.plan` with `writers` the number of processes.
        output_paths: One output directory per merged checkpoint; none may exist yet.
        progress: Called with (bytes read so far, bytes to read) of this process.
        command: The user's command line, for the provenance.

    Raises:
        UserError: In all processes: as `engine.merge.merge`, or a leaf is float64, or the format of an output in a
            bucket has files that hold several leaves.
    """
    index, count = hosts.process_index_and_count()
    check_dtypes(plan)
    # All look before any writes: process 0 would otherwise have begun an output that another one refuses.
    outputs = hosts.run_in_all(lambda: resolve_outputs(plan, output_paths, is_uploaded=False))
    in_bucket = any(is_bucket(output.target) for output in outputs)
    share = assign_parts(plan, count, in_bucket)[index]
    local = [output for output in outputs if not is_bucket(output.target)]
    with ExitStack() as stack:
        for output in local:
            stack.enter_context(journal.lock_work_directory(output.work_directory, index))
        stack.enter_context(remove_on_user_error([output.work_directory for output in local], index))
        hosts.run_in_all(lambda: begin(plan, outputs, index))
        merger = _ShareMerger(plan, outputs, share, progress)
        hashes = hosts.run_in_all(merger.merge)
        gathered = hosts.all_gather_text(json.dumps([[*part, *hashes[part]] for part in share]))
        notes = hosts.broadcast_from_first(lambda: json.dumps(commit(plan, outputs, gathered, command)))
    return MergeResult([*plan.notes, *merger.notes(), *json.loads(notes)], merger.read_bytes)


def check_dtypes(plan: MergePlan) -> None:
    """Raise UserError if a leaf is float64, which devices do not add."""
    wide = [name for name, leaf in plan.sources[0].leaves.items() if leaf.is_summed and leaf.dtype == "float64"]
    if wide:
        raise UserError(f"{wide[0]} is float64 ({len(wide)} such leaves), which devices do not add: give --on host")


def memory_bytes(plan: MergePlan, processes: int) -> int:
    """Return the most memory that the arrays of a process take: its share of the sums, and of two checkpoints."""
    shares = assign_parts(plan, processes, in_bucket=False)
    leaves = plan.sources[0].leaves
    return max(
        sum(
            (part.stop - part.start)
            * (2 * ITEM_BYTES[leaves[part.name].dtype] + 4 * len(plan.recipes) * leaves[part.name].is_summed)
            for part in share
        )
        for share in shares
    )


class _ShareMerger:
    """Merges the share of this process.

    Attributes:
        read_bytes: Bytes of leaves that were read so far.
    """

    def __init__(
        self, plan: MergePlan, outputs: Sequence[Output], share: Sequence[Part], progress: ProgressCallback | None
    ):
        self.read_bytes = 0
        self._plan, self._outputs, self._share, self._progress = plan, outputs, share, progress
        self._leaves, self._lock = plan.sources[0].leaves, threading.Lock()
        self._devices = jax.local_devices()
        self._flats = self._plan_flats()
        # Of two checkpoints: the bytes of each of `_flats`. Devices of the CPU use them without a copy.
        self._buffers: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {})
        self._total_bytes = len(plan.sources) * sum(map(self._part_bytes, share))
        self._hashes = {part: PartHashes([], [], []) for part in share}
        # Not added: integers, for example. As the first or the newest source has them.
        self._kept: dict[Part, np.ndarray] = {}
        self._unequal: dict[str, CheckpointSource] = {}
        # Of each segment of a part: the sums of its first elements, float64 [R, elements], and the newest values.
        self._samples: dict[Part, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def merge(self) -> dict[Part, PartHashes]:
        """Read, add and write this process's parts; return what the provenance needs of each."""
        plan = self._plan
        dtypes = {key: numpy_dtype(flat.out_dtype) for key, flat in self._flats.items()}
        with ThreadPoolExecutor(_THREADS) as pool:
            trees = (self._load(k, pool) for k in range(len(plan.sources)))
            sums = weighted_sums_of_stream(trees, plan.coefficients, dtypes)
            self._buffers = ({}, {})
            self._check_unsummed_leaves()
            for row, (output, tree) in enumerate(zip(self._outputs, sums, strict=True)):
                is_finite = all(bool(jnp.isfinite(leaf).all()) for leaf in tree.values())
                views = {key: _shards(leaf) for key, leaf in tree.items()}
                write = functools.partial(self._write, row, output, views, is_finite)
                list(pool.map(write, self._share))
        return self._hashes

    def notes(self) -> list[str]:
        """Return messages about integer leaves that differ, of all processes."""
        texts = hosts.all_gather_text(json.dumps(sorted(self._unequal)))
        names = sorted({name for text in texts for name in json.loads(text)})
        newest = self._plan.sources[-1].origin
        if not names:
            return []
        return [f"{len(names)} integer leaves differ, and are those of {newest}: {', '.join(names[:10])}"]

    def _plan_flats(self) -> dict[str, _Flat]:
        by_dtypes: dict[tuple[str, str], list[Part]] = {}
        for part in self._share:
            if self._leaves[part.name].is_summed:
                dtypes = (self._leaves[part.name].dtype, self._plan.leaves[part.name].dtype)
                by_dtypes.setdefault(dtypes, []).append(part)
        flats = {}
        for (dtype, out_dtype), parts in by_dtypes.items():
            ends = np.cumsum([part.stop - part.start for part in parts]).tolist()
            step = _ALIGNMENT_BYTES // ITEM_BYTES[dtype]
            shard_elements = -(-ends[-1] // (step * len(self._devices))) * step
            starts = dict(zip(parts, [0, *ends[:-1]], strict=True))
            flats[f"{dtype}-{out_dtype}"] = _Flat(dtype, out_dtype, starts, shard_elements)
        return flats

    def _load(self, k: int, pool: ThreadPoolExecutor) -> dict[str, jax.Array]:
        """Read this process's parts of checkpoint number `k`, and return the floating-point ones on its devices."""
        # Checkpoint k - 2 is added and no longer used: the sums of a stream wait for it before they take the next.
        buffers = self._buffers[k % 2]
        for key, flat in self._flats.items():
            if key not in buffers:
                nbytes = flat.shard_elements * len(self._devices) * ITEM_BYTES[flat.dtype]
                buffers[key] = _aligned_zeros(nbytes)
        into: dict[Part, np.ndarray] = {}
        for key, flat in self._flats.items():
            width = ITEM_BYTES[flat.dtype]
            for part, start in flat.parts.items():
                into[part] = buffers[key][start * width : (start + part.stop - part.start) * width]
        for part in self._share:
            if part not in into:
                into[part] = np.empty(self._part_bytes(part), np.uint8)
        list(pool.map(lambda part: self._read(k, part, into[part]), self._share))
        return {key: self._put(buffers[key].view(numpy_dtype(self._flats[key].dtype))) for key in buffers}

    def _put(self, values: np.ndarray) -> jax.Array:
        """Split a flat array over this process's devices."""
        mesh = jax.sharding.Mesh(np.array(self._devices), "device")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
        shards = [
            jax.device_put(shard, device)
            for shard, device in zip(np.split(values, len(self._devices)), self._devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(values.shape, sharding, shards)

    def _read(self, k: int, part: Part, into: np.ndarray) -> None:
        """Read one part of checkpoint number `k` into a uint8 array, and hash it."""
        source, width = self._plan.sources[k], ITEM_BYTES[self._leaves[part.name].dtype]
        if part.name in source.byte_ranges:
            ranges, start = source.byte_ranges[part.name], part.start * width
            paths = [piece.path for piece in slice_ranges(ranges, start, part.stop * width)]
            with open_files(paths, os.O_RDONLY) as files:
                read_range(files, ranges, start, into)
        else:
            into[:] = read_leaf_bytes(source, part.name, part.start, part.stop)
        hasher = SegmentHasher(width)
        hasher.update(into)
        self._hashes[part].read.append(hasher.finish())
        if self._leaves[part.name].is_summed:
            if ITEM_BYTES[self._plan.leaves[part.name].dtype] < 4:
                self._add_samples(k, part, into.view(numpy_dtype(self._leaves[part.name].dtype)))
        elif k == 0:
            self._kept[part] = into
        elif not np.array_equal(self._kept[part], into):
            with self._lock:
                self._unequal.setdefault(part.name, source)
            if self._plan.integers == "newest" and k == len(self._plan.sources) - 1:
                self._kept[part] = into
        with self._lock:
            self.read_bytes += len(into)
            if self._progress is not None:
                self._progress(self.read_bytes, self._total_bytes)

    def _part_bytes(self, part: Part) -> int:
        return (part.stop - part.start) * ITEM_BYTES[self._leaves[part.name].dtype]

    def _add_samples(self, k: int, part: Part, values: np.ndarray) -> None:
        """Add the first elements of each segment to float64 sums, which `_squared_changes` compares with the result."""
        newest = [
            values[start : start + _SAMPLE_ELEMENTS].astype(np.float64)
            for start in range(0, len(values), SEGMENT_ELEMENTS)
        ]
        coefficients = self._plan.coefficients[:, k, None]
        with np.errstate(all="ignore"):
            terms = [coefficients * sample for sample in newest]
            if k:
                terms = [total + term for total, term in zip(self._samples[part][0], terms, strict=True)]
        self._samples[part] = (terms, newest)

    def _check_unsummed_leaves(self) -> None:
        """Refuse leaves that cannot be averaged and differ."""
        unequal = {
            name: f"{name} ({self._leaves[name].dtype}) in {s.origin}" for name, s in sorted(self._unequal.items())
        }
        others = [text for name, text in unequal.items() if not self._leaves[name].is_integer]
        if others:
            raise UserError(
                f"{len(others)} leaves are not equal in all checkpoints, and their dtypes cannot be averaged: "
                f"{'; '.join(others[:10])}; remove them, or convert them to another dtype"
            )
        if unequal and self._plan.integers == "equal":
            raise UserError(
                f"{len(unequal)} integer or boolean leaves are not equal in all checkpoints and cannot be averaged: "
                f"{'; '.join(list(unequal.values())[:10])}; to take those of the newest checkpoint, give --integers "
                "newest"
            )

    def _write(
        self, row: int, output: Output, views: Mapping[str, list[np.ndarray]], is_finite: bool, part: Part
    ) -> None:
        """Write one part of merged checkpoint number `row`, and hash it."""
        leaf, out = self._leaves[part.name], self._plan.leaves[part.name]
        squares = [[0.0, 0.0] for _ in range(0, part.stop - part.start, SEGMENT_ELEMENTS)]
        if leaf.is_summed:
            key = f"{leaf.dtype}-{out.dtype}"
            values = _slice(views[key], self._flats[key].parts[part], part.stop - part.start)
            if not is_finite and not np.isfinite(values).all():
                message = not_finite_message(self._plan, part.name, part.start, part.stop)
                raise UserError(f"{message} (--on host adds in a wider dtype where sums overflow)")
            data = values.view(np.uint8)
            if part in self._samples:
                squares = self._squared_changes(row, part, values)
        else:
            data = self._kept[part]
        hasher = SegmentHasher(ITEM_BYTES[out.dtype])
        hasher.update(data)
        self._hashes[part].written.append(hasher.finish())
        self._hashes[part].squares.append(squares)
        if not output.is_published:
            self._store(output, part, data)

    def _squared_changes(self, row: int, part: Part, values: np.ndarray) -> list[list[float]]:
        """Return, for each segment, what `sums.squared_changes` measures."""
        changes = []
        for number, (merged, newest) in enumerate(zip(*self._samples[part], strict=True)):
            start = number * SEGMENT_ELEMENTS
            after = values[start : start + _SAMPLE_ELEMENTS].astype(np.float64)
            changes.append([float(np.sum((after - merged[row]) ** 2)), float(np.sum((newest - merged[row]) ** 2))])
        return changes

    def _store(self, output: Output, part: Part, data: np.ndarray) -> None:
        """Write the bytes of a part to their files, or to the objects that they are."""
        layout, width = self._plan.layout, ITEM_BYTES[self._plan.leaves[part.name].dtype]
        if not is_bucket(output.target):
            ranges = layout.byte_ranges_in(output.checkpoint_directory)[part.name]
            paths = [piece.path for piece in slice_ranges(ranges, part.start * width, part.stop * width)]
            with open_files(paths, os.O_WRONLY) as files:
                write_range(files, ranges, part.start * width, data)
            return
        done = 0
        for piece in slice_ranges(layout.byte_ranges[part.name], part.start * width, part.stop * width):
            content = data[done : done + piece.nbytes].tobytes()
            # The last chunk of an array may be padded.
            write_object(output.target / piece.path, content.ljust(layout.sizes[str(piece.path)], b"\0"))
            done += piece.nbytes


def _aligned_zeros(nbytes: int) -> np.ndarray:
    flat = np.zeros(nbytes + _ALIGNMENT_BYTES, np.uint8)
    skip = -flat.ctypes.data % _ALIGNMENT_BYTES
    return flat[skip : skip + nbytes]


def _shards(leaf: jax.Array) -> list[np.ndarray]:
    """Return the shards of a flat array on this process's devices, in order."""
    return [np.asarray(s.data) for s in sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)]


def _slice(shards: Sequence[np.ndarray], start: int, elements: int) -> np.ndarray:
    """Return elements [start, start + elements) of the concatenated shards, of equal size, without a copy of others."""
    size = len(shards[0])
    pieces = []
    while elements:
        number, offset = divmod(start, size)
        pieces.append(shards[number][offset : offset + elements])
        start, elements = start + len(pieces[-1]), elements - len(pieces[-1])
    if not pieces:
        return shards[0][:0]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
