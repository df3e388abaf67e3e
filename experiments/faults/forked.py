"""Run `pma` in children that are forked from a process that has imported everything, and kill them at chosen events.

A child costs only its command, not the imports. An event is an operation on a file below a root directory that Python
makes: opening for writing, renaming, removing, creating a directory, flushing (fsync). Its phase says what is done to
which part, such as `publish states`. Arrays are written by TensorStore, which Python does not see: kills at random
times fall into that.
"""

# The audit hook uses os.path, because pathlib is slower.
# ruff: noqa: PTH100, PTH110, PTH113, PTH115

import atexit
import dataclasses
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT_SECONDS = 240.0
POLL_SECONDS = 0.002
# The first expression that matches the path below the root names the part; \1 is inserted.
PARTS = (
    (r"(?:^|/)(snapshots|block_means|states)/[^/]*(?:orbax-checkpoint-tmp|\.copying)", r"unpublished \1"),
    (r"(?:^|/)(snapshots|block_means|states)/\d+/commit_success\.txt", r"marker of \1"),
    (r"(?:^|/)(snapshots|block_means|states)(?:/|$)", r"\1"),
    (r"(?:^|/)\.?(metrics\.jsonl|watch\.jsonl|run\.json|config\.json|sweep\.json|losses\.json|lock)", r"\1"),
    (r"(?:^|/)(spikes)/", r"\1"),
    (r"(?:^|/)\.?(report|sweep)\.[a-z]", r"\1"),
    (r"(?:^|/)(tensorboard|cache)(?:/|$)", r"\1"),
    (r"(?:^|/)[^/]*(journal|provenance)[^/]*$", r"\1"),
    (r"(?:^|/)(output)(?:/|$)", r"\1"),
    (r"(?:^|/)\.(output)[^/]*", r"unpublished \1"),
)
ACTIONS = {
    "open": "write",
    "os.rename": "publish",
    "os.remove": "remove",
    "os.rmdir": "remove",
    "os.mkdir": "make",
    "fsync": "flush",
}


@dataclasses.dataclass(frozen=True)
class Kill:
    """When to kill a child: before the `count`-th event of `phase`, or `seconds` after its start."""

    phase: str = ""
    count: int = 1
    seconds: float | None = None

    @property
    def name(self) -> str:
        """The phase, or `any time`."""
        return self.phase or "any time"


class Outcome(NamedTuple):
    """How a child ended."""

    status: int  # exit status; -9 if it was killed
    seconds: float
    phases: Counter  # number of events by phase; empty if the child was killed
    output: str  # standard output and error


def preload(repository: Path) -> Callable[[Sequence[str]], int]:
    """Import `pma_jax` from a repository, with all its modules, without starting a JAX backend; return its `main`."""
    sys.path.insert(0, str(repository.resolve()))
    for path in sorted((repository / "pma_jax").rglob("*.py")):
        parts = path.relative_to(repository).with_suffix("").parts
        if parts[-1] not in ("__init__", "__main__"):
            importlib.import_module(".".join(parts))
    importlib.import_module("ml_collections")
    return importlib.import_module("pma_jax.cli").main


def run(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[object],
    root: Path,
    kill: Kill | None = None,
    environment: Mapping[str, str] | None = None,
    journal: Path | None = None,
) -> Outcome:
    """Run `pma` with these arguments in a child, kill it if and when `kill` says so, and wait for its end."""
    return finish(start(main, arguments, root, kill, environment, journal), kill)


class Child(NamedTuple):
    """A child that was started."""

    pid: int
    began: float
    log: Path
    phases: Path


def start(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[object],
    root: Path,
    kill: Kill | None = None,
    environment: Mapping[str, str] | None = None,
    journal: Path | None = None,
) -> Child:
    """Start `pma` in a child. With `journal`, record the operations on files there (see `power_cuts.py`)."""
    number = time.monotonic_ns()
    scratch = root.parent / f"{root.name}.children"
    scratch.mkdir(exist_ok=True)
    log, phases = scratch / f"{number}.log", scratch / f"{number}.json"
    pid = os.fork()
    if pid == 0:
        _run_child(main, [str(a) for a in arguments], Recorder(root, kill, journal), environment or {}, log, phases)
    return Child(pid, time.monotonic(), log, phases)


def finish(child: Child, kill: Kill | None = None) -> Outcome:
    """Wait for a child, and kill it if `kill` says when, or after TIMEOUT_SECONDS."""
    deadline = child.began + TIMEOUT_SECONDS
    kill_time = child.began + kill.seconds if kill and kill.seconds is not None else deadline
    while True:
        pid, wait_status = os.waitpid(child.pid, os.WNOHANG)
        now = time.monotonic()
        if pid:
            break
        if now >= min(kill_time, deadline):
            os.kill(child.pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    hung = " (killed: it hung)" if now >= deadline else ""
    output = child.log.read_text(errors="replace") + hung
    phases = Counter(json.loads(child.phases.read_text())) if child.phases.exists() else Counter()
    child.log.unlink()
    child.phases.unlink(missing_ok=True)
    return Outcome(os.waitstatus_to_exitcode(wait_status), now - child.began, phases, output)


def _run_child(
    main: Callable[[Sequence[str]], int],
    arguments: list[str],
    recorder: "Recorder",
    environment: Mapping[str, str],
    log: Path,
    phases: Path,
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    sys.argv = ["pma", *arguments]
    recorder.install()
    status = 70
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        recorder.is_active = False
        phases.write_text(json.dumps(recorder.counts))
        os._exit(status)


class Recorder:
    """Counts the events of this process, kills it at one of them, and can record the operations in a journal."""

    def __init__(self, root: Path, kill: Kill | None, journal: Path | None):
        self.counts: Counter = Counter()
        self.is_active = True
        self._root, self._kill, self._journal = f"{root}/", kill, journal
        self._lock, self._inside = threading.RLock(), threading.local()

    def install(self) -> None:
        """Observe all later events of this process."""
        fsync = os.fsync

        def observed_fsync(fd: Any) -> None:
            self._handle("fsync", (os.readlink(f"/proc/self/fd/{fd}"), fd))
            fsync(fd)

        os.fsync = observed_fsync
        sys.addaudithook(lambda event, values: self._handle(event, values) if event in ACTIONS else None)

    def _handle(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.is_active or getattr(self._inside, "is_set", False):
            return
        if event == "open" and not _is_written(values):
            return
        path = values[1] if event == "os.rename" else values[0]
        if isinstance(path, int):
            return
        text = os.path.abspath(os.fsdecode(path))
        # The root itself is only flushed: its own name lasts.
        if not text.startswith(self._root) and (event != "fsync" or f"{text}/" != self._root):
            return
        self._inside.is_set = True
        try:
            with self._lock:
                phase = phase_of(event, text.removeprefix(self._root))
                self.counts[phase] += 1
                if self._kill and self._kill.phase == phase and self.counts[phase] == self._kill.count:
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(10)
                if self._journal:
                    self._record(event, text, values)
        finally:
            self._inside.is_set = False

    def _record(self, event: str, path: str, values: tuple[Any, ...]) -> None:
        """Append an operation to the journal, with a copy (a hard link) of the file that it removes or replaces."""
        assert self._journal is not None
        entry: dict[str, Any] = {"event": event, "path": path}
        if event == "os.rename":
            entry["source"] = os.path.abspath(os.fsdecode(values[0]))
        if event == "fsync":
            entry["size"] = os.fstat(values[1]).st_size
        if event in ("open", "os.mkdir"):  # mkdir of a directory that exists changes nothing
            entry["existed"] = os.path.exists(path)
        if event == "open":
            entry["size"] = 0 if _is_emptied(values) or not entry["existed"] else Path(path).stat().st_size
        if event in ("os.rename", "os.remove") and os.path.isfile(path):
            copy = f"{self._journal}.{time.monotonic_ns()}"
            os.link(path, copy)
            entry["copy"] = copy
        descriptor = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, (json.dumps(entry) + "\n").encode())
        os.close(descriptor)


def phase_of(event: str, path: str) -> str:
    """Name what an event does to which part; `path` is relative to the root."""
    for expression, part in PARTS:
        if match := re.search(expression, path):
            return f"{ACTIONS[event]} {match.expand(part)}"
    return f"{ACTIONS[event]} other"


def _is_emptied(values: tuple[Any, ...]) -> bool:
    """Return whether the `open` event empties its file."""
    _, mode, flags = values
    return "w" in mode if isinstance(mode, str) else bool(flags & os.O_TRUNC)


def _is_written(values: tuple[Any, ...]) -> bool:
    """Return whether the file of an `open` event, (path, mode, flags), is opened for writing."""
    _, mode, flags = values
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
