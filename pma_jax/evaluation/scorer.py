"""Score directories with a program of the user (`--score 'command {}'`).

The command is split as a shell would, but no shell runs it. The score is the last line with text of its standard
output: a number, or a JSON object, of which the numbers are taken. Does not import JAX.
"""

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pma_jax.config.errors import UserError
from pma_jax.runtime import signals
from pma_jax.storage.json_files import parse_untrusted_json

PLACEHOLDER = "{}"
DIRECTORY_VARIABLE = "PMA_MERGE_DIRECTORY"  # the directory, also for a command without the placeholder
SCORE = "score"  # the name of a score that is printed as a number alone
_READ_BYTES = 2**20  # read from the end of what a scorer prints
_SHOWN_CHARACTERS = 120
_TERMINATION_SECONDS = 5.0
_STOP_SECONDS = 1.0


@dataclass(frozen=True)
class Score:
    """What a scorer returned.

    Attributes:
        metrics: Name -> number, None if it is not finite; empty if it failed.
        failure: Why it failed, in one line; None if it did not.
        seconds: How long it ran.
    """

    metrics: dict[str, float | None]
    failure: str | None
    seconds: float


def parse_command(text: str) -> tuple[str, ...]:
    """Split a command into words, as a shell does, and find its program.

    Raises:
        UserError: The command is empty, a quotation is not closed, or there is no such program.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"--score {text!a} is no text in UTF-8, and could not be recorded: rename the file")
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--score {text!r} cannot be split into words ({error}): quote it as for a shell") from None
    if not words:
        raise UserError("--score is empty: give a command, such as 'python score.py {}'")
    if PLACEHOLDER not in words[0] and shutil.which(words[0]) is None:
        raise UserError(f"--score: there is no program {words[0]}: give its path, or a program that is in PATH")
    return words


class RunningScorers:
    """The process groups of the scorers that are running, so that they can be stopped together."""

    def __init__(self) -> None:
        self._groups: dict[int, None] = {}
        self._starting = 0
        self._is_stopped = False

    def score(self, words: Sequence[str], directory: Path, log: Path, timeout_seconds: float) -> Score:
        """Run a scorer on a directory, and return what it printed or why it failed.

        Args:
            words: The words of the command; `PLACEHOLDER` in them stands for the directory.
            directory: The directory to score, as an absolute path.
            log: The scorer's outputs are written to this path with the suffixes .out and .err.
            timeout_seconds: The scorer, with all processes of its group, is ended after this time.
        """
        began = time.perf_counter()
        outputs = [Path(f"{log}{suffix}") for suffix in (".out", ".err")]
        try:
            failure = self._run(
                [word.replace(PLACEHOLDER, str(directory)) for word in words], directory, outputs, timeout_seconds
            )
        except OSError as error:
            failure = f"the scorer cannot be started: {error.strerror or error}"
        seconds = time.perf_counter() - began
        if failure is None:
            metrics, failure = parse_output(last_line(outputs[0]))
            return Score(metrics, failure, seconds)
        error = last_line(outputs[1])
        return Score({}, failure + (f": {_shorten(error)}" if error else ""), seconds)

    def stop(self) -> None:
        """End all scorers with SIGTERM, after a second with SIGKILL, and start no other."""
        self._is_stopped = True
        deadline = time.monotonic() + _STOP_SECONDS
        while (self._groups or self._starting) and time.monotonic() < deadline:
            for group in list(self._groups):
                _signal_group(group, signal.SIGTERM)
            time.sleep(0.05)
        for group in list(self._groups):
            _signal_group(group, signal.SIGKILL)

    def _run(
        self, words: Sequence[str], directory: Path, outputs: Sequence[Path], timeout_seconds: float
    ) -> str | None:
        """Run a command to its end; return why it failed, or None."""
        if self._is_stopped:
            return "the sweep was stopped"
        self._starting += 1
        try:
            with outputs[0].open("wb") as out, outputs[1].open("wb") as err:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=os.environ | {DIRECTORY_VARIABLE: str(directory)},
                    start_new_session=True,
                )
            self._groups[process.pid] = None
        finally:
            self._starting -= 1
        try:
            if self._is_stopped:
                _signal_group(process.pid, signal.SIGKILL)
            try:
                status = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                _terminate(process)
                return f"the scorer did not end within {timeout_seconds:g} s (--score-timeout)"
            signals.wait_if_ending()  # a scorer that the end of this process has stopped did not fail
        finally:
            _signal_group(process.pid, signal.SIGKILL)  # what the scorer left running
            self._groups.pop(process.pid, None)
        if status < 0:
            return f"the scorer was killed by {_signal_name(-status)}"
        return f"the scorer ended with status {status}" if status else None


@contextlib.contextmanager
def running_scorers() -> Iterator[RunningScorers]:
    """Yield `RunningScorers` that are stopped at the end of the block, and if a signal ends the process within it."""
    scorers = RunningScorers()
    with signals.before_end(scorers.stop):
        try:
            yield scorers
        finally:
            scorers.stop()


def parse_output(line: str) -> tuple[dict[str, float | None], str | None]:
    """Return the numbers of the last line that a scorer printed, by name, or why there are none, in one line.

    A number that is not finite, or null, is None: its name stays, so that no other number takes its place as the score.
    """
    if not line:
        return {}, "the scorer printed nothing: it must print a number, or a JSON object with numbers, as its last line"
    shown = f"the scorer's last line is {_shorten(line)!r}"
    if line.startswith("{"):
        try:
            values = parse_untrusted_json(line.encode(errors="surrogateescape"), "", allow_nan=True)
        except (UserError, UnicodeError):
            return {}, f"{shown}, which is no valid JSON"
        numbers = {name: value for name, value in values.items() if value is None or type(value) in (int, float)}
    else:
        try:
            numbers = {} if "_" in line else {SCORE: float(line)}
        except ValueError:
            numbers = {}
    if not numbers:
        return {}, f"{shown}, which is neither a number nor a JSON object with numbers"
    metrics = {name: _finite(value) for name, value in numbers.items()}
    if all(value is None for value in metrics.values()):
        return {}, f"{shown}: the score is not finite"
    return metrics, None


def _finite(value: float | None) -> float | None:
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:  # an integer of more than 308 digits
        return None


def _terminate(process: subprocess.Popen) -> None:
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(_TERMINATION_SECONDS)
    except subprocess.TimeoutExpired:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(path: Path) -> str:
    """Return the last line with text of a file; empty if there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _READ_BYTES))
        lines = file.read().decode(errors="surrogateescape").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _shorten(line: str) -> str:
    line = json.dumps(line)[1:-1].replace('\\"', '"')  # control characters and what is no text, escaped
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
