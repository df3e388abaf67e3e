"""A folder of numbered steps that are published and removed atomically, and written in the background.

    FOLDER/<step>/commit_success.txt     commit marker: without it the step does not exist
    FOLDER/<step>/_CHECKPOINT_METADATA   the step's metadata, with a digest of their own
    FOLDER/<step>/<item>/                the arrays

A step is published by one rename. It is removed with its marker first. A directory without a commit marker is garbage,
which is removed when a run starts. A process that is killed while it writes or removes a step therefore leaves either
the complete step or garbage.

Orbax's preservation policies could choose what to keep, but Orbax deletes a step as a plain tree; a kill during that
would leave a partial step with its marker, so removal is done here.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath
from orbax.checkpoint import v1 as ocp

from pma_jax.runtime.errors import error_line
from pma_jax.storage.digests import add_metadata_digest, check_metadata_digest

COMMIT_MARKER = "commit_success.txt"
METADATA_FILE = "_CHECKPOINT_METADATA"


def numbered(folder: epath.Path) -> list[epath.Path]:
    """List the entries of `folder` whose names are numbers, in their order; none if there is no such folder."""
    paths = [path for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []
    return sorted(paths, key=lambda path: int(path.name))


def published(folder: epath.Path) -> list[epath.Path]:
    """List the published steps in `folder`, oldest first."""
    return [path for path in numbered(folder) if (path / COMMIT_MARKER).exists()]


def unpublished(folder: epath.Path) -> list[epath.Path]:
    """List entries with the name of a step but no commit marker: partially removed or copied, or empty."""
    return [path for path in numbered(folder) if not (path / COMMIT_MARKER).exists()]


def read_metadata(path: epath.Path, keys: Sequence[str]) -> dict[str, Any]:
    """Read the metadata of a step, or of a snapshot outside a run, from its one small file.

    Raises:
        ValueError: the file is missing, corrupt, or lacks one of `keys`; the message names it.
    """
    file = path / METADATA_FILE
    try:
        metadata = json.loads(file.read_text())["custom_metadata"]
    except FileNotFoundError as error:
        raise ValueError(f"{path} is corrupt or incomplete: {METADATA_FILE} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is corrupt: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, dict) or not metadata.keys() >= set(keys):
        raise ValueError(f"{path} has no metadata of pma_jax: it is corrupt, or from another version")
    check_metadata_digest(metadata, file)
    return metadata


def remove(path: epath.Path) -> None:
    """Remove a step, its marker first, so that a partially removed step never counts as a step."""
    (path / COMMIT_MARKER).unlink(missing_ok=True)
    path.rmtree()


def uncompressed_arrays(root: str | None = None) -> ocp.Context:
    """Create the Orbax context for writing uncompressed arrays.

    Weights hardly compress, and zstd decodes at a tenth of the rate of a plain read.

    Args:
        root: prefix of barrier names between processes; folders that are written concurrently need different ones.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.multiprocessing.barrier_sync_key_prefix = root
    return context


@contextlib.contextmanager
def report_write_errors(path: epath.PathLike) -> Iterator[None]:
    """Convert write errors of Orbax and TensorStore, which can be long, to a ValueError of one line."""
    try:
        yield
    except Exception as error:
        reason = error_line(error)
        if "No space left on device" in reason or "ENOSPC" in reason or "Disk quota exceeded" in reason:
            reason = "no space is left on the device: make room"
        elif "Read-only file system" in reason or "Permission denied" in reason:
            reason = "it may not be written (read-only, or without permission): change that"
        else:
            reason = f"{type(error).__name__}: {reason[:300]}"
        raise ValueError(f"{path} could not be written; existing checkpoints are intact: {reason}") from error


class StepWriter:
    """A context manager that writes steps into a folder, one at a time, in the background.

    Args:
        folder: the folder of steps.
        kept: retention rule: maps the tokens of all steps, ascending, to whether each is kept. The others are removed
            after the next step is published.
        removes: whether this process removes steps.
    """

    def __init__(self, folder: epath.Path, kept: Callable[[Sequence[int]], list[bool]], removes: bool):
        self._folder, self._kept, self._removes = folder, kept, removes
        self._tokens = {int(path.name): read_metadata(path, ("tokens",))["tokens"] for path in published(folder)}
        self._response: Any = None
        self._writing = (0, 0)  # step and tokens
        with uncompressed_arrays(folder.name), report_write_errors(folder):
            self._steps = ocp.training.Checkpointer(folder, cleanup_tmp_directories=True)

    def save(self, step: int, items: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Write a step asynchronously. Do nothing if the step exists.

        The arrays may be donated when this method returns.

        Raises:
            ValueError: this or the previous step could not be written.
        """
        self.finish()
        if step in self._tokens:
            return
        with uncompressed_arrays(self._folder.name), report_write_errors(self._folder / str(step)):
            # Without `force`, Orbax silently skips a step below its newest, such as the rewrite of a corrupt one.
            self._response = self._steps.save_checkpointables_async(
                step, dict(items), custom_metadata=add_metadata_digest(metadata), force=True
            )
        self._writing = (step, metadata["tokens"])

    def finish(self) -> None:
        """Wait until the current step is published, then apply the retention rule.

        Raises:
            ValueError: the step could not be written.
        """
        response, self._response = self._response, None
        if response is not None:
            step, tokens = self._writing
            with report_write_errors(self._folder / str(step)):
                response.result()
            self._tokens[step] = tokens  # not before: a step that failed must not replace an older one
        steps = sorted(self._tokens, key=lambda step: self._tokens[step])
        for step, is_kept in zip(steps, self._kept([self._tokens[step] for step in steps]), strict=True):
            if not is_kept:
                del self._tokens[step]
                if self._removes:
                    remove(self._folder / str(step))

    def __enter__(self) -> "StepWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        has_failed = True
        try:
            self.finish()
            has_failed = exception[0] is not None
        finally:
            # After a failed write, Orbax raises the same error again, in its long form.
            with contextlib.suppress(Exception) if has_failed else contextlib.nullcontext():
                self._steps.close()
