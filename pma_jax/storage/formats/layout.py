"""The files of a checkpoint to be written: their sizes, and the byte ranges where each leaf is written.

All formats are written as raw bytes at offsets that are known before any input is read. Therefore any thread or process
can write any part at any time, an interrupted write can resume, and equal inputs give equal files. The files of a
format with other rules (an archive, a database) are assembled from the raw ones at the end.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pma_jax.storage.formats.byte_ranges import write_all
from pma_jax.storage.formats.source import ByteRange
from pma_jax.storage.paths import name_file


@dataclass(frozen=True)
class OutputLayout:
    """The files of a checkpoint directory; all paths are relative to it.

    Attributes:
        texts: Path -> complete content of each small file without leaves.
        sizes: Path -> size in bytes of each file with leaves.
        byte_ranges: Leaf name -> the byte ranges where it is written, in order.
        headers: Path -> first bytes of each file that has leaves after a header.
        copies: Path -> the existing file to copy to it.
        assemble: Writes the checkpoint's files to a second directory, given the first: for formats whose files cannot
            be written at offsets that are known before. None if the files are the checkpoint.
        notes: Messages for the user, one line each.
    """

    texts: Mapping[str, bytes]
    sizes: Mapping[str, int]
    byte_ranges: Mapping[str, tuple[ByteRange, ...]]
    headers: Mapping[str, bytes] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    assemble: Callable[[Path, Path], None] | None = None
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The total size in bytes of the files with leaves."""
        return sum(self.sizes.values())

    def create_files(self, directory: Path) -> None:
        """Create each file in `directory` at its full size, with zeros for leaves that are not yet written."""
        for name in [*self.texts, *self.copies, *self.sizes]:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
        for name, size in self.sizes.items():
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                with name_file(directory / name):
                    os.ftruncate(descriptor, size)
                    write_all(descriptor, self.headers.get(name, b""), 0)
            finally:
                os.close(descriptor)
        for name, text in self.texts.items():
            with name_file(directory / name):
                (directory / name).write_bytes(text)
        for name, path in self.copies.items():
            with name_file(directory / name), path.open("rb") as source, (directory / name).open("wb") as target:
                shutil.copyfileobj(source, target)

    def finish(self, directory: Path) -> Path:
        """Return the directory of the checkpoint's files, given the one in which all leaves are written."""
        if self.assemble is None:
            return directory
        assembled = directory.with_name("assembled")
        shutil.rmtree(assembled, ignore_errors=True)  # of an interrupted run
        assembled.mkdir()
        self.assemble(directory, assembled)
        return assembled

    def byte_ranges_in(self, directory: Path) -> dict[str, tuple[ByteRange, ...]]:
        """Return `byte_ranges` with each path joined to `directory`."""
        return {
            name: tuple(part._replace(path=directory / part.path) for part in ranges)
            for name, ranges in self.byte_ranges.items()
        }
