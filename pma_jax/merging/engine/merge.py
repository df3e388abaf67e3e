"""Merge checkpoints in storage: read every byte of the inputs once, block by block, and write the merged checkpoints.

    merge_plan = plan([open_source(path) for path in paths], coefficients)
    result = merge(merge_plan, [out])

A merge never holds a complete model in memory: a block and its sums fit in the CPU's caches. The work is divided into
units, which are ranges of elements of one leaf. A merge writes to `.NAME.partial-…` in the parent directory of the
target, records finished units in a journal, and renames the result to the target at the end. If it is interrupted, call
it again with the same arguments to resume. For a bucket it writes to the local temporary directory and uploads the
finished checkpoint (see `publish`).
"""

import pickle
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pma_jax.config.errors import UserError
from pma_jax.merging.engine import journal, provenance, workers
from pma_jax.merging.engine.journal import Record
from pma_jax.merging.engine.plan import MergePlan, Unit, check_outputs
from pma_jax.merging.engine.units import (
    MergeJob,
    merge_decoded_units,
    merge_unpacked_units,
    new_job,
    sequential_merger,
)
from pma_jax.merging.engine.unsummed import check_unsummed_leaves_equal
from pma_jax.runtime.failures import is_temporary
from pma_jax.storage import atomic
from pma_jax.storage.formats import publish
from pma_jax.storage.formats.source import ITEM_BYTES
from pma_jax.storage.paths import as_path, is_bucket

ProgressCallback = Callable[[int, int], None]  # takes (bytes read so far, bytes to read)
# Takes this process's error or None. Waits for all processes; raises in each of them if any has an error.
Barrier = Callable[[Exception | None], None]
# Files of at least this size are flushed while they are written; small files are cheaper to flush together at the end.
_MIN_FLUSHED_BYTES = 2**24
_FLUSH_INTERVAL_SECONDS = 0.1


@dataclass(frozen=True)
class Output:
    """An output of a merge.

    Attributes:
        target: The path at which the merged checkpoint is published.
        work_directory: The directory of the journal and of the unpublished checkpoint.
        is_published: Whether an interrupted run of this merge has published this output already.
    """

    target: Path
    work_directory: Path
    is_published: bool

    @property
    def checkpoint_directory(self) -> Path:
        """The directory of the unpublished checkpoint."""
        return self.work_directory / "checkpoint"


class MergeResult(NamedTuple):
    """What a merge returns.

    Attributes:
        notes: Messages for the user, one line each.
        read_bytes: Number of leaf bytes that this process read in this call. A resumed merge reads only the units that
            were not finished.
    """

    notes: list[str]
    read_bytes: int


def merge(
    plan: MergePlan,
    output_paths: Sequence[str | Path],
    *,
    progress: ProgressCallback | None = None,
    command: str = "",
    process_index_and_count: tuple[int, int] = (0, 1),
    barrier: Barrier | None = None,
) -> MergeResult:
    """Run a merge plan, or resume it. Write one merged checkpoint per row of the plan's coefficients.

    Args:
        plan: The merge plan, from `engine.plan.plan`.
        output_paths: One output directory per merged checkpoint; none may exist yet.
        progress: Called with (bytes read so far, bytes to read) after each unit.
        command: The user's command line, for the provenance.
        process_index_and_count: Index of this process, and number of processes. Each process merges its part of the
            units, and all write to the same file system.
        barrier: Called by every process with its error or None. It waits for all processes, and raises in each of them
            if any failed (`hosts.raise_if_any_failed`). Required with several processes.

    Raises:
        UserError: An argument is invalid, an output exists, a value is not finite, integer leaves differ, a source is
            corrupt, or a process did not merge its part. If units were merged already, the working directories are
            removed, so that the merge cannot be resumed.
    """
    process_index, process_count = process_index_and_count
    if not 0 <= process_index < process_count or (process_count > 1 and barrier is None):
        raise UserError(
            f"the process index {process_index} must be in [0, {process_count}), and several processes need a barrier"
        )
    outputs = resolve_outputs(plan, output_paths)
    if process_count > 1 and any(is_bucket(output.target) for output in outputs):
        raise UserError(
            f"{outputs[0].target}: on the host, only one process can merge to a bucket: give --on mesh, or an output "
            "on a disk that all processes share"
        )
    for source in plan.sources:
        provenance.recorded_digests(source)  # raises if they cannot be read, before anything is written
    work = plan.with_packs()
    merged = MergeResult([], 0)
    notes: list[str] = []
    directories = [output.work_directory for output in outputs]
    with journal.lock_work_directory(directories[0], process_index), remove_on_user_error(directories, process_index):
        with _barrier_after(barrier):
            # Check again while holding the lock: another process may have finished the same merge in the meantime.
            outputs = resolve_outputs(plan, output_paths)
            for output in outputs:
                output.work_directory.mkdir(parents=True, exist_ok=True)
                if not output.is_published:
                    plan.layout.create_files(output.checkpoint_directory)
            if not all(output.is_published for output in outputs):
                merged = _merge_remaining(work, outputs, process_index, process_count, progress)
        with _barrier_after(barrier):
            if process_index == 0:
                notes = _publish_outputs(plan, work, outputs, command)
    return MergeResult([*plan.notes, *merged.notes, *notes], merged.read_bytes)


@contextmanager
def _barrier_after(barrier: Barrier | None) -> Iterator[None]:
    """Call `barrier` after the block, with the block's error or None."""
    problem = None
    try:
        yield
    except Exception as error:  # a bug of one process, too, must not leave the others waiting
        if barrier is None:
            raise
        problem = error
    if barrier is not None:
        barrier(problem)


@contextmanager
def remove_on_user_error(work_directories: Sequence[Path], process_index: int) -> Iterator[None]:
    """Remove the working directories if a merge raises a UserError, because a resumed merge would raise it again.

    An OSError and a failure that may pass keep them: the same command resumes the merge. Only process 0 removes them,
    after the barrier, no matter which process failed.
    """
    try:
        yield
    except UserError as error:
        if process_index == 0 and not is_temporary(error):
            for directory in work_directories:
                shutil.rmtree(directory, ignore_errors=True)
        raise


def resolve_outputs(plan: MergePlan, output_paths: Sequence[str | Path], is_uploaded: bool = True) -> list[Output]:
    """Check the output paths as `merge` does before it writes, and return one `Output` per path.

    Args:
        plan: The merge.
        output_paths: One output directory per row of coefficients.
        is_uploaded: Whether an output in a bucket is first written to a local disk, which needs space for it.

    Raises:
        UserError: An output exists that was not published by an interrupted run of this merge, two paths are equal,
            there is not one path per row of coefficients, or the disk has too little free space.
    """
    outputs: list[Output] = []
    for out in output_paths:
        target = as_path(out).absolute()
        work = publish.working_directory(target, f"-{plan.digest[:16]}")
        # The first output's working directory is removed last: as long as it exists, the merge was interrupted.
        first_work = outputs[0].work_directory if outputs else work
        exists = target.exists() or target.is_symlink()
        is_published = exists and not publish.has_incomplete_upload(target, plan.digest)
        if is_published and not (first_work.exists() and provenance.read_plan_digest(target) == plan.digest):
            raise UserError(exists_message(target))
        outputs.append(Output(target, work, is_published))
    is_written_to_disk = is_uploaded or not any(is_bucket(output.target) for output in outputs)
    if is_written_to_disk and not any(output.work_directory.exists() for output in outputs):
        # An upload needs local disk space for the finished checkpoint.
        written = [output.work_directory if is_bucket(output.target) else output.target for output in outputs]
        check_outputs(plan, written)
    return outputs


def exists_message(target: Path) -> str:
    """Return the message about an output that exists."""
    return f"{target}: exists already, and a merge never overwrites: choose another output (--out), or remove it"


def _merge_remaining(
    plan: MergePlan,
    outputs: Sequence[Output],
    process_index: int,
    process_count: int,
    progress: ProgressCallback | None,
) -> MergeResult:
    """Merge the unfinished units of the plan, whose packs are leaves, that this process is responsible for.

    Returns:
        The bytes read, and notes.
    """
    output_ranges = [plan.layout.byte_ranges_in(output.checkpoint_directory) for output in outputs]
    done = journal.find_intact_records(
        plan,
        journal.read_records(outputs[0].work_directory),
        [None if output.is_published else ranges for output, ranges in zip(outputs, output_ranges, strict=True)],
    )
    todo = [(i, unit) for i, unit in enumerate(plan.units()) if i % process_count == process_index and i not in done]
    published = [str(output.target) for output in outputs if output.is_published]
    if todo and published:
        raise UserError(
            f"{', '.join(published)}: written by an interrupted run of this merge whose working files have been lost "
            "since: remove it, and merge again"
        )
    total, read = sum(_unit_read_bytes(plan, unit) for _, unit in todo), 0
    lock = threading.Lock()
    with journal.open_appender(outputs[0].work_directory, process_index) as append:

        def finish_unit(unit: Unit, record: Record) -> None:
            nonlocal read
            append(record)
            with lock:
                read += _unit_read_bytes(plan, unit)
                if progress is not None:
                    progress(read, total)

        notes = check_unsummed_leaves_equal(plan)
        if todo:
            _merge_units(new_job(plan, output_ranges), todo, finish_unit, outputs[0].work_directory)
    return MergeResult(notes, read)


def _unit_read_bytes(plan: MergePlan, unit: Unit) -> int:
    dtype = plan.sources[0].leaves[unit.name].dtype
    return len(plan.sources) * (unit.stop - unit.start) * ITEM_BYTES[dtype]


def _merge_units(
    job: MergeJob, todo: list[tuple[int, Unit]], finish_unit: Callable[[Unit, Record], None], directory: Path
) -> None:
    """Merge the units in three passes.

    In the first, threads and worker processes merge the leaves that are stored as raw bytes or zstd frames, which are
    read sequentially. The second merges the leaves that TensorStore decodes region by region, the third those that are
    unpacked to files in `directory`.
    """
    schedule = job.plan.schedule
    sequential: queue.SimpleQueue[tuple[int, Unit]] = queue.SimpleQueue()
    for item in todo:
        if item[1].name not in schedule.region_elements and item[1].name not in schedule.unpacked_leaves:
            sequential.put(item)
    pickled_job = pickle.dumps(job) if schedule.processes > 1 else b""
    stop = threading.Event()

    def merge_queued_units(merge_unit: Callable[[int, Unit], Record]) -> None:
        try:
            while not stop.is_set():
                unit_index, unit = sequential.get_nowait()
                finish_unit(unit, merge_unit(unit_index, unit))
        except queue.Empty:
            return
        except BaseException:
            stop.set()
            raise

    def merge_in_thread() -> None:
        with sequential_merger(job) as merge_unit:
            merge_queued_units(merge_unit)

    def merge_in_worker_process() -> None:
        with workers.start_worker(pickled_job) as merge_unit:
            merge_queued_units(merge_unit)

    tasks = [merge_in_thread] * schedule.threads + [merge_in_worker_process] * (schedule.processes - 1)
    tasks = tasks[: sequential.qsize()]
    with ThreadPoolExecutor(len(tasks) + 1) as pool:
        futures = [pool.submit(task) for task in tasks]
        finished = threading.Event()
        flusher = pool.submit(_flush_large_files, job, finished)
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()
            finished.set()
        flusher.result()
    merge_decoded_units(job, [item for item in todo if item[1].name in schedule.region_elements], finish_unit)
    unpacked = [item for item in todo if item[1].name in schedule.unpacked_leaves]
    merge_unpacked_units(job, unpacked, finish_unit, directory)


def _flush_large_files(job: MergeJob, finished: threading.Event) -> None:
    """Flush large outputs to the disk while they are written, so that little remains to flush at the end."""
    paths = {part.path for outputs in job.output_ranges for ranges in outputs.values() for part in ranges}
    large = [path for path in paths if path.stat().st_size >= _MIN_FLUSHED_BYTES]  # a file is created at its full size
    while large and not finished.wait(_FLUSH_INTERVAL_SECONDS):
        for path in large:
            atomic.fsync_path(path)


def _publish_outputs(plan: MergePlan, work: MergePlan, outputs: Sequence[Output], command: str) -> list[str]:
    """Write the provenance of every output, publish it, and remove the working directories; return notes.

    `work` is the plan whose packs are leaves.
    """
    unpublished = [output for output in outputs if not output.is_published]
    records = journal.read_records(outputs[0].work_directory)
    unit_count = sum(1 for _ in work.units())
    if unpublished and len(records) < unit_count:
        raise UserError(
            f"{outputs[0].work_directory}: {unit_count - len(records)} of {unit_count} units are missing: a process "
            "did not finish its part, or the processes do not share the disk of the output"
        )
    if len(unpublished) > 1:  # A power failure after the first rename must not lose what the others need.
        for output in unpublished:
            atomic.fsync_tree(output.work_directory)
    notes: list[str] = []
    metadata: dict[str, Any] = {"sources": []}
    # The first output is the last to be published, and its working directory the last to be removed: it holds the
    # journal, and `resolve_outputs` recognizes an interrupted merge by it.
    for output_index, output in reversed(list(enumerate(outputs))):
        metadata = {}  # frees those of the output before: with many leaves they are large
        if output.is_published:
            metadata = provenance.read(output.target)
        else:
            metadata = provenance.build(plan, work, records, output_index, command)
            provenance.check_source_digests(plan, metadata)
            directory = plan.layout.finish(output.checkpoint_directory)
            provenance.write(directory, metadata)
            _publish_output(plan, output, directory)
        warning = provenance.rounding_warning(plan, metadata, output_index)
        notes += [warning] if warning else []
    for output in reversed(outputs):
        shutil.rmtree(output.work_directory)
    return [*provenance.equal_source_notes(metadata), *notes[::-1]]


def _publish_output(plan: MergePlan, output: Output, directory: Path) -> None:
    try:
        arrays = list(plan.layout.sizes) if plan.layout.assemble is None else []
        publish.publish(directory, output.target, arrays, plan.digest)
    except OSError as error:
        if is_bucket(output.target) or not output.target.exists():
            raise
        raise UserError(exists_message(output.target)) from error
