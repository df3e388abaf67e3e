"""Directories of tensors that imports and exports write: complete, by one rename, or not at all."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.merging.engine import journal
from pma_jax.storage import atomic
from pma_jax.storage.formats import publish
from pma_jax.storage.formats.byte_ranges import open_files, write_range
from pma_jax.storage.formats.layout import OutputLayout

Progress = Callable[[int, int], None]
# All imports and exports share this identifier, so that any of them may overwrite an interrupted upload to a bucket.
_UPLOAD_ID = "model"


class TensorWrite(NamedTuple):
    """An array and its destination in the output."""

    name: str  # leaf or tensor of the output
    offset_bytes: int  # position of the array in that leaf or tensor
    array: np.ndarray
    bytes_read: int  # bytes read from the source to make the array, for progress


@contextlib.contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Prefix the message of a UserError that the block raises."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{prefix}: {error}") from error


def write_directory(
    layout: OutputLayout, target: Path, writes: Iterable[TensorWrite], total_bytes: int, progress: Progress | None
) -> None:
    """Write the arrays of all leaves into a temporary directory, and publish it as `target`."""
    work = publish.working_directory(target, suffix="")
    directory = work / "checkpoint"
    if not work.exists():  # else a killed process left it, perhaps after publishing: it is removed in any case
        _check_not_existing(target)
    with journal.lock_work_directory(work, process=0), atomic.remove_if_stopped(work):
        try:
            _check_not_existing(target)
            if directory.exists():  # left by a killed process
                shutil.rmtree(directory)
            layout.create_files(directory)
            byte_ranges, done = layout.byte_ranges_in(directory), 0
            for name, offset_bytes, array, bytes_read in writes:
                with open_files([part.path for part in byte_ranges[name]], os.O_WRONLY) as files:
                    write_range(files, byte_ranges[name], offset_bytes, array.reshape(-1).view("uint8"))
                done += bytes_read
                if progress is not None:
                    progress(done, total_bytes)
            _check_not_existing(target)
            publish.publish(directory, target, list(layout.sizes), _UPLOAD_ID)
        finally:
            shutil.rmtree(work)


def _check_not_existing(target: Path) -> None:
    if (target.exists() or target.is_symlink()) and not publish.has_incomplete_upload(target, _UPLOAD_ID):
        raise UserError(f"{target}: exists already: remove it or choose another output path")
