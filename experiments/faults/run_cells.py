"""Cells of kills.py for verbs that train: many kills in one run, which ends with the same records and files."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
from bench import (
    FORK_TOKENS,
    KEPT,
    OFTEN,
    Bench,
    Lost,
    cell_kills,
    check,
    choose_kill,
    kill_once,
    leftovers,
    options,
    published,
    read_lines,
)
from forked import Kill, Outcome


def check_published(
    run: Path, reference: dict[str, Any], records: list[dict[str, Any]], end: bool, skip_corrupt: bool = False
) -> None:
    """Compare what a run has published, and its records, with those of the uninterrupted run."""
    for name, metadata in published(run, skip_corrupt).items():
        check(metadata == reference.get(name), f"{run.name}/{name} differs: {metadata} != {reference.get(name)}")
    actual = read_lines(run / "metrics.jsonl")
    expected = records if end else records[: len(actual)]
    for one, other in zip(actual, expected, strict=True):
        check(one == other, f"record differs: {one} != {other}")


def kill_run(
    bench: Bench, cell: str, command: Callable[[Path], list[object]], full: Path, kept: Path, kills: int
) -> None:
    """Kill runs of `command` until `kills` are reached; finish each and compare it."""
    reference, records = published(full), read_lines(kept / "metrics.jsonl")
    measured = bench.finish(command(bench.root / f"{cell}-measured" / "run"), bench.root / f"{cell}-measured")
    number = 0
    while (done := cell_kills(bench, cell)) < kills:
        root, number = bench.root / f"{cell}-{number}", number + 1
        run = root / "run"
        history = []
        try:
            for _ in range(min(bench.rng.randint(3, 8), kills - done)):
                kill = choose_kill(bench, cell, measured.phases, measured.seconds)
                history.append(kill)
                outcome = kill_once(bench, cell, command(run), root, kill)
                check_published(run, reference, records, outcome.status == 0, skip_corrupt=bench.journals)
                if outcome.status == 0:
                    break
            finish_and_compare(bench, command(run), run, reference, records, kept)
        except Lost as error:
            raise Lost(f"{cell}, after {history}: {error}") from None
        shutil.rmtree(root)


def finish_and_compare(
    bench: Bench, command: list[object], run: Path, reference: dict[str, Any], records: list[Any], kept: Path
) -> None:
    """Run the command to its end and compare everything with the uninterrupted run."""
    outcome = bench.finish(command, run.parent)
    check_published(run, reference, records, end=True)
    steps = sorted(published(kept))
    check(sorted(published(run)) == steps, f"kept: {sorted(published(run))} != {steps}", outcome.output)
    left = leftovers(run)
    check(left == [] or bench.journals, f"left over: {left}", outcome.output)
    bench.finish(["inspect", run, "--verify"], run.parent)


def kill_train(bench: Bench, cell: str, kills: int) -> None:
    """Kill `pma train`."""
    kill_run(bench, cell, bench.train, bench.full, bench.kept, kills)


def kill_fork(bench: Bench, cell: str, kills: int) -> None:
    """Kill `pma fork` with other weights, retention and previews."""
    weights = bench.full / "snapshots" / "8"

    def command(run: Path, **keys: Any) -> list[object]:
        options_ = options(OFTEN | KEPT | {"schedule.peak_rate": 5e-3} | keys)
        return ["fork", bench.full, "--at-tokens", FORK_TOKENS, "--workdir", run, "--weights", weights, *options_]

    full, kept = bench.root / "fork-full" / "run", bench.root / "fork-kept" / "run"
    bench.finish(command(full, **{"checkpoint.keep_windows": 0, "checkpoint.keep_states": 1000}), full.parent)
    bench.finish(command(kept), kept.parent)
    kill_run(bench, cell, command, full, kept, kills)


def kill_two_processes(bench: Bench, cell: str, kills: int) -> None:
    """Kill one or both of the two processes that train a run."""

    def start(run: Path, kill: list[Kill | None]) -> list[Outcome]:
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{port.getsockname()[1]}"
        command = [*bench.train(run), "--distributed", "--heartbeat-seconds", 10]
        environments = [
            {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
            for index in (0, 1)
        ]
        children = [
            forked.start(bench.main, command, run.parent, one, environment)
            for one, environment in zip(kill, environments, strict=True)
        ]
        return [forked.finish(child, one) for child, one in zip(children, kill, strict=True)]

    def finish(run: Path) -> list[Outcome]:
        outcomes = start(run, [None, None])
        check(
            {o.status for o in outcomes} == {0}, f"{cell}: {outcomes[0].status}", "\n".join(o.output for o in outcomes)
        )
        return outcomes

    kept = bench.root / "two-kept" / "run"
    measured = finish(kept)
    reference, records, number = published(kept), read_lines(kept / "metrics.jsonl"), 0
    while cell_kills(bench, cell) < kills:
        root, number = bench.root / f"two-{number}", number + 1
        for _ in range(3):
            index = bench.rng.randrange(2)
            kill = choose_kill(bench, cell, measured[index].phases, measured[index].seconds)
            outcomes = start(root / "run", [kill if index == i or kill.seconds else None for i in (0, 1)])
            statuses = [o.status for o in outcomes]
            check(statuses == [0, 0] or -9 in statuses, f"{cell}: {statuses}, {kill}", outcomes[0].output)
            check(not any("it hung" in o.output for o in outcomes), f"{cell}: hangs, {kill}", outcomes[0].output)
            bench.kills[cell, kill.name] += -9 in statuses
        finish(root / "run")
        check(read_lines(root / "run" / "metrics.jsonl") == records, f"{cell}: records differ")
        check(published(root / "run") == reference, f"{cell}: published steps differ")
        check(leftovers(root / "run") == [], f"{cell}: left over: {leftovers(root / 'run')}")
        shutil.rmtree(root)


CELLS = {"train": (kill_train, 30), "fork": (kill_fork, 14), "two processes": (kill_two_processes, 5)}
