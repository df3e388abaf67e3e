"""Merging from storage to storage: every byte is read once, summed in cache, and written at its place.

    merged = merge(plan([open_source(path) for path in paths], coefficients), [out])

A merge never holds a model. It works beside its target in `.NAME.partial-…`, notes what it has done, and publishes by
one rename; killed at any moment, the same call goes on where it stopped. For a bucket it works in the machine's
directory for temporary files, and uploads what is finished (see publishing.py).
"""

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pma_jax.merging.engine import journal, provenance, sums, workers
from pma_jax.merging.engine.journal import Record
from pma_jax.merging.engine.plan import BLOCK_ELEMENTS, MergePlan, Unit, check_disk_space
from pma_jax.merging.engine.units import MergeJob, merge_decoded, merge_plain
from pma_jax.storage import atomic
from pma_jax.storage.formats import publish
from pma_jax.storage.formats.open import read_leaf_bytes
from pma_jax.storage.formats.source import ITEM_BYTES
from pma_jax.storage.paths import is_bucket, locate

Progress = Callable[[int, int], None]
Barrier = Callable[[Exception | None], None]
# Outputs of this size are flushed while they grow; many small files are cheaper to commit together.
_FLUSHED_BYTES = 2**24
_FLUSH_SECONDS = 0.1


@dataclass(frozen=True)
class MergeResult:
    """A finished merge.

    Attributes:
        outs: the directories that were published, one a recipe.
        notes: what the user should know, one line each.
        read_bytes: bytes of leaves read by this process in this run; less than the plan's after a resume.
        seconds: wall time.
    """

    outs: tuple[Path, ...]
    notes: tuple[str, ...]
    read_bytes: int
    seconds: float


def merge(
    plan: MergePlan,
    outs: Sequence[str | Path],
    *,
    progress: Progress | None = None,
    command: str = "",
    share: tuple[int, int] = (0, 1),
    barrier: Barrier | None = None,
) -> MergeResult:
    """Runs a plan, or goes on with it; publishes one directory a recipe.

    Args:
        plan: from `plan`.
        outs: R directories that do not exist yet.
        progress: called with (bytes read so far, bytes to read) from the plan, a few times a second at most.
        command: what the user typed, for the provenance.
        share: (this process, number of processes); each does its part of the units, into the same file system.
        barrier: Called by every process with its error or None; waits for all of them and raises in each if any failed
            (`hosts.raise_if_any_failed`). Required with several processes.

    Raises:
        ValueError: an output exists, a value is not finite, integer leaves differ, or a source is damaged; one line.
            Nothing is published, and the work of a refused merge is removed.
    """
    started = time.perf_counter()
    process, processes = share
    if not 0 <= process < processes or (processes > 1 and barrier is None):
        raise ValueError(f"the share {share} is not (process, processes), or several processes cannot barrier")
    targets, works = _places(plan, outs)
    if processes > 1 and any(map(is_bucket, targets)):
        raise ValueError(
            f"{targets[0]}: several processes merge onto a disk that all see; to a bucket, use one process"
        )
    _published(plan, targets, works)
    notes = list(plan.notes)
    published: list[bool] = []
    read_bytes_here = 0

    def merge_own() -> None:
        nonlocal read_bytes_here
        # Again: the same merge may have ended in another process since.
        published.extend(_published(plan, targets, works))
        for work, is_published in zip(works, published, strict=True):
            work.mkdir(parents=True, exist_ok=True)
            if not is_published:
                plan.layout.create_files(work / "checkpoint")
        read_bytes_here = _merge_units(plan, works, published, share, progress)

    def publish_all() -> None:
        if process == 0:
            notes.extend(_publish(plan, targets, works, published, command))

    with journal.lock_work_directory(works[0], process), _cleared_if_refused(works, process):
        _run_then_barrier(merge_own, barrier)
        _run_then_barrier(publish_all, barrier)
    return MergeResult(tuple(targets), tuple(notes), read_bytes_here, time.perf_counter() - started)


def _run_then_barrier(work: Callable[[], None], barrier: Barrier | None) -> None:
    if barrier is None:
        work()
        return
    problem = None
    try:
        work()
    except (ValueError, OSError) as error:
        problem = error
    barrier(problem)


@contextmanager
def _cleared_if_refused(works: list[Path], process: int) -> Iterator[None]:
    """Remove the work of a merge that is refused: it will be refused again, and there is nothing to resume.

    Of several processes the first does, once all have met: whoever refused it.
    """
    try:
        yield
    except ValueError:
        if process == 0:
            for work in works:
                shutil.rmtree(work, ignore_errors=True)
        raise


def check_outputs(plan: MergePlan, outs: Sequence[str | Path]) -> None:
    """Checks what `merge` checks of its outputs before it writes.

    Raises:
        ValueError: an output exists already, two are the same, or the disk has too little room; one line.
    """
    _published(plan, *_places(plan, outs))


def _places(plan: MergePlan, outs: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    """The directories to publish, and those to work in beside them."""
    targets = [locate(out).absolute() for out in outs]
    return targets, [publish.working_directory(target, f"-{plan.digest[:16]}") for target in targets]


def _published(plan: MergePlan, targets: list[Path], works: list[Path]) -> list[bool]:
    """Which targets an interrupted run of this merge has already published; any other existing target is refused."""
    published = []
    for target, work in zip(targets, works, strict=True):
        if (not target.exists() and not target.is_symlink()) or publish.is_upload_interrupted(target, plan.digest):
            published.append(False)
        elif work.exists() and provenance.read_plan_digest(target) == plan.digest:
            published.append(True)
        else:
            raise ValueError(_exists(target))
    if not any(work.exists() for work in works):
        # What goes to a bucket needs its room where it is made.
        check_disk_space(plan, [work if is_bucket(out) else out for out, work in zip(targets, works, strict=True)])
    return published


def _exists(target: Path) -> str:
    return f"{target}: exists already, and a merge never overwrites: choose another --out, or remove it"


def _merge_units(
    plan: MergePlan, works: list[Path], published: list[bool], share: tuple[int, int], progress: Progress | None
) -> int:
    """Does this process's part of the units that are not done; returns the bytes read."""
    places = [plan.layout.byte_ranges_in(work / "checkpoint") for work in works]
    process, processes = share
    done = journal.find_intact_records(
        plan,
        journal.read_records(works[0]),
        [None if is_out else place for is_out, place in zip(published, places, strict=True)],
    )
    todo = [(n, unit) for n, unit in enumerate(plan.units()) if n % processes == process and n not in done]
    assert not (todo and any(published)), "a target was published before every unit was done"
    sizes = {n: _unit_bytes(plan, unit) for n, unit in todo}
    total, read = sum(sizes.values()), 0
    lock = threading.Lock()
    with journal.open_appender(journal.journal_path(works[0], process)) as append:

        def note(number: int, record: Record) -> None:
            nonlocal read
            append(record)
            with lock:
                read += sizes[number]
                if progress is not None:
                    progress(read, total)

        _check_equal_leaves(plan)
        _merge_all_units(MergeJob(plan, sums.kernel_weights(plan.coefficients), places), todo, note)
    return read


def _unit_bytes(plan: MergePlan, unit: Unit) -> int:
    dtype = plan.sources[0].leaves[unit.name].dtype
    return len(plan.sources) * (unit.stop - unit.start) * ITEM_BYTES[dtype]


def _check_equal_leaves(plan: MergePlan) -> None:
    """Integer and boolean leaves cannot be averaged; they are small, and compared before anything is written."""
    unequal = []
    for name, leaf in plan.sources[0].leaves.items():
        if leaf.is_summed:
            continue
        # A compressed leaf is decoded a region at a time, and no part of it twice.
        step = plan.decoded.get(name, leaf.elements if name in plan.streamed else BLOCK_ELEMENTS)
        for start in range(0, leaf.elements, step):
            stop = min(start + step, leaf.elements)
            blocks = [read_leaf_bytes(source, name, start, stop).tobytes() for source in plan.sources]
            differs = next((k for k, block in enumerate(blocks) if block != blocks[0]), None)
            if differs is not None:
                unequal.append(f"{name} ({leaf.dtype}) in {plan.sources[differs].origin}")
                break
    if unequal:
        raise ValueError(
            f"{len(unequal)} integer or boolean leaves are not equal in all checkpoints and cannot be averaged: "
            f"{'; '.join(unequal[:10])}"
        )


def _merge_all_units(job: MergeJob, todo: list[tuple[int, Unit]], note: Callable[[int, Record], None]) -> None:
    """Merges the units: plain runs of bytes by threads or processes, decoded leaves one after the other."""
    plain: queue.SimpleQueue[tuple[int, Unit]] = queue.SimpleQueue()
    for item in todo:
        if item[1].name not in job.plan.decoded:
            plain.put(item)

    stop = threading.Event()

    def drain(work: Callable[[int, Unit], Record]) -> None:
        try:
            while not stop.is_set():
                number, unit = plain.get_nowait()
                note(number, work(number, unit))
        except queue.Empty:
            return
        except BaseException:
            stop.set()
            raise

    def drain_here() -> None:
        scratch = sums.new_scratch(len(job.plan.recipes), len(job.plan.sources), job.plan.block_elements)
        drain(lambda number, unit: merge_plain(job, number, unit, scratch))

    def drain_there() -> None:
        with workers.start_worker(job) as work:
            drain(work)

    drains = ([drain_here] * job.plan.threads + [drain_there] * (job.plan.processes - 1))[: plain.qsize()]
    with ThreadPoolExecutor(len(drains) + 1) as pool:
        futures = [pool.submit(work) for work in drains]
        over = threading.Event()
        flusher = pool.submit(_flush, job, over)
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()
            over.set()
        flusher.result()
    merge_decoded(job, [item for item in todo if item[1].name in job.plan.decoded], note)


def _flush(job: MergeJob, over: threading.Event) -> None:
    """Sends large outputs to the disk while they are being written, so that little is left to wait for at the end."""
    bytes_of: dict[Path, int] = {}
    for place in job.places:
        for byte_ranges in place.values():
            for byte_range in byte_ranges:
                bytes_of[byte_range.path] = bytes_of.get(byte_range.path, 0) + byte_range.nbytes
    large = [path for path, nbytes in bytes_of.items() if nbytes >= _FLUSHED_BYTES]
    while large and not over.wait(_FLUSH_SECONDS):
        for path in large:
            atomic.sync_entry(path)


def _publish(plan: MergePlan, targets: list[Path], works: list[Path], published: list[bool], command: str) -> list[str]:
    """Writes the provenance, waits for the disk, and renames; returns the notes that the whole merge gave."""
    records = journal.read_records(works[0])
    units = sum(1 for _ in plan.units())
    if len(records) < units:
        raise ValueError(
            f"{works[0]}: {units - len(records)} of {units} units are missing; a process did not finish its share, or "
            "writes to another disk: --out must be where all processes see it"
        )
    notes = []
    # The first target goes last: its neighbour holds the journal that a crash between two renames needs.
    for row in reversed(range(len(targets))):
        facts = provenance.build(plan, records, row, command)
        provenance.check_inputs_unchanged(plan, facts)
        note = provenance.rounding_warning(plan, facts, row)
        notes += [note] if note else []
        if published[row]:
            continue
        directory = works[row] / "checkpoint"
        provenance.write(directory, facts)
        try:
            publish.publish(directory, targets[row], list(plan.layout.sizes), plan.digest)
        except OSError as error:
            if is_bucket(targets[row]) or not targets[row].exists():
                raise
            raise ValueError(_exists(targets[row])) from error
    for work in works:
        shutil.rmtree(work)
    return notes[::-1]
