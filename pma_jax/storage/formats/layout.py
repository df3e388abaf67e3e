"""The files of a checkpoint that is about to be written: their sizes and where every leaf's bytes go.

All formats are written as raw bytes at offsets that are known before any input is read. So any thread or process can
write any part at any time, a crash loses nothing that was written, and equal inputs give equal files.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pma_jax.storage.formats.source import ByteRange


@dataclass(frozen=True)
class OutputLayout:
    """The files of a checkpoint directory; all paths are relative to it.

    Attributes:
        texts: Path -> content of a small file.
        sizes: Path -> size in bytes, of the files that hold leaves.
        byte_ranges: Leaf -> where its bytes go, in order.
        headers: Path -> the first bytes of a file that holds leaves.
        copies: Path -> the existing file to copy there.
        notes: What the user should know, one line each.
    """

    texts: Mapping[str, bytes]
    sizes: Mapping[str, int]
    byte_ranges: Mapping[str, tuple[ByteRange, ...]]
    headers: Mapping[str, bytes] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The total size in bytes of the files that hold leaves."""
        return sum(self.sizes.values())

    def create_files(self, directory: Path) -> None:
        """Create every file in `directory` at its full size, with leaves zero; idempotent."""
        for name in [*self.texts, *self.copies, *self.sizes]:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
        for name, size in self.sizes.items():
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(descriptor, size)
                os.pwrite(descriptor, self.headers.get(name, b""), 0)
            finally:
                os.close(descriptor)
        for name, text in self.texts.items():
            (directory / name).write_bytes(text)
        for name, path in self.copies.items():
            with path.open("rb") as source, (directory / name).open("wb") as target:
                shutil.copyfileobj(source, target)

    def byte_ranges_in(self, directory: Path) -> dict[str, tuple[ByteRange, ...]]:
        """Return `byte_ranges` with paths in `directory`."""
        return {
            name: tuple(ByteRange(directory / part.path, part.offset, part.nbytes) for part in ranges)
            for name, ranges in self.byte_ranges.items()
        }
