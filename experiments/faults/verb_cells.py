"""Cells of kills.py for verbs that write one result: it is complete or absent, and equal after the second command."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import Bench, cell_kills, check, choose_kill, contents, kill_once, read_lines

SWEEP_CLOCK = ("seconds", "passes")


def link_run(bench: Bench, root: Path) -> Path:
    """Return a copy of the complete run whose files are hard links; no command changes a file in place."""
    run = root / "run"
    shutil.copytree(bench.full, run, copy_function=os.link, ignore=shutil.ignore_patterns("lock", "sweep*", "report*"))
    return run


def kill_writer(
    bench: Bench,
    cell: str,
    kills: int,
    prepare: Callable[[Path], list[object]],
    read: Callable[[Path], Any],
    is_allowed: Callable[[Any, Any], bool],
) -> None:
    """Kill a command, compare what it left with what it makes, run it again, and compare the result.

    Args:
        bench: The workspace.
        cell: Name of the cell.
        kills: Number of kills.
        prepare: Makes what the command needs in a folder, and returns the command.
        read: Reads the result in the folder; None if it is absent.
        is_allowed: Whether a command that was killed may leave (first argument) instead of the result (second).
    """
    root = bench.root / f"{cell}-measured"
    root.mkdir()
    measured = bench.finish(prepare(root), root)
    result = read(root)
    check(result, f"{cell}: no result")
    number = 0
    while cell_kills(bench, cell) < kills:
        root, number = bench.root / f"{cell}-{number}", number + 1
        root.mkdir()
        command = prepare(root)
        for _ in range(bench.rng.choice([1, 1, 2])):
            kill = choose_kill(bench, cell, measured.phases, measured.seconds)
            outcome = kill_once(bench, cell, command, root, kill)
            left = read(root)
            check(left == result or is_allowed(left, result), f"{cell}: half a result after {kill}: {str(left)[:500]}")
            if left == result:
                break
        outcome = bench.run(command, root)
        # A command that was killed after it had published its result made it.
        is_done = outcome.status == 0 or (left == result and "exists already" in outcome.output)
        check(is_done, f"{cell}: status {outcome.status} after {kill}", outcome.output)
        check(read(root) == result, f"{cell}: after {kill} the result differs: {str(read(root))[:500]}")
        hidden = [p.name for p in root.iterdir() if p.name.startswith(".")]
        check(hidden == [], f"{cell}: left over after {kill}: {hidden}")
        shutil.rmtree(root)


def read_output(root: Path) -> dict[str, bytes] | None:
    """Read the published output of a merge, an export or an import."""
    if not (root / "output").exists():
        return None
    return {name: data.replace(str(root).encode(), b"") for name, data in contents(root / "output").items()}


def read_json(path: Path, without: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Read a file of JSON without these keys."""
    return {k: v for k, v in json.loads(path.read_text()).items() if k not in without} if path.exists() else None


def is_absent(left: Any, result: Any) -> bool:
    """Allow nothing."""
    del result
    return not left


def kill_merge(bench: Bench, cell: str, kills: int) -> None:
    """Kill `pma merge`."""

    def command(root: Path) -> list[object]:
        return ["merge", bench.full, "--last", 6, "--recipe", "wma", "--out", root / "output"]

    kill_writer(bench, cell, kills, command, read_output, is_absent)


def kill_sweep(bench: Bench, cell: str, kills: int) -> None:
    """Kill `pma sweep`."""

    def command(root: Path) -> list[object]:
        return ["sweep", link_run(bench, root), "--recipes", "sma,wma", "--windows", "2,3", "--intervals", "1,2"]

    kill_writer(bench, cell, kills, command, lambda r: read_json(r / "run" / "sweep.json", SWEEP_CLOCK), is_absent)


def kill_watch(bench: Bench, cell: str, kills: int) -> None:
    """Kill `pma watch`: what is left is the first lines of watch.jsonl."""

    def command(root: Path) -> list[object]:
        return ["watch", link_run(bench, root), "--windows", "2,4", "--once"]

    def read(root: Path) -> list[dict[str, Any]]:
        return read_lines(root / "run" / "watch.jsonl")

    kill_writer(bench, cell, kills, command, read, lambda left, result: left == result[: len(left)])


def kill_report(bench: Bench, cell: str, kills: int) -> None:
    """Kill `pma report`: each file is complete or absent."""

    def command(root: Path) -> list[object]:
        return ["report", link_run(bench, root)]

    def read(root: Path) -> dict[str, Any]:
        files = {p.name: p.read_bytes() for p in sorted((root / "run").glob("report.*"))}
        text = str(root).encode()
        return {name: data.replace(text, b"") for name, data in files.items() if not name.endswith(".png")}

    kill_writer(bench, cell, kills, command, read, lambda left, result: left.items() <= result.items())


def kill_export(bench: Bench, cell: str, kills: int) -> None:
    """Kill `pma export`."""

    def command(root: Path) -> list[object]:
        return ["export", bench.full / "snapshots" / "8", "--out", root / "output"]

    kill_writer(bench, cell, kills, command, read_output, is_absent)


def kill_import(bench: Bench, cell: str, kills: int) -> None:
    """Kill `pma import`."""
    model = bench.root / "model"
    if not model.exists():
        bench.finish(["export", bench.full / "snapshots" / "8", "--out", model], bench.root)

    def command(root: Path) -> list[object]:
        return ["import", model, "--out", root / "output"]

    kill_writer(bench, cell, kills, command, read_output, is_absent)


def kill_preparation(bench: Bench, cell: str, kills: int) -> None:
    """Kill the preparation of the tokens, at the start of a run of one step."""

    def command(root: Path) -> list[object]:
        short = {"data.cache_dir": root / "cache", "training.total_tokens": 256}
        return bench.train(root / "run", **short)

    def read(root: Path) -> dict[str, bytes]:
        caches = [p for p in (root / "cache").glob("*") if p.is_dir() and not p.name.startswith(".")]
        return {
            name: data for path in caches if not path.name.endswith(".tmp") for name, data in contents(path).items()
        }

    kill_writer(bench, cell, kills, command, read, is_absent)


CELLS = {
    "merge": (kill_merge, 12),
    "sweep": (kill_sweep, 8),
    "watch": (kill_watch, 8),
    "report": (kill_report, 8),
    "export": (kill_export, 8),
    "import": (kill_import, 8),
    "prepare": (kill_preparation, 8),
}
