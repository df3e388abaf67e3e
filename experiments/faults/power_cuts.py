"""Cut the power at every phase of `pma train` and `pma fork`: what was not flushed (fsync) is lost; then resume.

    python experiments/faults/power_cuts.py --cuts 60 --seed 0

The file system is simulated. Up to the cut, every operation that Python makes below the run directory is recorded: what
is opened for writing, created, renamed, removed and flushed. After the cut, the bytes of a file that were not flushed
may be lost, and so may a creation, a renaming or a removal if the directory was not flushed after it. POSIX allows any
subset: all of them, or a random half, are undone here, from the newest to the oldest. TensorStore itself flushes the
files with arrays (`file_io_sync`).

The run is then resumed, cut again, and finished, and everything is compared as in kills.py. Steps that were published
and not yet flushed may be set aside in RUN/damaged. The exit status is 1 if anything was lost.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import forked
import run_cells
from bench import Bench, Lost, check


def apply_loss(journal: Path, rng: random.Random) -> int:
    """Undo operations of a journal that were not flushed, and remove the journal; return how many were undone."""
    entries = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    share = rng.choice([1.0, 1.0, 0.5])
    undone: set[int] = set()
    for entry in lost_operations(entries)[::-1]:
        path = entry["path"]
        for index, rename in entry["renames"]:
            path = path if index in undone else moved(path, rename)
        if rng.random() < share and undo(entry, Path(path)):
            undone.add(entry["index"])
    for path in journal.parent.glob(f"{journal.name}*"):
        path.unlink()
    for path in durable_steps(entries):
        check((path / "commit_success.txt").exists(), f"{path} was flushed, and the power cut lost it")
    return len(undone)


def durable_steps(entries: list[dict[str, Any]]) -> set[Path]:
    """Return the steps that were published, flushed with their names, and not removed: a cut must not lose them.

    The directories above them are new too, so they last only if the names of these are flushed.
    """
    flushed: dict[Path, set[str]] = {}
    durable: set[Path] = set()
    for entry in entries:
        path = Path(entry["path"])
        if entry["event"] == "os.rename" and re.search(r"/(?:snapshots|block_means|states)/\d+$", entry["path"]):
            flushed[path] = set()
        elif entry["event"] == "fsync":
            for step, names in flushed.items():
                names.add(entry["path"])
                if {str(step), str(step.parent)} <= names:
                    durable.add(step)
        elif entry["event"] == "os.remove" and path.name == "commit_success.txt":
            durable.discard(path.parent)
            flushed.pop(path.parent, None)
    return durable


def lost_operations(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the operations that no later flush made durable, in their order; of a written file, with its flushed size.

    A name is durable if its directory is flushed later. (File systems of Linux also make the name of a file durable
    when the file is flushed, but POSIX does not promise it.) Each operation gets its index, and the later renamings.
    """
    lost = []
    for index, entry in enumerate(entries):
        if entry["event"] == "fsync":
            continue
        # What a file held before it was opened is lost only if the entries of its earlier writes are.
        path, flushed_size, renames = entry["path"], entry.get("size", 0), []
        unflushed = {Path(path).parent for path in (entry["path"], entry.get("source", entry["path"]))}
        for later_index, later in enumerate(entries[index + 1 :], start=index + 1):
            if later["event"] == "os.rename":
                renames.append((later_index, later))
                path = moved(path, later)
                unflushed = {Path(moved(str(folder), later)) for folder in unflushed}
            elif later["event"] == "fsync":
                unflushed.discard(Path(later["path"]))
                flushed_size = later["size"] if later["path"] == path else flushed_size
        is_name_durable = not unflushed or entry.get("existed", False)
        if entry["event"] == "open" or not is_name_durable:
            found = {"index": index, "renames": renames, "flushed": flushed_size, "is_name_durable": is_name_durable}
            lost.append(entry | found)
    return lost


def moved(path: str, rename: dict[str, Any]) -> str:
    """Return where a path is after a file or directory was renamed."""
    if path == rename["source"] or path.startswith(f"{rename['source']}/"):
        return rename["path"] + path.removeprefix(rename["source"])
    return path


def undo(entry: dict[str, Any], path: Path) -> bool:
    """Undo one operation on what is at `path` now, if that is still possible; return whether anything changed."""
    if entry["event"] == "open":
        if not path.is_file():
            return False
        if not entry["is_name_durable"]:
            path.unlink()
            return True
        is_lost = path.stat().st_size > entry["flushed"]
        if is_lost:
            os.truncate(path, entry["flushed"])
        return is_lost
    if entry["event"] == "os.mkdir" and path.is_dir():
        shutil.rmtree(path)
        return True
    if entry["event"] == "os.rmdir" and path.parent.is_dir() and not path.exists():
        path.mkdir()
        return True
    if entry["event"] == "os.remove":
        return restore_copy(entry, path)
    source = Path(entry.get("source", path))
    if entry["event"] == "os.rename" and path.exists() and source.parent.is_dir() and not source.exists():
        path.rename(source)
        restore_copy(entry, path)
        return True
    return False


def restore_copy(entry: dict[str, Any], path: Path) -> bool:
    """Restore the file that an operation removed or replaced."""
    if "copy" not in entry or not path.parent.is_dir() or path.exists():
        return False
    shutil.copyfile(entry["copy"], path)
    return True


def main(arguments: list[str] | None = None) -> int:
    """Cut the power in the training cells and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; removed at the end (default: a temporary folder)")
    parser.add_argument("--package", type=Path, default=Path(__file__).parents[2], help="repository to test")
    options = parser.parse_args(arguments)
    root = Path(options.folder or tempfile.mkdtemp(prefix="pma-power-")).resolve()
    rng, undone, failures = random.Random(options.seed), [], []
    try:
        bench = Bench(root, forked.preload(options.package), rng, journals=True)
        bench.after_kill = lambda folder: undone.append(apply_loss(bench.journal(folder), rng))
        bench.make_references()
        for cell, share in (("train", 0.75), ("fork", 0.25)):
            try:
                run_cells.CELLS[cell][0](bench, cell, round(options.cuts * share))
            except Lost as error:
                failures.append(f"{cell}: {error}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for failure in failures:
        print(f"LOST: {failure}", file=sys.stderr)
    print(
        f"{len(undone)} cuts in {len(bench.kills)} phases, {sum(undone)} operations undone "
        f"({sum(map(bool, undone))} cuts undid some), {len(failures)} cells failed"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
