"""A folder of numbered steps, each there whole or not at all: writing them in the background, taking them away.

    FOLDER/<step>/commit_success.txt     without this mark the step does not exist
    FOLDER/<step>/_CHECKPOINT_METADATA   the step's metadata, with a digest of their own
    FOLDER/<step>/<item>/                the arrays

A step is published by one rename, and ends by the removal of its mark: what is then left is nobody's. So a process that
is killed while it writes or removes a step leaves either the whole step, or something that the next start clears away.
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


def published(folder: epath.Path) -> list[epath.Path]:
    """The steps in `folder`, oldest first."""
    return [path for path in _numbered(folder) if (path / COMMIT_MARKER).exists()]


def unpublished(folder: epath.Path) -> list[epath.Path]:
    """What is named like a step and is none: half removed, half copied, empty."""
    return [path for path in _numbered(folder) if not (path / COMMIT_MARKER).exists()]


def read_metadata(path: epath.Path, keys: Sequence[str]) -> dict[str, Any]:
    """What a step, or a snapshot anywhere, says of itself; reads one small file.

    Raises ValueError that names the file when it is missing, damaged, or without one of `keys`.
    """
    file = path / METADATA_FILE
    try:
        found = json.loads(file.read_text())["custom_metadata"]
    except FileNotFoundError as error:
        raise ValueError(f"{path} is damaged or incomplete: {METADATA_FILE} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise ValueError(f"{path} has none of pma_jax's metadata: it is damaged, or not of this version")
    check_metadata_digest(found, file)
    return found


def remove(path: epath.Path) -> None:
    """Take a step away: first its mark, so that at no time half of it is taken for a step."""
    (path / COMMIT_MARKER).unlink(missing_ok=True)
    path.rmtree()


def uncompressed_arrays(root: str | None = None) -> ocp.Context:
    """How arrays are written: weights hardly compress, and zstd decodes at a tenth of the rate of a plain read.

    Several processes meet at barriers with names: two folders are written at one time, and each needs its own `root`.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.multiprocessing.barrier_sync_key_prefix = root
    return context


@contextlib.contextmanager
def report_write_errors(path: epath.PathLike) -> Iterator[None]:
    """What Orbax and TensorStore raise when a disk is full or may not be written, pages long, as one line."""
    try:
        yield
    except Exception as error:
        said = error_line(error)
        if "No space left on device" in said or "ENOSPC" in said or "Disk quota exceeded" in said:
            said = "no space is left on the device: make room"
        elif "Read-only file system" in said or "Permission denied" in said:
            said = "it may not be written (read-only, or without permission): change that"
        else:
            said = f"{type(error).__name__}: {said[:300]}"
        raise ValueError(f"{path} could not be written, and what was there before is whole: {said}") from error


class StepWriter:
    """Writes steps into a folder, one at a time, in the background; a context manager.

    `kept` says of the tokens of all steps, ascending, which are kept: the others go once a newer one is published.
    """

    def __init__(self, folder: epath.Path, kept: Callable[[Sequence[int]], list[bool]], removes: bool):
        self._folder, self._kept, self._removes = folder, kept, removes
        self._tokens = {int(path.name): read_metadata(path, ("tokens",))["tokens"] for path in published(folder)}
        self._response: Any = None
        self._writing = 0
        with uncompressed_arrays(folder.name), report_write_errors(folder):
            self._steps = ocp.training.Checkpointer(folder, cleanup_tmp_directories=True)

    def save(self, step: int, items: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Start writing a step; returns when the arrays may be donated. A step that exists is kept.

        Raises ValueError, one line, when the step before could not be written, or this cannot.
        """
        if step in self._tokens:
            return
        self.finish()
        with uncompressed_arrays(self._folder.name), report_write_errors(self._folder / str(step)):
            # Forced: Orbax otherwise leaves out, without a word, a step below its newest, such as a damaged one redone.
            self._response = self._steps.save_checkpointables_async(
                step, dict(items), custom_metadata=add_metadata_digest(found), force=True
            )
        self._writing = step
        self._tokens[step] = found["tokens"]

    def finish(self) -> None:
        """Wait until what is being written is published, and remove what is not kept.

        Raises ValueError, one line, when it could not be written.
        """
        response, self._response = self._response, None
        if response is not None:
            with report_write_errors(self._folder / str(self._writing)):
                response.result()
        steps = sorted(self._tokens, key=lambda step: self._tokens[step])
        for step, is_kept in zip(steps, self._kept([self._tokens[step] for step in steps]), strict=True):
            if not is_kept:
                del self._tokens[step]
                if self._removes:
                    remove(self._folder / str(step))

    def __enter__(self) -> "StepWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.finish()
        except BaseException:
            with contextlib.suppress(Exception):  # the same again, pages long
                self._steps.close()
            raise
        self._steps.close()


def _numbered(folder: epath.Path) -> list[epath.Path]:
    found = [path for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []
    return sorted(found, key=lambda path: int(path.name))
