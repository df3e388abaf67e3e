"""The plan of a merge: its inputs, outputs and units of work, validated before anything is written."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.merging.engine.packing import Pack, Packed, pack
from pma_jax.merging.engine.refusals import check_leaves_are_parameters
from pma_jax.merging.engine.rounding import validate_weights
from pma_jax.merging.engine.schedule import Schedule, make_schedule
from pma_jax.storage.digests import CHECKSUM, SEGMENT_ELEMENTS, SEGMENTS
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.orbax_write import shared_custom_metadata
from pma_jax.storage.formats.outputs import plan_output
from pma_jax.storage.formats.source import CheckpointSource, LeafInfo, leaf_differences
from pma_jax.storage.matching import files_below
from pma_jax.storage.paths import is_utf8

DTYPES = ("keep", "float32", "bfloat16", "float16")
INTEGERS = ("equal", "newest")


class Unit(NamedTuple):
    """A unit of work: elements [start, stop) of the leaf `name`, merged by one thread or process."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class MergePlan:
    """A validated merge of K sources by R recipes into R checkpoints.

    Attributes:
        sources: The inputs, oldest first.
        coefficients: float64 [R, K].
        recipes: The R recipes as text, for the provenance and messages.
        dtype: One of `DTYPES`.
        integers: One of `INTEGERS`: integer and boolean leaves must be equal, or are those of the newest source.
        leaves: Name -> shape and output dtype of each merged leaf.
        layout: The files of a merged checkpoint, the same for each recipe.
        format: "safetensors" or "orbax".
        schedule: Blocks, threads and processes.
        digest: Hash of the merge's inputs and output; a merge resumes only an interrupted one with the same digest.
        notes: Messages for the user, one line each.
        packed: The same with small leaves in packs.
        packs: The packs among `sources` and `leaves`: none, but in the result of `with_packs`.
    """

    sources: tuple[CheckpointSource, ...]
    coefficients: np.ndarray
    recipes: tuple[str, ...]
    dtype: str
    integers: str
    leaves: Mapping[str, LeafInfo]
    layout: OutputLayout
    format: str
    schedule: Schedule
    digest: str
    notes: tuple[str, ...]
    packed: Packed
    packs: Mapping[str, Pack] = field(default_factory=dict)

    @property
    def read_bytes(self) -> int:
        """Bytes of leaves to read, over all sources."""
        return sum(source.nbytes for source in self.sources)

    @property
    def write_bytes(self) -> int:
        """Bytes of leaves to write, over all recipes."""
        return len(self.recipes) * self.layout.nbytes

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk until the outputs are published: twice the output if its files are assembled."""
        return self.write_bytes * (1 if self.layout.assemble is None else 2)

    def with_packs(self) -> "MergePlan":
        """Return the plan whose packs are leaves. Its units are those of a merge on the host."""
        packed, layout = self.packed, replace(self.layout, byte_ranges=self.packed.byte_ranges)
        return replace(self, sources=packed.sources, leaves=packed.leaves, layout=layout, packs=packed.packs)

    def segments(self, name: str) -> Iterable[int]:
        """Return the elements of each part of a leaf that has a checksum of its own; of a pack, those of its leaves."""
        return self.packs[name].elements if name in self.packs else SEGMENTS

    def locate(self, name: str, element: int) -> tuple[str, int]:
        """Return the name of the leaf, and the number in it, of an element of a leaf or a pack."""
        return self.packs[name].locate(element) if name in self.packs else (name, element)

    def units(self) -> Iterator[Unit]:
        """Yield all units in storage order: the segments of raw leaves, and complete leaves if they must be decoded."""
        for name, leaf in self.leaves.items():
            schedule = self.schedule
            must_decode = any(
                name in names for names in (schedule.region_elements, schedule.zstd_leaves, schedule.unpacked_leaves)
            )
            step = leaf.elements if must_decode else SEGMENT_ELEMENTS
            for start in range(0, leaf.elements, max(1, step)):
                yield Unit(name, start, min(start + step, leaf.elements))


def plan(
    sources: Sequence[CheckpointSource],
    coefficients: np.ndarray,
    *,
    recipes: Sequence[str] | None = None,
    dtype: str = "keep",
    integers: str = "equal",
    format: str = "keep",
    memory_limit_bytes: int = 2**30,
    shard_bytes: int = 5 * 10**9,
    metadata: Mapping[str, Any] | None = None,
    cores: int | None = None,
    is_alone: bool = False,
    writers: int = 1,
) -> MergePlan:
    """Validate that the sources can be merged, and plan the merge without writing anything.

    Args:
        sources: Checkpoints from `open_source`, oldest first.
        coefficients: float64 [K] or [R, K]; row r gives merged checkpoint r.
        recipes: The R recipes as text, for the provenance; "weights" if None.
        dtype: Storage dtype of the merged floating-point leaves, one of `DTYPES`.
        integers: "equal" if integer and boolean leaves must be equal in all sources (checked when they are read),
            "newest" to take those of the newest source.
        format: "keep" (the first source's), "safetensors" or "orbax".
        memory_limit_bytes: Maximum resident memory of the merge.
        shard_bytes: Maximum bytes of leaves per safetensors file.
        metadata: Custom metadata of a merged Orbax checkpoint; if None, tokens and step of the newest source, and what
            is the same in all.
        cores: Number of cores to use; if None, all that this process may use.
        is_alone: Whether this process does nothing but merge, so that the memory that it has taken counts.
        writers: Number of processes that write complete files of an Orbax checkpoint (`merging.on_mesh`).

    Raises:
        UserError: There are no sources or their leaves differ, `coefficients` are not one finite number per recipe and
            source or all zero, the number of `recipes` is wrong, an option is unknown, a source is quantised or an
            adapter, the format cannot store the leaves, or the memory limit is too low.
    """
    if not sources:
        raise UserError("nothing to merge: give at least one checkpoint")
    rows = validate_weights(np.atleast_2d(coefficients), len(sources))
    names = tuple(recipes) if recipes is not None else ("weights",) * len(rows)
    _check_recipes(rows, names)
    _check_choices(dtype, integers)
    _check_leaves(sources)
    output_format = sources[0].format if format == "keep" else format
    leaves = {name: _merged_leaf(leaf, dtype) for name, leaf in sources[0].leaves.items()}
    if metadata is None:
        metadata = shared_custom_metadata(sources) | _known_progress(sources[-1])
    layout = plan_output(sources, leaves, output_format, shard_bytes, dtype, metadata, writers)
    _check_file_names(layout.copies)
    packed = pack(sources, leaves, layout.byte_ranges)
    schedule = make_schedule(packed.sources, len(leaves), len(rows), memory_limit_bytes, cores, is_alone)
    notes = (*_collect_notes(sources), *layout.notes)
    merge_plan = MergePlan(
        tuple(sources), rows, names, dtype, integers, leaves, layout, output_format, schedule, "", notes, packed
    )
    return replace(merge_plan, digest=_compute_digest(merge_plan))


def _collect_notes(sources: Sequence[CheckpointSource]) -> list[str]:
    notes = [note for source in sources for note in source.notes]
    if len({source.format for source in sources}) > 1:
        notes.append("sources are of several formats; leaves are matched by name")
    return list(dict.fromkeys(notes))


def _check_recipes(rows: np.ndarray, names: Sequence[str]) -> None:
    if len(names) != len(rows):
        raise UserError(f"{len(rows)} rows of coefficients need as many recipe names, not {len(names)}")
    for name, row in zip(names, rows, strict=True):
        if not row.any():
            raise UserError(f"every coefficient of {name} is zero")


def _check_choices(dtype: str, integers: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"the dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if integers not in INTEGERS:
        raise UserError(f"integers={integers!r} is not one of {', '.join(INTEGERS)}")


def _check_leaves(sources: Sequence[CheckpointSource]) -> None:
    first = sources[0]
    if not first.leaves:
        raise UserError(f"{first.origin}: holds no arrays")
    for source in sources:
        check_leaves_are_parameters(source)
    differences = [
        f"{line} in {other.origin}" for other in sources[1:] for line in leaf_differences(first.leaves, other.leaves)
    ]
    if differences:
        raise UserError(
            f"the checkpoints differ from {first.origin} in {len(differences)} places: {'; '.join(differences[:10])}"
        )


def _known_progress(source: CheckpointSource) -> dict[str, int]:
    """Return the tokens and the step of a checkpoint, as far as they are known."""
    progress = {"tokens": source.tokens, "step": source.step}
    return {key: value for key, value in progress.items() if value is not None}


def _check_file_names(names: Iterable[str]) -> None:
    """Raise UserError if a file's name, which is any bytes, is not UTF-8, as the provenance is that lists it."""
    if name := next((name for name in names if not is_utf8(name)), None):
        raise UserError(f"the file {name[:80]!r} is not named in UTF-8, as provenance.json is: rename it")


def _merged_leaf(leaf: LeafInfo, dtype: str) -> LeafInfo:
    is_converted = dtype != "keep" and leaf.is_summed and not leaf.is_python_number
    return LeafInfo(leaf.shape, dtype if is_converted else leaf.dtype)


def _compute_digest(merge_plan: MergePlan) -> str:
    """Return a hash of the sources (paths, sizes, modification times), coefficients and output of a merge."""
    schedule, stamps = merge_plan.schedule, []
    is_decoded = bool(schedule.region_elements or schedule.zstd_leaves or schedule.unpacked_leaves)
    for source in merge_plan.sources:
        paths = sorted({part.path for ranges in source.byte_ranges.values() for part in ranges})
        if not paths or is_decoded:
            paths += files_below(source.path) if source.path.is_dir() else []
        stamps.append([[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths])
    identity = [
        stamps,
        merge_plan.coefficients.tolist(),
        merge_plan.recipes,
        merge_plan.dtype,
        merge_plan.integers,
        CHECKSUM,
        merge_plan.format,
        sorted(merge_plan.layout.sizes.items()),
        sorted((name, text.hex()) for name, text in merge_plan.layout.texts.items()),
        *([unit.name, unit.start, unit.stop] for unit in merge_plan.with_packs().units()),
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def check_outputs(merge_plan: MergePlan, outs: Sequence[Path]) -> None:
    """Check that there is one distinct output directory per recipe, and enough free disk space.

    Raises:
        UserError: The number of directories is wrong, two are the same, or too little space is free.
    """
    if len(outs) != len(merge_plan.recipes):
        raise UserError(f"{len(merge_plan.recipes)} recipes need as many output directories, not {len(outs)}")
    if len({out.absolute() for out in outs}) != len(outs):
        raise UserError("two recipes have the same output directory")
    parent = outs[0].absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < merge_plan.disk_bytes:
        raise UserError(f"{parent}: {free} bytes are free and the merge needs {merge_plan.disk_bytes}; free some space")
