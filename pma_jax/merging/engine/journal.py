"""The journal of a merge: one line of JSON per finished unit of work, from which an interrupted merge resumes."""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.merging.engine.plan import MergePlan, Unit
from pma_jax.storage import locks
from pma_jax.storage.digests import SEGMENTS, SegmentHasher
from pma_jax.storage.formats.byte_ranges import open_files, read_range
from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, LeafInfo
from pma_jax.storage.json_files import parse_json
from pma_jax.storage.json_schema import Count
from pma_jax.storage.matching import match_files
from pma_jax.storage.paths import name_file, open_regular_file


class Record(NamedTuple):
    """The journal entry of a finished unit.

    Attributes:
        unit: The unit's number, in the order of `MergePlan.units`.
        read: For each source, the checksums of the unit's segments as read.
        written: For each recipe, the checksums of the unit's segments as written.
        squares: For each recipe, the result of `sums.squared_changes` on a sample of the unit.
    """

    unit: int
    read: list[list[str]]
    written: list[list[str]]
    squares: list[list[float]]


class _RecordSchema(TypedDict):
    unit: Count
    read: list[list[str]]
    written: list[list[str]]
    squares: list[list[float]]


@contextmanager
def open_appender(work: Path, process: int) -> Iterator[Callable[[Record], None]]:
    """Yield a thread-safe function that appends a record to this process's journal file in the directory `work`."""
    lock = threading.Lock()
    with (work / f"journal.{process}.jsonl").open("ab") as file:

        def append(record: Record) -> None:
            line = json.dumps(record._asdict(), separators=(",", ":")).encode() + b"\n"
            with lock, name_file(file.name):
                file.write(line)
                file.flush()

        # The last line may be incomplete after a crash; a newline separates the next record from it.
        if file.tell():
            file.write(b"\n")
        yield append


def read_records(work: Path) -> dict[int, Record]:
    """Read the records of all processes, by unit number; ignore incomplete lines, which a crash can leave."""
    records: dict[int, Record] = {}
    for path in sorted(match_files(work, "journal.*.jsonl")):
        with name_file(path), open_regular_file(path) as file:
            lines = file.read().splitlines()
        for line in lines:
            try:
                value = parse_json(line, str(path), _RecordSchema)
            except UserError:
                continue
            record = Record(*(value[field] for field in Record._fields))
            records[record.unit] = record
    return records


def find_intact_records(
    plan: MergePlan,
    records: Mapping[int, Record],
    output_ranges: Sequence[Mapping[str, Sequence[ByteRange]] | None],
) -> dict[int, Record]:
    """Return the records whose output on disk has the recorded checksums; a power failure can lose written output.

    Args:
        plan: The merge.
        records: Unit number -> record.
        output_ranges: For each recipe, where its leaves are written; None if its checkpoint has been published.
    """
    return {
        number: records[number]
        for number, unit in enumerate(plan.units())
        if number in records
        and all(
            ranges is None
            or compute_segment_digests(plan.leaves[unit.name], ranges[unit.name], unit, plan.segments(unit.name))
            == records[number].written[row]
            for row, ranges in enumerate(output_ranges)
        )
    }


def compute_segment_digests(
    leaf: LeafInfo, ranges: Sequence[ByteRange], unit: Unit, segments: Iterable[int] = SEGMENTS
) -> list[str]:
    """Read a unit of a leaf stored at `ranges`, and return the checksum of each segment.

    Args:
        leaf: Shape and dtype.
        ranges: Where the leaf is stored.
        unit: The part of the leaf to read.
        segments: Elements of each segment, as in `SegmentHasher`.
    """
    width = ITEM_BYTES[leaf.dtype]
    hasher = SegmentHasher(width, segments)
    buffer = np.empty(2**20, np.uint8)
    with open_files([part.path for part in ranges], os.O_RDONLY) as files:
        for start in range(unit.start * width, unit.stop * width, len(buffer)):
            piece = buffer[: min(len(buffer), unit.stop * width - start)]
            read_range(files, ranges, start, piece)
            hasher.update(piece)
    return hasher.finish()


@contextmanager
def lock_work_directory(work: Path, process: int) -> Iterator[None]:
    """Create the directory `work`, and hold the lock of process number `process` in it for the duration of the block.

    The kernel releases the lock if the process is killed. The last process of a merge deletes the directory and its
    locks.

    Raises:
        UserError: Another process holds the lock, or the file system has no locks.
    """

    def refuse(_: object) -> None:
        raise UserError(f"{work}: another process is writing this; wait for it") from None

    with locks.locked(work / f"lock.{process}", refuse) as (_, is_locked):
        if not is_locked:
            raise UserError(f"{work}: this file system has no locks; write to another one")
        yield
