import fcntl
import threading
from pathlib import Path

import pytest

from pma_jax.storage import atomic


def test_concurrent_writers_leave_one_complete_file(tmp_path):
    path, texts = tmp_path / "file", [letter * 100_000 for letter in "abcd"]
    threads = [threading.Thread(target=atomic.write_text, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_next_write_removes_what_a_killed_writer_left_and_nothing_else(tmp_path):
    kept = [tmp_path / name for name in (".other.1-0.writing", ".file.text", "file.writing", ".file.2-0.writing")]
    for path in (*kept, tmp_path / ".file.1-0.writing"):
        path.touch()
    with kept[-1].open("wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        atomic.write_text(tmp_path / "file", "new")
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "file"])
    atomic.write_text(tmp_path / "file", "newer")
    assert sorted(tmp_path.iterdir()) == sorted([*kept[:-1], tmp_path / "file"])


def test_failed_write_keeps_the_old_file_and_leaves_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "file"
    atomic.write_text(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            atomic.write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_directory_is_published_with_its_contents(tmp_path):
    (tmp_path / "work" / "below").mkdir(parents=True)
    (tmp_path / "work" / "below" / "file").write_text("text")
    atomic.publish_directory(tmp_path / "work", tmp_path / "done")
    assert (tmp_path / "done" / "below" / "file").read_text() == "text" and not (tmp_path / "work").exists()
