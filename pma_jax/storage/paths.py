"""Local paths and addresses in buckets (gs://bucket/name) behind one interface, that of pathlib.

Buckets are accessed through etils.epath, the path layer of Orbax, over fsspec. Neither is imported for local paths,
so that a merge starts quickly. Objects are written atomically and cannot be changed or renamed; directories are only
prefixes of names.
"""

import contextlib
import errno
import functools
import glob
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pma_jax.config.errors import UserError, error_line

_READ_BYTES = 2**22
# Files of a checkpoint that libraries read whole into memory.
WHOLE_FILES = frozenset({"manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA", "_sharding", ".zarray", "zarr.json"})
MAX_WHOLE_FILE_BYTES = 2**28


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a bucket address, such as gs://bucket/name; hf:// (Hugging Face hub) is not."""
    text = str(path)
    return "://" in text and not text.startswith("hf://")


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a `pathlib.Path` for a local path, or an object with the same interface for a bucket address.

    Raises:
        UserError: See `check_supported`.
    """
    check_supported(path)
    if not is_bucket(path):
        return Path(path)
    return _bucket_path_class()(str(path))


def absolute_path(path: str | os.PathLike[str]) -> Any:
    """Return an absolute `etils.epath.Path`, as Orbax requires, with `~` expanded; bucket addresses are not changed.

    Raises:
        UserError: See `check_supported`; or the path is a loop of symbolic links, or in the home of an unknown user.
    """
    from etils import epath

    check_supported(path)
    if is_bucket(path):
        return epath.Path(path)
    try:
        return epath.Path(expand_user(path)).resolve()
    except RuntimeError as error:
        raise UserError(f"{path}: {error_line(error)}: give another path") from None


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Return a local path with `~` expanded.

    Raises:
        UserError: The path is empty or contains a NUL character, or the home directory is not known.
    """
    check_supported(path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {error_line(error)} Give the directory by its name") from None


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded: a name of a file or an argument that is not UTF-8 has lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_supported(path: str | os.PathLike[str]) -> None:
    """Raise UserError if the path is empty, not UTF-8 or contains a NUL character, or if its bucket is not supported.

    The scheme of a bucket may be unsupported, or its libraries not installed. The bucket is not accessed.
    """
    if not str(path) or "\0" in str(path):
        raise UserError(f"{str(path)!r} is not a path: it is empty or contains a NUL character")
    if not is_utf8(str(path)):
        raise UserError(f"{str(path)!r} is not UTF-8 text, as the JSON files are that record it: rename it")
    if not is_bucket(path):
        return
    text = str(path)
    scheme = text.partition("://")[0]
    if scheme != "gs":
        raise UserError(f"{text}: {scheme}:// is not supported; paths are local or begin with gs://")
    try:
        file_system(text)
        from google.cloud import storage  # noqa: F401  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise UserError(f"{text}: buckets need additional libraries: pip install 'pma-jax[gcs]' ({error})") from None


@contextlib.contextmanager
def name_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add a path to an OSError that is raised in the block and names no file, as of a read, a write or a flush."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def open_regular_file(path: Path, max_bytes: int | None = None, buffering: int = -1) -> io.BufferedReader:
    """Open a regular file, or an object in a bucket, for reading.

    A named pipe, a device or a socket is refused, because reading it could wait or go on forever.

    Args:
        path: The file.
        max_bytes: Its largest size; None: any.
        buffering: Bytes that are read at once at least; the default suits a file that is read whole.

    Raises:
        OSError: The file cannot be opened, such as FileNotFoundError.
        UserError: `path` is not a regular file, or larger than `max_bytes`.
    """
    if is_bucket(path):
        _check_size(path, path.stat().st_size, max_bytes)
        return cast(io.BufferedReader, path.open("rb", buffering))
    descriptor = open_descriptor(path, os.O_RDONLY)
    try:
        _check_size(path, os.fstat(descriptor).st_size, max_bytes)
        return cast(io.BufferedReader, os.fdopen(descriptor, "rb", buffering))
    except BaseException:
        os.close(descriptor)
        raise


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular local file with `os.open`, and return its descriptor; the errors are those of `open_regular_file`.

    With `os.O_CREAT`, a new file can be read and written by all that the umask allows.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe waits for its other end. It has no effect on regular files.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV):
            raise UserError(f"{path}: is {_kind(Path(path).stat().st_mode)}, not a regular file") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UserError(f"{path}: is {_kind(mode)}, not a regular file")
    return descriptor


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file, or an object in a bucket, of at most `max_bytes`.

    Raises:
        OSError: The file cannot be opened or read, such as FileNotFoundError.
        UserError: `path` is not a regular file, or larger than `max_bytes`.
    """
    data = bytearray()
    with name_file(path), open_regular_file(path, max_bytes) as file:
        # In parts, because a buffer of the size that is asked for is allocated.
        while len(data) <= max_bytes and (part := file.read(min(2**20, max_bytes + 1 - len(data)))):
            data += part
    _check_size(path, len(data), max_bytes)  # files of /proc have the size 0, and a file may grow
    return bytes(data)


def _check_size(path: Path, size: int, max_bytes: int | None) -> None:
    if max_bytes is not None and size > max_bytes:
        raise UserError(f"{path}: {size:,} bytes is more than the limit of {max_bytes:,} for such a file")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file, directory or object at `path`.

    Raises OSError, or an exception of the bucket's library, if that cannot be found out. `exists` of `os.path`, of
    epath and of fsspec return False then, after which a caller would remove or write again what is there.
    """
    try:
        if is_bucket(path):
            system, key = file_system(str(path))
            system.info(key)
        else:
            Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_readable(directory: str | os.PathLike[str]) -> None:
    """Read every file below a directory, or every object below a prefix, and raise the first error except absence."""
    for path in file_sizes(as_path(directory)):
        try:
            with name_file(path), path.open("rb") as file:
                while file.read(_READ_BYTES):
                    pass
        except FileNotFoundError:  # removed meanwhile
            continue


def file_system(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path within it."""
    import fsspec

    return fsspec.core.url_to_fs(address)


def write_object(path: Path, data: bytes) -> None:
    """Write an object in a bucket, by one request unless it is large."""
    system, key = file_system(str(path))
    system.pipe_file(key, data)


def list_objects(address: str) -> list[Path]:
    """List the objects of a bucket, sorted by name.

    If the address has wildcards (*, ?, **), return the matches, else all objects below the address.
    """
    system, key = file_system(address)
    keys = system.glob(key) if glob.has_magic(address) else system.find(key)
    return [as_path(f"{address.partition('://')[0]}://{name}") for name in sorted(keys)]


def file_sizes(directory: Path) -> dict[Path, int]:
    """Map every file below a directory, or every object below a prefix, to its size in bytes.

    Raises:
        UserError: The directory holds a named pipe, a device or a socket, which libraries would wait for, or a file of
            `WHOLE_FILES` is larger than `MAX_WHOLE_FILE_BYTES`.
    """
    if not is_bucket(directory):
        found = os.walk(directory, onerror=raise_unless_absent)
        paths = [Path(root, name) for root, _, names in found for name in names]
        sizes = {}
        for path in paths:
            try:
                status = path.stat()
            except FileNotFoundError:  # a link to nothing, or a file that was removed meanwhile
                continue
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path}: is {_kind(status.st_mode)}, not a regular file")
            _check_size(path, status.st_size, MAX_WHOLE_FILE_BYTES if path.name in WHOLE_FILES else None)
            sizes[path] = status.st_size
        return sizes
    system, key = file_system(str(directory))
    return {as_path(f"gs://{name}"): status["size"] for name, status in system.find(key, detail=True).items()}


def raise_unless_absent(error: OSError) -> None:
    """Raise an error that says that a directory could not be listed; for `onerror` of `os.walk`."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        raise error


class RangeReader:
    """Reader of byte ranges of an object.

    Of a range that `expect` announced, it fetches `READ_AHEAD_BYTES` at once, because most reads are sequential, and
    nothing behind its end, which another reader may read.
    """

    READ_AHEAD_BYTES = 8 * 2**20

    def __init__(self, path: Path):
        self._system, self._key = file_system(str(path))
        self._buffer_offset, self._buffer = 0, b""
        self._expected: list[tuple[int, int]] = []

    def expect(self, start: int, stop: int) -> None:
        """Announce that bytes [start, stop) will be read, in order."""
        self._expected.append((start, stop))

    def read_into(self, into: memoryview, offset: int) -> int:
        """Read up to `len(into)` bytes at `offset` into `into`, and return their number.

        The number may be smaller before the end of the object; it is 0 at the end.
        """
        skip = offset - self._buffer_offset
        if not 0 <= skip < len(self._buffer):
            ahead = (stop for start, stop in self._expected if start <= offset < stop)
            end = max(offset + len(into), min(next(ahead, 0), offset + self.READ_AHEAD_BYTES))
            self._buffer_offset, self._buffer, skip = offset, self._system.cat_file(self._key, offset, end), 0
        part = self._buffer[skip : skip + len(into)]
        into[: len(part)] = part
        return len(part)


@functools.cache
def _bucket_path_class() -> Any:
    from etils.epath.gpath import PosixGPath

    class BucketPath(PosixGPath):
        """An address in a bucket, with the methods of pathlib.Path that etils lacks."""

        def stat(self) -> Any:
            status = super().stat()
            return SimpleNamespace(st_size=status.length, st_mtime_ns=status.mtime * 10**9)

        def absolute(self) -> "BucketPath":
            return self

        def is_symlink(self) -> bool:
            return False

        def open(self, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
            if mode != "rb":
                return super().open(mode, **options)
            # Without fsspec's own cache, which reads 5 MiB more than it is asked for. Its files have no limit in
            # `readline`, either.
            system, key = file_system(str(self))
            return io.BufferedReader(
                system.open(key, "rb", cache_type="none"), buffering if buffering > 0 else _READ_BYTES
            )

    return BucketPath
