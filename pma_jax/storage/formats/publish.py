"""Publish a finished checkpoint: by one rename on a disk; by an ordered upload to a bucket, which has no rename.

Every object in a bucket appears atomically. The order of upload is: a marker `publishing.json`, the files with arrays,
the small files that refer to them, provenance.json, the commit marker; then `publishing.json` is removed. A directory
that contains `publishing.json` is incomplete: the same merge uploads it again, and every other writer raises an error.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pma_jax.storage import atomic
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.matching import files_below
from pma_jax.storage.paths import exists, is_bucket

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


def _upload(directory: Path, target: Path, array_files: Sequence[str], digest: str) -> None:
    (target / IN_PROGRESS_FILE).write_text(json.dumps({"digest": digest}))
    files = {path.relative_to(directory).as_posix() for path in files_below(directory)}
    small_files = files - set(array_files) - set(_UPLOADED_LAST)
    for names in (sorted(array_files), sorted(small_files), *([name] for name in _UPLOADED_LAST if name in files)):
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda name: _copy(directory / name, target / name), names):
                pass
    (target / IN_PROGRESS_FILE).unlink()


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as data, target.open("wb") as out:
        shutil.copyfileobj(data, out, 2**22)
