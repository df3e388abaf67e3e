"""List the files of directories, without omitting what cannot be listed.

`glob.glob`, `Path.glob`, `Path.rglob` and `os.walk` treat a directory that they cannot list (too many open files, no
permission, an error of the device) as an empty one. A corpus would then lose documents, and a checkpoint files, without
a message. The functions here raise the OSError. Only absence, such as a file that is removed meanwhile, is no error.
"""

import fnmatch
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from pma_jax.storage.paths import is_bucket, list_objects, raise_unless_absent


def match_files(directory: Path, pattern: str, with_hidden: bool = True) -> Iterator[Path]:
    """Yield the files and directories below `directory` that match a pattern, in no particular order.

    Args:
        directory: A local directory or one in a bucket; it may be absent.
        pattern: A relative path with wildcards, as for `glob.glob`: `**` matches any number of directories.
        with_hidden: Whether wildcards match names that begin with a dot.

    Raises:
        OSError: A directory cannot be listed.
    """
    if is_bucket(directory):
        yield from directory.glob(pattern)
        return
    part, _, rest = pattern.partition("/")
    if part == "**":
        if rest:
            yield from match_files(directory, rest, with_hidden)
        for path, is_directory in _children(directory, "*", with_hidden):
            if not rest:
                yield path
            if is_directory:
                yield from match_files(path, pattern, with_hidden)
    elif not rest:
        yield from (path for path, _ in _children(directory, part, with_hidden))
    else:
        for path, is_directory in _children(directory, part, with_hidden):
            if is_directory:
                yield from match_files(path, rest, with_hidden)


def files_below(directory: Path) -> list[Path]:
    """List all files below a directory, or all objects below a prefix, sorted; links to directories are not followed.

    Raises:
        OSError: A directory cannot be listed.
    """
    if is_bucket(directory):
        return list_objects(str(directory))
    found = os.walk(directory, onerror=raise_unless_absent)
    return sorted(path for root, _, names in found for name in names if (path := Path(root, name)).is_file())


def _children(directory: Path, pattern: str, with_hidden: bool) -> Iterator[tuple[Path, bool]]:
    """Yield the entries of a directory whose names match, and whether each is a directory (or a link to one)."""
    if not glob.has_magic(pattern):
        path = directory / pattern
        if path.exists() or path.is_symlink():
            yield path, path.is_dir()
        return
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except OSError as error:
        raise_unless_absent(error)
        return
    for name in names:
        is_shown = with_hidden or pattern.startswith(".") or not name.startswith(".")
        if is_shown and fnmatch.fnmatchcase(name, pattern):
            path = directory / name
            yield path, path.is_dir()
