"""A folder of numbered steps that are published and removed atomically, and written in the background.

    FOLDER/<step>/commit_success.txt     commit marker
    FOLDER/<step>/_CHECKPOINT_METADATA   metadata of the step, with its own digest
    FOLDER/<step>/<item>/                arrays

On a disk, Orbax writes a step to a temporary folder, adds the commit marker, and renames the folder. In a bucket, it
writes to the final folder and adds the marker last. `remove` deletes the marker first. A folder without the marker is
therefore incomplete: it was left by a process that was killed while it saved or removed the step. Such folders are
ignored by readers and removed when a run starts. A step with the marker is published.

Orbax's own deletion (its preservation policies) removes files in any order. If interrupted, it could leave an
incomplete step that still has its marker.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from etils import epath
from orbax.checkpoint import v1 as ocp

from pma_jax.config.errors import UserError, error_line
from pma_jax.storage.digests import add_metadata_digest, check_metadata_digest
from pma_jax.storage.json_files import read_json
from pma_jax.storage.json_schema import Count, Loss
from pma_jax.storage.paths import as_path

COMMIT_MARKER = "commit_success.txt"
METADATA_FILE = "_CHECKPOINT_METADATA"


class _Metadata(TypedDict):
    """Metadata of a snapshot or of a state; `read_metadata` requires the fields that its caller names."""

    step: NotRequired[Count]
    tokens: NotRequired[Count]
    position: NotRequired[Count]
    loss: NotRequired[Loss | None]
    kind: NotRequired[Literal["point", "block_mean"]]
    config: NotRequired[dict[str, dict[str, Any]]]
    checksum: NotRequired[str]
    leaves: NotRequired[dict[str, str]]


class _MetadataFile(TypedDict):
    custom_metadata: _Metadata


def numbered(folder: epath.Path) -> list[epath.Path]:
    """List the entries of `folder` whose names are numbers, in ascending order; empty if the folder does not exist."""
    paths = [path for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []
    return sorted(paths, key=lambda path: int(path.name))


def published_steps(folder: epath.Path) -> list[epath.Path]:
    """List the published steps in `folder`, in ascending order."""
    return [path for path in numbered(folder) if (path / COMMIT_MARKER).exists()]


def unpublished_steps(folder: epath.Path) -> list[epath.Path]:
    """List the step folders without a commit marker, which are incomplete and can be removed."""
    return [path for path in numbered(folder) if not (path / COMMIT_MARKER).exists()]


def read_metadata(path: epath.Path, keys: Sequence[str]) -> dict[str, Any]:
    """Read the metadata of a step, or of a snapshot outside a run, and verify their digest.

    Raises:
        UserError: The metadata file is missing or corrupt, or lacks one of `keys`.
    """
    file = path / METADATA_FILE
    try:
        metadata = read_json(as_path(file), _MetadataFile, allow_nan=True)["custom_metadata"]
    except FileNotFoundError as error:
        raise UserError(f"{path} is corrupt or incomplete: {METADATA_FILE} is missing") from error
    except UserError as error:
        raise UserError(f"{path} is corrupt: {error}") from error
    missing = [key for key in keys if key not in metadata]
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}: it is corrupt, or not from this version of pma_jax")
    check_metadata_digest(metadata, file)
    return metadata


def remove(path: epath.Path) -> None:
    """Remove a step, its marker first, so that a partially removed step never counts as a step."""
    (path / COMMIT_MARKER).unlink(missing_ok=True)
    path.rmtree()


def uncompressed_context(barrier_prefix: str | None = None) -> ocp.Context:
    """Create an Orbax context that writes arrays uncompressed.

    Weights hardly compress, and reading zstd arrays is about 10 times slower than reading uncompressed ones.

    Args:
        barrier_prefix: Prefix of the keys of Orbax's multiprocess barriers. Folders that are written concurrently need
            different prefixes.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.multiprocessing.barrier_sync_key_prefix = barrier_prefix
    return context


@contextlib.contextmanager
def report_write_errors(path: epath.PathLike) -> Iterator[None]:
    """Convert errors of the `with` block, which are long in Orbax and TensorStore, to a ValueError of one line."""
    try:
        yield
    except Exception as error:
        reason = error_line(error)
        if "No space left on device" in reason or "ENOSPC" in reason or "Disk quota exceeded" in reason:
            reason = "no space is left on the device: free some space"
        elif "Read-only file system" in reason or "Permission denied" in reason:
            reason = "the file system is read-only or permission is denied: make the path writable"
        else:
            reason = f"{type(error).__name__}: {reason[:300]}"
        raise UserError(f"cannot write {path}: {reason} (checkpoints that exist are not affected)") from error


class StepWriter:
    """A context manager that writes steps into a folder, one at a time, in the background.

    Args:
        folder: Folder of steps.
        retention: Function from the token counts of all steps, ascending, to one bool per step: whether to keep that
            step. `save` and `finish` apply it to the published steps.
        removes_steps: Whether this process deletes the steps that are not kept from storage; only one process may.
    """

    def __init__(self, folder: epath.Path, retention: Callable[[Sequence[int]], list[bool]], removes_steps: bool):
        self._folder, self._retention, self._removes_steps = folder, retention, removes_steps
        paths = published_steps(folder)
        self._tokens_by_step = {int(path.name): read_metadata(path, ("tokens",))["tokens"] for path in paths}
        self._response: Any = None
        self._pending = (0, 0)  # step and tokens of the save that is in progress
        with uncompressed_context(folder.name), report_write_errors(folder):
            self._checkpointer = ocp.training.Checkpointer(folder, cleanup_tmp_directories=True)

    def save(self, step: int, items: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Wait for the previous save, then start to save a step in the background. Do nothing if the step exists.

        When this method returns, the arrays have been copied and may be donated.

        Raises:
            UserError: This or the previous step could not be written.
        """
        self.finish()
        if step in self._tokens_by_step:
            return
        with uncompressed_context(self._folder.name), report_write_errors(self._folder / str(step)):
            # Without `force`, Orbax silently skips steps below the newest, such as a corrupt one that is written again.
            self._response = self._checkpointer.save_checkpointables_async(
                step, dict(items), custom_metadata=add_metadata_digest(metadata), force=True
            )
        self._pending = (step, metadata["tokens"])

    def finish(self) -> None:
        """Wait until the step that is being saved is published, then apply the retention rule.

        Raises:
            UserError: The step could not be written.
        """
        response, self._response = self._response, None
        if response is not None:
            step, tokens = self._pending
            with report_write_errors(self._folder / str(step)):
                response.result()
            self._tokens_by_step[step] = tokens  # only now: else an older step could be removed for one that failed
        steps = sorted(self._tokens_by_step, key=lambda step: self._tokens_by_step[step])
        are_kept = self._retention([self._tokens_by_step[step] for step in steps])
        for step, is_kept in zip(steps, are_kept, strict=True):
            if not is_kept:
                del self._tokens_by_step[step]
                if self._removes_steps:
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
