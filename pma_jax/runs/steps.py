"""A folder of numbered steps that are published and removed atomically, and written in the background.

    FOLDER/<step>/commit_success.txt     commit marker
    FOLDER/<step>/_CHECKPOINT_METADATA   metadata of the step, with its own digest
    FOLDER/<step>/<item>/                arrays

On a disk, Orbax writes a step to a temporary folder, adds the commit marker, and renames the folder. In a bucket, it
writes to the final folder and adds the marker last. `remove` deletes the marker first. A folder without the marker is
therefore incomplete: it was left by a process that was killed while it saved or removed the step. Such folders are
ignored by readers and removed when a run starts. A step with the marker is published.

Orbax does not flush all that it writes to the disk. A power failure could therefore leave a step with its marker but
without some of its contents, which fails its digests. `StepWriter` flushes a step before it counts it as published:
only then are older steps removed, and states saved that rely on it.

Orbax's own deletion (its preservation policies) removes files in any order. If interrupted, it could leave an
incomplete step that still has its marker.
"""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from etils import epath
from orbax.checkpoint import v1 as ocp

from pma_jax.config.errors import DamageError, StorageError, UserError, error_line
from pma_jax.runtime import hosts
from pma_jax.runtime.failures import is_storage_failure
from pma_jax.storage import atomic
from pma_jax.storage.digests import add_metadata_digest, check_metadata_digest
from pma_jax.storage.json_files import read_json
from pma_jax.storage.json_schema import Count, Loss, check_schema
from pma_jax.storage.paths import as_path, exists, is_bucket

MINIMUM_SLICE_BYTES = 2**20  # of an array that replicas write together, per replica
COMMIT_MARKER = "commit_success.txt"
METADATA_FILE = "_CHECKPOINT_METADATA"


class _Metadata(TypedDict):
    """Metadata of a snapshot or of a state; `read_metadata` requires the fields that its caller names."""

    step: NotRequired[Count]
    tokens: NotRequired[Count]
    position: NotRequired[Count]
    averaged_at_tokens: NotRequired[Count]
    loss: NotRequired[Loss | None]
    kind: NotRequired[Literal["point", "block_mean"]]
    config: NotRequired[dict[str, dict[str, Any]]]
    checksum: NotRequired[str]
    leaves: NotRequired[dict[str, str]]


class _MetadataFile(TypedDict):
    """Contents of `METADATA_FILE`; Orbax reads the other fields when it restores arrays."""

    custom_metadata: _Metadata
    item_handlers: NotRequired[dict[str, str | None] | str | None]
    metrics: NotRequired[dict[str, Any] | None]
    performance_metrics: NotRequired[dict[str, Any] | None]
    init_timestamp_nsecs: NotRequired[int | None]
    commit_timestamp_nsecs: NotRequired[int | None]


def numbered(folder: epath.Path) -> list[epath.Path]:
    """List the entries of `folder` whose names are numbers, in ascending order; empty if the folder does not exist."""
    paths = [path for path in folder.iterdir() if path.name.isdigit()] if exists(folder) else []
    return sorted(paths, key=lambda path: int(path.name))


def published_steps(folder: epath.Path) -> list[epath.Path]:
    """List the published steps in `folder`, in ascending order."""
    return [path for path in numbered(folder) if exists(path / COMMIT_MARKER)]


def unpublished_steps(folder: epath.Path) -> list[epath.Path]:
    """List the step folders without a commit marker, which are incomplete and can be removed."""
    return [path for path in numbered(folder) if not exists(path / COMMIT_MARKER)]


def read_metadata(path: epath.Path, keys: Sequence[str]) -> dict[str, Any]:
    """Read the metadata of a step, or of a snapshot outside a run, and verify their digest.

    Raises:
        DamageError: The metadata file is missing or corrupt, or lacks one of `keys`.
    """
    file = path / METADATA_FILE
    try:
        metadata = read_json(as_path(file), _MetadataFile, allow_nan=True)["custom_metadata"]
    except FileNotFoundError as error:
        raise DamageError(f"{path} is corrupt or incomplete: {METADATA_FILE} is missing") from error
    except UserError as error:
        raise DamageError(f"{path} is corrupt: {error}") from error
    missing = [key for key in keys if key not in metadata]
    if missing:
        raise DamageError(f"{file} lacks {', '.join(missing)}: it is corrupt, or not from this version of pma_jax")
    check_metadata_digest(metadata, file)
    return metadata


def check_metadata(metadata: Any, path: epath.Path) -> dict[str, Any]:
    """Check the metadata of a step that Orbax has read beside its arrays, as `read_metadata` checks those it reads.

    Raises:
        DamageError: The metadata are missing or corrupt.
    """
    file = path / METADATA_FILE
    if metadata is None:  # Orbax continues without a file that it cannot read or parse
        raise DamageError(f"{path} is corrupt or incomplete: {METADATA_FILE} is missing or cannot be parsed")
    try:
        check_schema(metadata, _Metadata, str(file))
    except UserError as error:
        raise DamageError(f"{path} is corrupt: {error}") from error
    check_metadata_digest(metadata, file)
    return metadata


def remove(path: epath.Path) -> None:
    """Remove a step, its marker first and durably, so that a partially removed step never counts as a step."""
    (path / COMMIT_MARKER).unlink(missing_ok=True)
    if not is_bucket(path):
        atomic.fsync_path(path)
    path.rmtree()


def uncompressed_context(barrier_prefix: str | None = None) -> ocp.Context:
    """Create an Orbax context that writes arrays uncompressed.

    Weights hardly compress, and reading zstd arrays is about 10 times slower than reading uncompressed ones. Only large
    arrays are divided between replicas: slicing a small one takes longer than writing it.

    Args:
        barrier_prefix: Prefix of the keys of Orbax's multiprocess barriers. Folders that are written concurrently need
            different prefixes.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.min_slice_bytes_for_replica_parallel = MINIMUM_SLICE_BYTES
    context.multiprocessing.barrier_sync_key_prefix = barrier_prefix
    return context


@contextlib.contextmanager
def report_write_errors(path: epath.PathLike) -> Iterator[None]:
    """Convert failures of storage in the block, which are long in Orbax and TensorStore, to a UserError of one line.

    Any other exception is raised as it is: it is a UserError already, or a bug.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_storage_failure(error):
            raise
        reason = error_line(error)
        if "No space left on device" in reason or "ENOSPC" in reason or "Disk quota exceeded" in reason:
            reason = "no space is left on the device: free some space"
        elif "Read-only file system" in reason or "Permission denied" in reason:
            reason = "the file system is read-only or permission is denied: make the path writable"
        else:
            reason = f"{type(error).__name__}: {reason[:300]}"
        raise UserError(f"cannot write {path}: {reason} (checkpoints that exist are not affected)") from error


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A step that is being written in the background."""

    step: int
    tokens: int
    thread: threading.Thread  # ends when the step is published, and on a disk durable, or could not be written
    errors: list[Exception]  # the thread adds the error if the step could not be written


class StepWriter:
    """A context manager that writes steps into a folder, one at a time, in the background.

    With several processes, all must call the same methods in the same order. Process 0 removes steps.

    Args:
        folder: The folder of the steps.
        read_tokens: Returns the tokens of a published step, given its path; by default they are read.

    Attributes:
        published: Maps each published step to its tokens.
        pending: The step that is being written, or None.
    """

    def __init__(self, folder: epath.Path, read_tokens: Callable[[epath.Path], int] | None = None):
        self._folder = folder
        self.published = _read_published(folder, read_tokens or _read_tokens)
        self.pending: PendingStep | None = None
        self._is_listing_stale = False  # whether steps were removed that Orbax has listed
        with uncompressed_context(folder.name), report_write_errors(folder):
            self._checkpointer = ocp.training.Checkpointer(folder, cleanup_tmp_directories=True)
            if hosts.is_first_process() and not is_bucket(folder):
                atomic.fsync_path(folder.parent)

    def save(self, step: int, items: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Wait for the previous save, then start to save a step in the background.

        Do nothing if the step is published with the same metadata, which contain digests of the arrays: a resumed run
        reaches the steps that were published after its state again. If they differ (the run was resumed on other
        devices), the step is replaced, because its newer steps continue from the new arrays.

        When this method returns, the arrays have been copied and may be donated.

        Raises:
            UserError: This or the previous step could not be written.
        """
        self.finish()
        path = self._folder / str(step)
        if step in self.published:
            if self._has_metadata(path, metadata):
                return
            self.remove([step])
        with uncompressed_context(self._folder.name), report_write_errors(path):
            if self._is_listing_stale:
                hosts.barrier(f"steps.removed.{self._folder.name}")
                self._checkpointer.reload()
                self._is_listing_stale = False
            # Without `force`, Orbax silently skips steps below the newest, such as a corrupt one that is written again.
            response = self._checkpointer.save_checkpointables_async(
                step, dict(items), custom_metadata=add_metadata_digest(metadata), force=True
            )
        errors: list[Exception] = []
        thread = threading.Thread(target=_publish, args=(response, path, errors), name="publish", daemon=True)
        self.pending = PendingStep(step, metadata["tokens"], thread, errors)
        thread.start()

    def finish(self) -> None:
        """Wait until the step that is being saved is published and, on a disk, durable.

        Raises:
            UserError: The step could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        pending.thread.join()
        with report_write_errors(self._folder / str(pending.step)):
            for error in pending.errors:
                raise error
        self.published[pending.step] = pending.tokens  # only now: no other step is removed for one that failed

    def finish_if_published(self) -> None:
        """Do as `finish` does if that need not wait. Process 0 decides for all processes."""
        pending = self.pending
        if pending and hosts.broadcast_from_first(lambda: "" if pending.thread.is_alive() else "published"):
            self.finish()

    def remove(self, published: Sequence[int]) -> None:
        """Remove these published steps."""
        for step in published:
            del self.published[step]
            self._is_listing_stale = True
            if hosts.is_first_process():
                remove(self._folder / str(step))

    def __enter__(self) -> "StepWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        has_failed = True
        try:
            self.finish()
            has_failed = exception[0] is not None
        finally:
            # After a failed save, close() raises the same error again, in its long form.
            with contextlib.suppress(Exception) if has_failed else contextlib.nullcontext():
                self._checkpointer.close()

    def _has_metadata(self, path: epath.Path, metadata: Mapping[str, Any]) -> bool:
        """Return whether a published step has this metadata, apart from the configuration, which versions extend."""

        def is_equal() -> str:
            stored = read_metadata(path, ())
            wanted = json.loads(json.dumps({key: value for key, value in metadata.items() if key != "config"}))
            return "equal" if all(stored.get(key) == value for key, value in wanted.items()) else ""

        return bool(hosts.broadcast_from_first(is_equal))


def _read_published(folder: epath.Path, read_tokens: Callable[[epath.Path], int]) -> dict[int, int]:
    """Map each published step to its tokens, as process 0 reads them: all processes must save and skip the same."""

    def read() -> str:
        return json.dumps([[int(path.name), read_tokens(path)] for path in published_steps(folder)])

    return dict(json.loads(hosts.broadcast_from_first(read)))


def _read_tokens(path: epath.Path) -> int:
    return read_metadata(path, ("tokens",))["tokens"]


def _publish(response: Any, path: epath.Path, errors: list[Exception]) -> None:
    """Wait until Orbax has published the step at `path`, then check its metadata and flush it to the disk."""
    try:
        response.result()
        if hosts.is_first_process():
            _check_has_metadata(path)
            if not is_bucket(path):
                atomic.fsync_tree(Path(path))
    except Exception as error:
        errors.append(error)


def _check_has_metadata(path: epath.Path) -> None:
    """Remove a step that was just published if it lacks our metadata, and raise.

    Orbax writes its own metadata first, and ours into the same file at the end. If it cannot read the file back then
    (too many files are open), it publishes the step nevertheless.
    """
    try:
        read_metadata(path, ("tokens",))
    except DamageError as error:
        remove(path)
        raise StorageError("its metadata were lost, as when too many files are open", is_temporary=True) from error
