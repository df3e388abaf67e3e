"""Bad files, configurations and arguments: each ends in one line, in time and memory, with nothing written.

    python experiments/faults/bad_inputs.py --count 1200 --seed 0

Every file that a command reads is mutated (bytes, kind of file, each field of JSON), and every configuration key gets
bad values. The command runs in a child that is forked after the imports. A case fails if there is a traceback, more
than one line of error, another status than 0, 1 or 2, more than `--seconds` of time or `--memory` of memory, or if
files changed although the status is not 0. Cases are spread evenly over the cells (file x verb); `--only` restricts
them to cells whose name contains a text. Prints the counts of each cell, and exits with 1 if a case failed.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from inputs import Cell, make_cells, make_workspace  # pyrefly: ignore[missing-import]
from mutations import FILE_MUTATIONS, Mutation, json_mutations  # pyrefly: ignore[missing-import]

KEPT_AFTER_ERROR = (".lock", "lock", "__pycache__")  # an empty lock file says nothing


# From SIGTERM until a child is killed.
STOPPING_SECONDS = 15.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One bad input: a mutation of a file before a command, or a command with bad arguments."""

    cell: Cell
    field: str
    mutation: Mutation
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The cell, field and mutation as text."""
        return f"{self.cell.name} | {self.field} | {self.mutation.name}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    status: int
    seconds: float
    mebibytes: float
    error: str
    changed: tuple[str, ...]


def cases_of(cell: Cell, workspace: Path) -> Iterator[Case]:
    """Yield all cases of a cell."""
    if cell.bad_arguments:
        for field, words in cell.bad_arguments:
            yield Case(cell, field, Mutation(words[-1][:60], lambda path: None), tuple(words))
        return
    path = workspace / cell.file
    for mutation in FILE_MUTATIONS:
        yield Case(cell, "file", mutation)
    if cell.is_json:
        for field, mutation in json_mutations(path):
            yield Case(cell, field, mutation)


def run_case(case: Case, workspace: Path, scratch: Path, main: Callable, limits: argparse.Namespace) -> Outcome:
    """Copy the workspace, mutate the file, and run the command in a child."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(workspace, scratch, symlinks=True)
    if case.cell.file:
        case.mutation.apply(scratch / case.cell.file)
    before = fingerprints(scratch)
    log = scratch.with_suffix(".stderr")
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        run_child(main, [*case.cell.command, *case.arguments], scratch, log, limits)
    status, usage = wait(pid, began + limits.seconds)
    after = fingerprints(scratch)
    changed = tuple(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))
    return Outcome(status, time.monotonic() - began, usage.ru_maxrss / 1024, log.read_text(errors="replace"), changed)


def accepts_original(cell: Cell, workspace: Path, main: Callable, limits: argparse.Namespace) -> bool:
    """Return whether the command of a cell works without a mutation: otherwise its cases would say nothing."""
    case = Case(cell, "file", Mutation("none", lambda path: None))
    long = argparse.Namespace(seconds=limits.seconds * 6)  # programs are compiled here, for all cases
    return run_case(case, workspace, workspace.parent / "case", main, long).status == 0


def run_child(main: Callable, arguments: list[str], folder: Path, log: Path, limits: argparse.Namespace) -> None:
    """Run `pma` with limits in the folder of the case; never return."""
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(descriptor, 2)
        sys.argv = ["pma", *arguments]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = main(arguments) or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def wait(pid: int, deadline: float) -> tuple[int, resource.struct_rusage]:
    """Wait for a child; at the deadline send SIGTERM, and kill it and its children 15 s later.

    Returns:
        Its status (-9: killed; 143: a run that saves its state when it is stopped), and its usage.
    """
    is_told = False
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), usage
        if time.monotonic() > deadline + STOPPING_SECONDS:
            os.killpg(pid, signal.SIGKILL)
        elif time.monotonic() > deadline and not is_told:
            is_told = True
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.005)


def fingerprints(folder: Path) -> dict[str, str]:
    """Map each path below a folder to a digest of its content; pipes, devices and large files to their kind."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root, name)
            status = path.lstat()
            text = f"{status.st_mode}"
            if path.is_file() and not path.is_symlink():
                text += hashlib.sha256(path.read_bytes()).hexdigest() if status.st_size < 2**28 else str(status.st_size)
            if name not in KEPT_AFTER_ERROR and not name.endswith(".lock"):
                found[str(path.relative_to(folder))] = text
    return found


def problems(outcome: Outcome, limits: argparse.Namespace, own_mebibytes: float) -> list[str]:
    """List what is wrong with an outcome."""
    found = []
    error_lines = [line for line in outcome.error.splitlines() if line.startswith(("error:", "pma "))]
    if "Traceback" in outcome.error:
        found.append("traceback: " + outcome.error.strip().splitlines()[-1][:200])
    # A long horizon is a valid value: the run is in training until it is stopped.
    is_training = outcome.status == 143 and "stopped by SIGTERM: the state at step" in outcome.error
    if outcome.seconds > limits.seconds and not is_training:
        found.append(f"hung for {outcome.seconds:.0f} s")
    elif outcome.status not in (0, 1, 2) and not is_training:
        found.append(f"status {outcome.status}")
    if outcome.mebibytes - own_mebibytes > limits.memory:
        found.append(f"{outcome.mebibytes - own_mebibytes:.0f} MiB")
    if outcome.status in (1, 2):
        last = outcome.error.strip().splitlines()[-1:] or [""]
        if len(error_lines) != 1 or not last[0].startswith(("error:", "pma ")):
            found.append(f"{len(error_lines)} lines of error, the last one: {last[0][:150]!r}")
        elif len(last[0]) > 3000:
            found.append(f"an error of {len(last[0])} characters")
        if outcome.changed:
            found.append(f"changed {', '.join(outcome.changed[:4])}")
    return found


def choose(cells: list[Cell], workspace: Path, count: int, seed: int) -> list[Case]:
    """Choose `count` cases evenly over the cells, and over the mutations of each, in a random order."""
    rng = random.Random(seed)
    queues = []
    for cell in cells:
        by_field = collections.defaultdict(list)
        for case in cases_of(cell, workspace):
            by_field[case.field].append(case)
        for cases in by_field.values():
            rng.shuffle(cases)
        files, fields = by_field.pop("file", []), list(by_field.values())
        rng.shuffle(fields)
        one_per_field = [case for row in itertools.zip_longest(*fields) for case in row if case]
        mixed = [case for pair in itertools.zip_longest(files, one_per_field) for case in pair if case]
        queues.append(mixed)
    rows = itertools.zip_longest(*queues)
    return list(itertools.islice((case for row in rows for case in row if case), count))


def main() -> int:
    """Run the cases and print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of a case (default 20)")
    parser.add_argument("--memory", type=float, default=2048.0, help="memory limit of a case in MiB (default 2048)")
    parser.add_argument("--verbose", action="store_true", help="print every case with its status and error")
    parser.add_argument("--folder", type=Path, help="keep the workspace here, and use it again")
    parser.add_argument("--package", type=Path, default=Path(__file__).parents[2], help="the checkout to test")
    options = parser.parse_args()
    sys.path.insert(0, str(options.package.resolve()))
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # XLA logs a line for each program that it reads from the cache
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder.resolve() / "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        workspace = folder / "workspace"
        if not workspace.exists():
            make_workspace(workspace)
        return run_all([cell for cell in make_cells() if options.only in cell.name], workspace, options)


def run_all(cells: list[Cell], workspace: Path, options: argparse.Namespace) -> int:
    """Run the chosen cases; print each failure, and the counts of each cell."""
    from inputs import preload  # pyrefly: ignore[missing-import]

    pma = preload()
    own_mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    broken = [cell.name for cell in cells if not accepts_original(cell, workspace, pma, options)]
    if broken:
        print("FAILED: these commands fail on files that are right:", *broken, sep="\n  ")
        return 1
    counts: dict[str, collections.Counter] = {cell.name: collections.Counter() for cell in cells}
    for case in choose(cells, workspace, options.count, options.seed):
        outcome = run_case(case, workspace, workspace.parent / "case", pma, options)
        wrong = problems(outcome, options, own_mebibytes)
        if options.verbose:
            print(f"{outcome.status} {outcome.seconds:5.1f} s  {case.name}: {outcome.error.strip()[-200:]}", flush=True)
        counts[case.cell.name].update(["refused" if outcome.status in (1, 2) else "accepted"])
        if wrong:
            counts[case.cell.name].update(["failed"])
            print(f"FAILED {case.name}: {'; '.join(wrong)}", flush=True)
    total = collections.Counter()
    print(f"{'cell':60} refused accepted failed")
    for name, counter in counts.items():
        print(f"{name:60} {counter['refused']:7} {counter['accepted']:8} {counter['failed']:6}")
        total += counter
    print(
        f"{total['refused'] + total['accepted']} cases: {total['refused']} refused, {total['accepted']} accepted, "
        f"{total['failed']} failed: {'FAILED' if total['failed'] else 'passed'}"
    )
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
