"""What a run goes on from: its newest whole state. Damage is found before anything is trained, told, and set aside.

    RUN/damaged/<folder>-<step>      what was passed over; nothing reads it, delete it when you have seen it

A step is whole when its metadata carry their seal and every leaf has the digest that it was saved with. Steps that were
never published (a kill while one was written or removed) are cleared away: they were not there.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from etils import epath

from pma_jax.runs import snapshots, states, steps
from pma_jax.runs.directory import STEP_FOLDERS, Run
from pma_jax.runs.snapshots import Snapshot, kept_snapshots, read_snapshot
from pma_jax.runs.states import STATES, SavedState, kept_states, read_state
from pma_jax.runtime import hosts

DAMAGED = "damaged"
Say = Callable[[str], None]


def clear_away(run: Run, say: Say) -> None:
    """Remove what was never published, and set aside steps whose metadata are damaged; process 0 does."""
    if hosts.is_first():
        for name in STEP_FOLDERS:
            for path in steps.unpublished(run.path / name):
                path.rmtree()
            read = read_state if name == STATES else read_snapshot
            for path in steps.published(run.path / name):
                try:
                    read(path)
                except ValueError as error:
                    _set_aside(run, path, error, say)
    hosts.barrier("resuming.clear_away")


def finish_removing(run: Run) -> None:
    """Take away what a run killed at its horizon had still to remove; process 0 does. What is damaged is left."""
    if hosts.is_first():
        for name in STEP_FOLDERS:
            is_state = name == STATES
            read, rule = (read_state, kept_states) if is_state else (read_snapshot, kept_snapshots)
            found: list[SavedState | Snapshot] = []
            for path in steps.published(run.path / name):
                with contextlib.suppress(ValueError):
                    found.append(read(path))
            found.sort(key=lambda saved: saved.tokens)
            for saved, is_kept in zip(found, rule(run.config, [s.tokens for s in found]), strict=True):
                if not is_kept:
                    steps.remove(saved.path)
            for path in steps.unpublished(run.path / name):
                path.rmtree()
    hosts.barrier("resuming.finish_removing")


def newest_whole_state(run: Run, abstract: Any, say: Say) -> tuple[SavedState | None, Any]:
    """The newest state that is what was saved, and its arrays as `abstract` has them; (None, None) where none is there.

    Raises ValueError when there are states and all are damaged: to begin anew is not for us to decide.
    """
    passed: list[tuple[SavedState, ValueError]] = []
    for saved in run.resumable_states:
        try:
            state = states.restore_state(saved, abstract)
        except ValueError as error:
            passed.append((saved, error))
            continue
        hosts.barrier("resuming.newest_whole_state")  # no process still reads what is moved
        for damaged, why in passed:
            _set_aside(run, damaged.path, why, say)
        return saved, state
    lost = [p.name for p in (run.path / DAMAGED).iterdir()] if (run.path / DAMAGED).exists() else []
    if passed or "forked_from" in run.metadata or any(name.startswith(STATES) for name in lost):
        why = f" ({passed[0][1]})" if passed else ""
        raise ValueError(
            f"no state of {run.path} is whole{why}: bring one back to {run.path / STATES}, or remove the "
            "run to begin anew"
        )
    return None, None


def whole_snapshots(run: Run, kind: str, above_tokens: int, abstract: Any, say: Say) -> None:
    """Set aside the damaged snapshots above `above_tokens`: the run passes these marks again and saves them anew."""
    for snapshot in run.of_kind(kind):
        if snapshot.tokens > above_tokens:
            _read(run, snapshot, abstract, say)


def newest_unbroken(run: Run, snapshots: list[Snapshot], abstract: Any, say: Say) -> list[tuple[int, Any]]:
    """(tokens, parameters) of the newest snapshots, oldest first, back to a damaged one: no preview reaches over it."""
    found: list[tuple[int, Any]] = []
    for snapshot in reversed(snapshots):
        params = _read(run, snapshot, abstract, say)
        if params is None:
            break
        found.append((snapshot.tokens, params))
    return found[::-1]


def _read(run: Run, snapshot: Snapshot, abstract: Any, say: Say) -> Any:
    try:
        return snapshots.restore_params(snapshot, abstract)
    except ValueError as error:
        hosts.barrier("resuming.damaged_snapshot")
        _set_aside(run, snapshot.path, error, say)
        return None


def _set_aside(run: Run, path: epath.Path, why: ValueError, say: Say) -> None:
    """Move a damaged step out of the way, so that it is written anew; process 0 does."""
    say(f"passed over: {why}")
    if not hosts.is_first():
        return
    folder = run.path / DAMAGED
    folder.mkdir(exist_ok=True)
    name = f"{path.parent.name}-{path.name}"
    taken = {p.name for p in folder.iterdir()}
    number = next(n for n in range(len(taken) + 1) if f"{name}.{n}" not in taken)
    path.rename(folder / f"{name}.{number}")
