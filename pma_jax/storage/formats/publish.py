"""Publish a finished checkpoint: by one rename on a disk; by an ordered upload to a bucket, which has no rename.

Every object in a bucket appears atomically. The order of upload is: a marker `publishing.json`, the files with arrays,
the small files that refer to them, provenance.json, the commit marker; then `publishing.json` is removed. A directory
that contains `publishing.json` is incomplete: the same merge uploads it again, and every other writer raises an error.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pma_jax.storage import atomic
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.matching import files_below
from pma_jax.storage.paths import exists, is_bucket, write_object

IN_PROGRESS_FILE = "publishing.json"
_UPLOADED_LAST = ("provenance.json", "commit_success.txt")
_THREADS = 8


def working_directory(target: Path, suffix: str) -> Path:
    """Return where to build `target`: beside it on a disk, in the local temporary directory for a bucket."""
    if not is_bucket(target):
        return target.parent / f".{target.name}.partial{suffix}"
    key = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"pma-{key}.partial{suffix}"


def publish(directory: Path, target: Path, array_files: Sequence[str], digest: str) -> None:
    """Move or upload the complete `directory` to `target`.

    Args:
        directory: A complete checkpoint on a local disk.
        target: The directory to create, on the same disk or in a bucket.
        array_files: Relative paths of the files that contain arrays; they are uploaded first.
        digest: Identifies what is published, in the marker of an interrupted upload.
    """
    if is_bucket(target):
        _upload(directory, target, array_files, digest)
    else:
        atomic.publish_directory(directory, target)


def has_incomplete_upload(target: Path, digest: str) -> bool:
    """Return whether `target` is an interrupted upload with this digest, which `publish` may overwrite."""
    marker = target / IN_PROGRESS_FILE
    return is_bucket(target) and exists(marker) and read_json_object(marker).get("digest") == digest


def begin(target: Path, digest: str) -> None:
    """Mark a directory in a bucket as incomplete, before its first object is written."""
    (target / IN_PROGRESS_FILE).write_text(json.dumps({"digest": digest}))


def write_small_files(target: Path, contents: Mapping[str, bytes]) -> None:
    """Write the small files of a checkpoint in a bucket, in order, once its arrays are there."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for names in _ordered(contents):
            list(pool.map(lambda name: write_object(target / name, contents[name]), names))


def finish(target: Path) -> None:
    """Mark a directory in a bucket as complete."""
    (target / IN_PROGRESS_FILE).unlink()


def _upload(directory: Path, target: Path, array_files: Sequence[str], digest: str) -> None:
    begin(target, digest)
    files = {path.relative_to(directory).as_posix() for path in files_below(directory)}
    for names in (sorted(array_files), *_ordered(files - set(array_files))):
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda name: _copy(directory / name, target / name), names):
                pass
    finish(target)


def _ordered(small_files: Iterable[str]) -> list[list[str]]:
    """Return the names of small files in the groups that are written one after the other."""
    names = set(small_files)
    return [sorted(names - set(_UPLOADED_LAST)), *([name] for name in _UPLOADED_LAST if name in names)]


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as data, target.open("wb") as out:
        shutil.copyfileobj(data, out, 2**22)
