"""Begin and commit a merge whose parts several processes write: provenance and publication, by process 0."""

import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pma_jax.config.errors import UserError
from pma_jax.merging.engine import provenance
from pma_jax.merging.engine.journal import Record
from pma_jax.merging.engine.merge import Output, exists_message
from pma_jax.merging.engine.plan import MergePlan
from pma_jax.storage.digests import SEGMENT_ELEMENTS
from pma_jax.storage.formats import publish
from pma_jax.storage.paths import is_bucket


class PartHashes(NamedTuple):
    """What provenance needs of a part.

    Attributes:
        read: For each source, the checksums of the part's segments.
        written: For each recipe, the checksums of its segments.
        squares: For each segment and recipe, squared changes; see `sums.squared_changes`.
    """

    read: list[list[str]]
    written: list[list[str]]
    squares: list[list[list[float]]]


def begin(plan: MergePlan, outputs: Sequence[Output], index: int) -> None:
    """Create the files of outputs on a disk, and mark those in a bucket as incomplete."""
    for output in outputs:
        if not is_bucket(output.target):
            if not output.is_published:
                plan.layout.create_files(output.checkpoint_directory)
        elif index == 0:
            publish.begin(output.target, plan.digest)


def commit(plan: MergePlan, outputs: Sequence[Output], gathered: Sequence[str], command: str) -> list[str]:
    """In process 0, write the provenance of every output and publish it; return notes.

    Args:
        plan: The merge.
        outputs: The outputs, in which all parts are written.
        gathered: Of each process, JSON: a list of [leaf, start, stop, *PartHashes].
        command: The command line that was run, to be recorded.

    Raises:
        UserError: A source is corrupt by its recorded digests, or an output exists.
    """
    records = _as_records(plan, gathered)
    notes: list[str] = []
    metadata: dict[str, Any] = {"sources": []}
    described = [provenance.build(plan, plan, records, row, command) for row in range(len(outputs))]
    for metadata in described:
        provenance.check_source_digests(plan, metadata)
    for row, output in reversed(list(enumerate(outputs))):
        metadata = described[row]
        if not output.is_published:
            _publish(plan, output, metadata)
        warning = provenance.rounding_warning(plan, metadata, row)
        notes += [warning] if warning else []
    for output in outputs:
        if is_bucket(output.target):
            publish.finish(output.target)
        else:
            shutil.rmtree(output.work_directory)
    return [*provenance.equal_source_notes(metadata), *notes[::-1]]


def _publish(plan: MergePlan, output: Output, metadata: Mapping[str, Any]) -> None:
    if is_bucket(output.target):
        texts = {**plan.layout.texts, provenance.FILE_NAME: provenance.serialize(metadata)}
        copies = {name: path.read_bytes() for name, path in plan.layout.copies.items()}
        publish.write_small_files(output.target, {**texts, **copies})
        return
    directory = plan.layout.finish(output.checkpoint_directory)
    provenance.write(directory, metadata)
    try:
        publish.publish(directory, output.target, [], plan.digest)
    except OSError as error:
        if not output.target.exists():
            raise
        raise UserError(exists_message(output.target)) from error


def _as_records(plan: MergePlan, gathered: Sequence[str]) -> dict[int, Record]:
    """Return the record of each unit of the plan from the hashes of all processes' parts."""
    of_segment: dict[tuple[str, int], tuple[list[str], list[str], list[list[float]]]] = {}
    for name, start, stop, read, written, squares in (entry for text in gathered for entry in json.loads(text)):
        first = start // SEGMENT_ELEMENTS
        for number in range(-(-(stop - start) // SEGMENT_ELEMENTS)):
            of_segment[name, first + number] = (
                [segments[number] for segments in read],
                [segments[number] for segments in written],
                [by_segment[number] for by_segment in squares],
            )
    records = {}
    for number, unit in enumerate(plan.units()):
        segments = [
            of_segment[unit.name, index]
            for index in range(unit.start // SEGMENT_ELEMENTS, -(-unit.stop // SEGMENT_ELEMENTS))
        ]
        # Lists by segment of lists by source or recipe -> the other way round.
        read, written, squares = (list(map(list, zip(*column, strict=True))) for column in zip(*segments, strict=True))
        records[number] = Record(number, read, written, [by_segment[0] for by_segment in squares])
    return records
