"""Files are listed as the standard library lists them, but what cannot be listed is an error."""

import errno
import glob
import os
from pathlib import Path

import pytest

from pma_jax import config as configuration
from pma_jax.data.corpus import open_corpus
from pma_jax.runtime.failures import exit_status
from pma_jax.storage import atomic
from pma_jax.storage.formats.open import open_source
from pma_jax.storage.matching import files_below, match_files

FILES = ("a.txt", "b.json", "c/d.txt", "c/e/f.txt", "c/.g/h.txt", ".i.txt", "j[1].txt", "c/e/k.txt.bak", "l/m/n/o.txt")
PATTERNS = ("*.txt", "**/*.txt", "**", "*/*.txt", "c/*", "c/e/f.txt", "*/e/*.txt", "**/e/**", "j[[]1].txt", "?.txt")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder of files, with links to a file, to a folder, and to nothing."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "p.txt").symlink_to("a.txt")
    (tmp_path / "q").symlink_to("c")
    (tmp_path / "r.txt").symlink_to("nothing")
    return tmp_path


@pytest.mark.parametrize("pattern", PATTERNS)
def test_matches_are_those_of_the_standard_library(tree: Path, pattern: str):
    expected = {tree / name for name in glob.glob(pattern, root_dir=tree, recursive=True)}  # noqa: PTH207
    found = set(match_files(tree, pattern, with_hidden=False))
    assert {path for path in found if path.is_file()} == {path for path in expected if path.is_file()} != set()
    if "**" not in pattern:
        assert set(match_files(tree, pattern)) == set(tree.glob(pattern))


def test_files_below_are_those_of_rglob(tree: Path):
    assert files_below(tree) == sorted(path for path in tree.rglob("*") if path.is_file())
    assert list(match_files(tree / "absent", "*")) == files_below(tree / "absent") == []
    assert list(match_files(tree / "a.txt", "**/*")) == []


def _refuse_to_list(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
    scandir = os.scandir

    def fail(path="."):
        if not isinstance(path, int) and Path(path) == folder:
            raise OSError(number, os.strerror(number), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)


@pytest.mark.parametrize(("number", "status"), [(errno.EMFILE, 75), (errno.EACCES, 1), (errno.EIO, 1)])
def test_a_corpus_does_not_lose_the_documents_of_a_folder_that_cannot_be_listed(
    tree: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
):
    config = configuration.resolve({"data": {"source": "files", "files": (f"{tree}/**/*.txt",)}})
    assert len(list(open_corpus(config.data).read())) == 5  # p.txt and q/ are links to others
    _refuse_to_list(monkeypatch, tree / "c" / "e", number)
    with pytest.raises(OSError, match=r"c/e") as caught:
        open_corpus(config.data)
    assert exit_status(caught.value) == status


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_a_checkpoint_or_a_tree_to_flush_that_cannot_be_listed_is_an_error(
    tree: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    _refuse_to_list(monkeypatch, tree / "c", number)
    with pytest.raises(OSError, match="c"):
        files_below(tree)
    with pytest.raises(OSError, match="c"):
        atomic.fsync_tree(tree)
    with pytest.raises((OSError, ValueError), match=os.strerror(number)):
        open_source(tree / "c")
