"""Publishing a finished checkpoint: by one rename on a disk, by an order of objects in a bucket, which has no rename.

In a bucket every object appears whole, and their order says what is done: first a mark that a publication is under way,
then the arrays, then the texts that lead to them, then provenance.json and the commit mark, and at last the first mark
goes. What has the first mark is not whole: the same merge writes over it, anything else refuses it.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pma_jax.storage import atomic
from pma_jax.storage.paths import is_bucket

IN_PROGRESS_FILE = "publishing.json"
_LAST = ("provenance.json", "commit_success.txt")
_THREADS = 8


def working_directory(target: Path, suffix: str) -> Path:
    """Where `target` is made: beside it on a disk, in the machine's directory for temporary files for a bucket."""
    if not is_bucket(target):
        return target.parent / f".{target.name}.partial{suffix}"
    place = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"pma-{place}.partial{suffix}"


def publish(directory: Path, target: Path, arrays: Sequence[str], digest: str) -> None:
    """Make `directory` appear as `target`; `arrays` are the relative paths of the files that hold leaves.

    Where `target` is in a bucket, `digest` says in its mark what is being published.
    """
    if is_bucket(target):
        _upload(directory, target, arrays, digest)
        return
    atomic.publish_directory(directory, target)


def is_upload_interrupted(target: Path, digest: str) -> bool:
    """Whether publishing what has this digest was interrupted; then `publish` writes over what is there."""
    mark = target / IN_PROGRESS_FILE
    return is_bucket(target) and mark.exists() and json.loads(mark.read_text())["digest"] == digest


def _upload(directory: Path, target: Path, arrays: Sequence[str], digest: str) -> None:
    (target / IN_PROGRESS_FILE).write_text(json.dumps({"digest": digest}))
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    texts = files - set(arrays) - set(_LAST)
    for names in (sorted(arrays), sorted(texts), *([name] for name in _LAST if name in files)):
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda name: _copy(directory / name, target / name), names):
                pass
    (target / IN_PROGRESS_FILE).unlink()


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as data, target.open("wb") as written:
        shutil.copyfileobj(data, written, 2**22)
