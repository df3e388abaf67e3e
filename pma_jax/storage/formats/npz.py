"""Read and write .npz files of named arrays, as `numpy.savez` writes them.

The arrays of such a file are stored members of a zip archive: each is an .npy header, followed by the array's bytes.
They are read in place. A member's name is the leaf's name, with "/" or "." between the keys of a tree.
"""

import ast
import functools
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import DamageError, UserError, error_line
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.progress import read_progress
from pma_jax.storage.formats.source import (
    ITEM_BYTES,
    ML_DTYPES,
    PACKED_BITS,
    ByteRange,
    CheckpointSource,
    LeafInfo,
    are_sizes,
)
from pma_jax.storage.formats.subtree import choose_subtrees, is_below, split_subtrees
from pma_jax.storage.matching import match_files
from pma_jax.storage.paths import name_file

_LOCAL_HEADER_BYTES = 30
_MAX_NPY_HEADER_BYTES = 2**16
_READ_BYTES = 2**22
# What an .npy file can hold: the dtypes of NumPy.
DTYPES = ITEM_BYTES.keys() - PACKED_BITS.keys() - ML_DTYPES
_STEP_NAMES = ("step", "global_step")


def is_npz(path: Path) -> bool:
    """Return whether a path is an .npz file, or a directory with exactly one."""
    if path.is_file():
        return path.suffix == ".npz"
    return len(list(match_files(path, "*.npz"))) == 1


def open_npz(path: Path, subtrees: Sequence[str] = ()) -> CheckpointSource:
    """Open an .npz file, or the only one in a directory. The file is read once, to compare its checksums.

    Raises:
        DamageError: The file is corrupt.
        UserError: It has an array that cannot be read in place, or the parameters cannot be located.
    """
    file = path if path.is_file() else next(match_files(path, "*.npz"))
    arrays = _read_headers(file)
    separator = "/" if any("/" in name for name in arrays) else "."
    keys = {name: name.split(separator) for name in arrays}
    prefixes, notes = choose_subtrees(file, list(keys.values()), split_subtrees(subtrees))
    chosen: dict[str, tuple[LeafInfo, ByteRange]] = {}
    for name, array in arrays.items():
        if is_below(keys[name], prefixes):
            if isinstance(array, UserError):
                raise array
            chosen[name] = array
    progress = read_progress(
        path, step=next((_read_step(arrays[name]) for name in _STEP_NAMES if name in arrays), None)
    )
    return CheckpointSource(
        format="npz",
        path=path,
        origin=str(path),
        leaves={name: leaf for name, (leaf, _) in chosen.items()},
        byte_ranges={name: (part,) for name, (_, part) in chosen.items()},
        tokens=progress.tokens,
        step=progress.step,
        epoch=progress.epoch,
        notes=(*notes, *progress.notes),
        metadata={"file": file.name},
    )


def npz_layout(
    sources: Sequence[CheckpointSource], leaves: Mapping[str, LeafInfo], custom_metadata: Mapping[str, Any]
) -> OutputLayout:
    """Plan an .npz file, which is assembled from one .npy file per leaf when all are written.

    It has the name of the sources' file, or is `model.npz` if their names differ.
    """
    names = {source.metadata["file"] for source in sources if source.format == "npz"}
    headers = {f"{number}.npy": _npy_header(leaf) for number, leaf in enumerate(leaves.values())}
    parts = dict(zip(leaves, headers, strict=True))
    return OutputLayout(
        texts={},
        sizes={part: len(headers[part]) + leaves[name].nbytes for name, part in parts.items()},
        byte_ranges={
            name: (ByteRange(Path(part), len(headers[part]), leaves[name].nbytes),) if leaves[name].elements else ()
            for name, part in parts.items()
        },
        headers=headers,
        assemble=functools.partial(_assemble, names.pop() if len(names) == 1 else "model.npz", parts),
    )


def _assemble(name: str, parts: Mapping[str, str], directory: Path, target: Path) -> None:
    """Write the .npz file `name` in `target` from the .npy files in `directory`, given each leaf's file."""
    with zipfile.ZipFile(target / name, "w", allowZip64=True) as archive:
        for leaf, part in parts.items():
            # A fixed date, so that equal inputs give equal files.
            member = zipfile.ZipInfo(f"{leaf}.npy")
            with (directory / part).open("rb") as source, archive.open(member, "w", force_zip64=True) as out:
                while data := source.read(_READ_BYTES):
                    out.write(data)


def _npy_header(leaf: LeafInfo) -> bytes:
    """Return the bytes of an .npy file before the array's data (version 1.0: their number is a multiple of 64)."""
    code = np.dtype(leaf.dtype).newbyteorder("<").str
    text = repr({"descr": code, "fortran_order": False, "shape": leaf.shape})
    padding = -(len(text) + 11) % 64
    return b"\x93NUMPY\x01\x00" + (len(text) + padding + 1).to_bytes(2, "little") + f"{text}{' ' * padding}\n".encode()


def _read_headers(file: Path) -> dict[str, tuple[LeafInfo, ByteRange] | UserError]:
    """Return the arrays of a file by name: shape and dtype, and where their bytes are, or why they cannot be read."""
    arrays: dict[str, tuple[LeafInfo, ByteRange] | UserError] = {}
    try:
        with name_file(file), file.open("rb") as data, zipfile.ZipFile(data) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name in arrays:
                    raise DamageError(f"{file}: has two arrays named {name[:80]!r}")
                if name == member.filename or not name.isprintable() or ".." in name.split("/") or name.startswith("/"):
                    what = f"{file}: {member.filename[:80]!r}"
                    raise UserError(f"{what} is not an array that numpy.savez wrote; remove it")
                try:
                    arrays[name] = _read_member(file, data, member)
                except UserError as error:
                    if isinstance(error, DamageError):
                        raise
                    arrays[name] = error
    except UserError:
        raise
    except (zipfile.BadZipFile, struct.error, NotImplementedError, EOFError, ValueError, OverflowError) as error:
        raise DamageError(f"{file}: is not a complete .npz file ({error_line(error)[:100]}); fetch it again") from None
    if not arrays:
        raise UserError(f"{file}: holds no arrays")
    return arrays


def _read_member(file: Path, data: Any, member: zipfile.ZipInfo) -> tuple[LeafInfo, ByteRange]:
    what = f"{file}: {member.filename[:80]!r}"
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise UserError(f"{what} is compressed or encrypted, and is not read; save the arrays with numpy.savez")
    data.seek(max(0, member.header_offset))
    local = data.read(_LOCAL_HEADER_BYTES)
    if member.header_offset < 0 or len(local) < _LOCAL_HEADER_BYTES or local[:4] != b"PK\x03\x04":
        raise DamageError(f"{what} is not where the file's directory says; fetch it again")
    start = member.header_offset + len(local) + sum(int.from_bytes(local[i : i + 2], "little") for i in (26, 28))
    _check_checksum(what, data, start, member)
    data.seek(start)
    shape, dtype, header_bytes = _parse_npy_header(what, data.read(min(member.file_size, _MAX_NPY_HEADER_BYTES)))
    leaf = LeafInfo(shape, dtype)
    if header_bytes + leaf.nbytes != member.file_size:
        raise DamageError(
            f"{what} has {member.file_size - header_bytes} bytes instead of {leaf.nbytes}; fetch it again"
        )
    return leaf, ByteRange(file, start + header_bytes, leaf.nbytes)


def _check_checksum(what: str, data: Any, start: int, member: zipfile.ZipInfo) -> None:
    data.seek(start)
    checksum, left = 0, member.file_size
    while left and (block := data.read(min(left, _READ_BYTES))):
        checksum, left = zlib.crc32(block, checksum), left - len(block)
    if left or checksum != member.CRC:
        raise DamageError(f"{what} does not match its checksum; the file is corrupt, fetch it again")


def _parse_npy_header(what: str, data: bytes) -> tuple[tuple[int, ...], str, int]:
    """Return (shape, dtype, size of the header in bytes) of an .npy file, given its beginning."""
    width = {1: 2, 2: 4, 3: 4}.get(data[6] if len(data) > 6 else 0)
    if data[:6] != b"\x93NUMPY" or width is None:
        raise DamageError(f"{what} is not an .npy file of version 1 to 3")
    end = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    try:
        fields = ast.literal_eval(data[8 + width : end].decode())
        code, shape, is_fortran = fields["descr"], fields["shape"], fields["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        raise DamageError(f"{what} has a corrupt header") from None
    if not (isinstance(code, str) and isinstance(shape, tuple) and are_sizes(list(shape)) and end <= len(data)):
        raise DamageError(f"{what} has a corrupt header")
    dtype = _dtype_of(code)
    if dtype is None:
        raise UserError(
            f"{what} has the dtype {code[:40]!r}, which is not read; save it as little-endian numbers of NumPy"
        )
    if is_fortran and len(shape) > 1:
        raise UserError(f"{what} is in Fortran order, which is not read; save it with numpy.ascontiguousarray")
    return shape, dtype, end


def _dtype_of(code: str) -> str | None:
    try:
        dtype = np.dtype(code)
    except TypeError:
        return None
    return dtype.name if dtype.name in DTYPES and dtype.str[0] != ">" else None


def _read_step(array: tuple[LeafInfo, ByteRange] | UserError) -> int | None:
    """Return the value of a scalar integer; None if the array is something else."""
    if isinstance(array, UserError):
        return None
    leaf, part = array
    if leaf.elements != 1 or not leaf.is_integer:
        return None
    with name_file(part.path), part.path.open("rb") as file:
        file.seek(part.offset)
        return int(np.frombuffer(file.read(part.nbytes), leaf.dtype)[0])
