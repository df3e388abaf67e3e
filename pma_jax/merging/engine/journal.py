"""What a merge has finished, so that it can go on after a crash; one line of JSON a unit, appended as it is written."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pma_jax.merging.engine.plan import MergePlan, Unit
from pma_jax.storage import locks
from pma_jax.storage.digests import SegmentHasher
from pma_jax.storage.formats.byte_ranges import open_files, read_range
from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, LeafInfo


@dataclass(frozen=True)
class Record:
    """A finished unit.

    Attributes:
        unit: its number in the plan's order.
        read: for each source, the checksum of each segment that was read.
        written: for each recipe, the checksum of each segment that was written.
        squares: for each recipe, what `kernels.squares` measured on a sample.
    """

    unit: int
    read: list[list[str]]
    written: list[list[str]]
    squares: list[list[float]]


def journal_path(work: Path, process: int) -> Path:
    """The file in which one process of the merge in `work` notes what it has done."""
    return work / f"journal.{process}.jsonl"


@contextmanager
def open_appender(path: Path) -> Iterator[Callable[[Record], None]]:
    """A function that notes a finished unit; safe to call from several threads."""
    lock = threading.Lock()
    with path.open("ab") as file:

        def note(record: Record) -> None:
            line = json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n"
            with lock:
                file.write(line)
                file.flush()

        # A line that a crash tore must not swallow the next one.
        if file.tell():
            file.write(b"\n")
        yield note


def read_records(work: Path) -> dict[int, Record]:
    """What all processes noted; a torn last line (the crash itself) is as if it were not there."""
    records: dict[int, Record] = {}
    for path in sorted(work.glob("journal.*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                record = Record(**json.loads(line)) if line else None
            except (ValueError, TypeError):
                continue
            if record is not None:
                records[record.unit] = record
    return records


def find_intact_records(
    plan: MergePlan, records: Mapping[int, Record], places: Sequence[Mapping[str, Sequence[ByteRange]] | None]
) -> dict[int, Record]:
    """The records whose output is on the disk as they say; a power cut may have lost what was noted.

    `places` has, for each recipe, where its leaves are, or None where it has been published.
    """
    return {
        number: records[number]
        for number, unit in enumerate(plan.units())
        if number in records
        and all(
            place is None
            or segment_digests(plan.leaves[unit.name], place[unit.name], unit, plan.checksum)
            == records[number].written[r]
            for r, place in enumerate(places)
        )
    }


def segment_digests(leaf: LeafInfo, byte_ranges: Sequence[ByteRange], unit: Unit, checksum: str) -> list[str]:
    """The checksum of each segment of a unit as it lies on the disk."""
    hasher, width = SegmentHasher(ITEM_BYTES[leaf.dtype], checksum), ITEM_BYTES[leaf.dtype]
    buffer = np.empty(2**20, np.uint8)
    with open_files([byte_range.path for byte_range in byte_ranges], os.O_RDONLY) as descriptors:
        for start in range(unit.start * width, unit.stop * width, len(buffer)):
            piece = buffer[: min(len(buffer), unit.stop * width - start)]
            read_range(descriptors, byte_ranges, start, piece)
            hasher.update(piece)
    return hasher.hexdigests()


@contextmanager
def lock_work_directory(work: Path, process: int) -> Iterator[None]:
    """Keeps a second process from doing the same work at the same time; the lock ends with the process.

    The directory is made. Whoever ends removes it with the lock in it.

    Raises:
        ValueError: another process holds it, or the file system has no locks.
    """
    with locks.locked(work / f"lock.{process}", lambda _: f"{work}: another process is writing this; wait for it") as (
        _,
        is_locked,
    ):
        if not is_locked:
            raise ValueError(f"{work}: this file system has no locks; write to another one")
        yield
