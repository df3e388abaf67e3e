"""Make system calls of every verb fail, and check what the verb does and that the same command then succeeds.

    python experiments/faults/system_calls.py [--count 210] [--seed 0] [--only VERB/CALL/ERROR]

Each case runs one verb of `pma` on a tiny run, in a process in which one call (open, read, write, rename, fsync, mmap
or unlink of a file below the case's folder, in Python or in a library, through `fail_system_calls.c`) fails with one
error, once or from then on. Required:

- The process ends within 20 s of the failure with one line `error: …` and status 1, or 75 after EMFILE; or the failure
  did no harm, and the status is 0.
- Nothing is set aside in `damaged/`.
- The same command without a failure succeeds. All digests of the arrays, records, losses and outputs are then those of
  an undisturbed command, and the arrays on the disk match their digests.

Prints the counts per verb, call and error, and a verdict; the exit status is 1 if a case failed. Needs a C compiler.
`--tree DIR` tests another checkout, with the interpreter of this one.
"""

import argparse
import collections
import errno
import hashlib
import itertools
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from failing_process import ALL, CALLS, LIMIT_SECONDS, Result, Workplace

ROOT = Path(__file__).parents[2]
ERRORS = ("ENOSPC", "EIO", "EMFILE", "EACCES", "ENOMEM")
_MAX_SECONDS_AFTER_FAILURE = 20
_CLOCK_KEYS = {"seconds", "tokens_per_second", "written", "command", "host", "created", "time", "bytes_read"}


class Case(NamedTuple):
    """One injected failure; `position` in [0, 1) chooses one of the calls that an undisturbed command makes."""

    verb: str
    call: str
    error: str
    position: float
    stays: bool

    @property
    def cell(self) -> str:
        """Verb, call and error."""
        return f"{self.verb}/{self.call}/{self.error}"


# Verb -> (command line, folders of the template that the verb needs). {} is the folder of the case.
VERBS: dict[str, list[str]] = {
    "train": ["train", "--config", "{}/config.py", "--workdir", "{}/new"],
    "resume": ["train", "--config", "{}/config.py", "--workdir", "{}/half"],
    "fork": ["fork", "{}/run", "--at-tokens", "512", "--workdir", "{}/forked", "--config.training.total_tokens=1024"],
    "merge": ["merge", "{}/run", "--last", "3", "--out", "{}/merged"],
    "sweep": ["sweep", "{}/run", "--recipes", "sma", "--windows", "2"],
    "watch": ["watch", "{}/run", "--windows", "2", "--once"],
    "evaluate": ["evaluate", "{}/run", "--json"],
    "inspect": ["inspect", "{}/run", "--verify"],
    "export": ["export", "{}/run", "--out", "{}/exported"],
    "import": ["import", "{}/model", "--out", "{}/imported"],
    "report": ["report", "{}/run"],
}


# --- What a command leaves, without what differs between two undisturbed commands -------------------------------------


def without_clocks(value: object) -> object:
    """Remove measurements of time from parsed JSON."""
    if isinstance(value, dict):
        return {key: without_clocks(item) for key, item in value.items() if key not in _CLOCK_KEYS}
    return [without_clocks(item) for item in value] if isinstance(value, list) else value


def contents(folder: Path) -> dict[str, object]:
    """Describe the results below a folder: digests of arrays, records, parsed JSON, and digests of other files."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or re.match(r"(text|cache)/", name) or path.name in ("lock", ".losses.lock", "report.html"):
            continue
        if path.name == "_CHECKPOINT_METADATA":
            custom = json.loads(path.read_text()).get("custom_metadata") or {}
            found[name] = {key: custom.get(key) for key in ("step", "tokens", "position", "loss", "leaves", "kind")}
        elif path.suffix == ".jsonl":
            found[name] = [without_clocks(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".json":
            found[name] = without_clocks(json.loads(path.read_text()))
        elif path.suffix in (".png", ".safetensors", ".txt"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def leftovers(folder: Path) -> list[str]:
    """List temporary files and directories that a completed command must not leave."""
    pattern = re.compile(r"\.(writing|tmp|partial.*|copying)$|orbax-checkpoint-tmp|^damaged$")
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if pattern.search(p.name) and "cache" not in p.parts]


class Undisturbed(NamedTuple):
    """An undisturbed command: how often it makes each call, what it leaves, and what it prints."""

    calls: dict[str, int]
    contents: dict[str, object]
    output: str


def record_undisturbed(work: Workplace, verb: str) -> Undisturbed:
    """Run a verb once, and count its calls."""
    work.reset(verb)
    work.arm(ALL)
    result = work.run(VERBS[verb])
    work.arm()
    assert result.status == 0, (verb, result)
    return Undisturbed(
        {call: result.seen[number] for call, number in CALLS.items()}, contents(work.case), result.output
    )


def check_case(work: Workplace, case: Case, expected: Undisturbed) -> tuple[str, str]:
    """Run a case; return ("failed as required", "no harm" or "not reached", "") or ("WRONG", what is wrong)."""
    number = CALLS[case.call]
    count = expected.calls[case.call]
    if not count:
        return "not reached", ""
    work.reset(case.verb)
    nth = 1 + int(case.position * count)
    work.arm(number, getattr(errno, case.error), nth, case.stays)
    result = work.run(VERBS[case.verb])
    work.arm()
    where = (
        f"call {nth} of {count}{' and later' if case.stays else ''}, {result.fired_path.replace(str(work.case), '')}"
    )
    problem = describe_problem(work, case, expected, result)
    if problem:
        return "WRONG", f"{problem} [{where}; status {result.status}: {result.errors.strip()[-600:]!r}]"
    if not result.fired:
        return "not reached", ""
    return ("no harm" if result.status == 0 else "failed as required"), ""


def describe_problem(work: Workplace, case: Case, expected: Undisturbed, result: Result) -> str:
    """Return what is wrong with a command in which a call failed, and with the same command afterwards; or ""."""
    errors = [line for line in result.errors.splitlines() if line.startswith("error: ")]
    if result.status == -99:
        return f"did not end within {LIMIT_SECONDS} s"
    if result.seconds > _MAX_SECONDS_AFTER_FAILURE + 20:
        return f"took {result.seconds:.0f} s"
    if result.status not in (0, 1, 75) or (result.status and len(errors) != 1) or "Traceback" in result.errors:
        return "is not one line with status 1 or 75"
    if result.status and (result.status == 75) != (case.error == "EMFILE"):
        return "has the wrong status"
    if any(work.case.rglob("damaged")) or "skipped: " in result.errors or "corrupt" in "".join(errors):
        return "takes whole data for damaged"
    names = ("out of memory", str(work.case), Path(result.fired_path).name)
    if result.status and not any(name in errors[0] for name in names):
        return "does not name the file"
    again = result
    if result.status:
        again = work.run(VERBS[case.verb])
        # A command that failed after it had published its output is refused afterwards: the output is compared below.
        is_published = case.verb in ("fork", "export", "import") and "exists already" in again.errors
        if (again.status != 0 and not is_published) or "skipped: " in again.errors:
            return f"the same command then ends with {again.status}: {again.errors.strip()[-300:]}"
    if again.output != expected.output and case.verb in ("evaluate", "inspect"):
        return f"another output: {again.output[-200:]!r}"
    if case.verb == "watch" and not expected.output.endswith(again.output):  # it prints what is not recorded yet
        return f"another output: {again.output[-200:]!r}"
    found = contents(work.case)
    if found != expected.contents:
        differing = [k for k in found.keys() | expected.contents.keys() if found.get(k) != expected.contents.get(k)]
        return f"other results: {', '.join(sorted(differing)[:5])}"
    if remaining := leftovers(work.case):
        return f"leaves {', '.join(remaining[:5])}"
    target = {"train": "new", "resume": "half", "fork": "forked", "merge": "merged"}.get(case.verb)
    if target:
        verified = work.run(["inspect", "{}/" + target, "--verify"])
        if verified.status:
            return f"fails verification: {verified.errors.strip()[-300:]}"
    return ""


def draw_cases(count: int, seed: int) -> Iterator[Case]:
    """Yield cases that cover every verb, call and error before they repeat a cell."""
    rng = random.Random(seed)
    cells = list(itertools.product(VERBS, CALLS, ERRORS))
    drawn: list[Case] = []
    while len(drawn) < count:
        rng.shuffle(cells)
        drawn += [Case(*cell, rng.random(), rng.random() < 0.4) for cell in cells]
    yield from drawn


def main() -> int:
    """Run the cases, print the counts, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=210, help="number of failures that are reached")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression that VERB/CALL/ERROR must match")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to test")
    options = parser.parse_args()
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    wrong, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pma-faults-") as folder:
        work, expected = Workplace(Path(folder), options.tree), {}
        reached = 0
        for case in draw_cases(options.count * 20, options.seed):
            if reached >= options.count or time.monotonic() - began > options.seconds:
                break
            if not re.search(options.only, case.cell):
                continue
            if case.verb not in expected:
                expected[case.verb] = record_undisturbed(work, case.verb)
            verdict, problem = check_case(work, case, expected[case.verb])
            if verdict == "not reached":
                continue
            reached += 1
            if not reached % 20:
                print(f"{reached} cases, {time.monotonic() - began:.0f} s, {len(wrong)} wrong", flush=True)
            for axis in (case.verb, f"{case.call:7} {case.error}"):
                counts[axis][verdict] += 1
            if problem:
                wrong.append(case)
                print(f"{case.cell} at {case.position:.4f}: {problem}", flush=True)
        work.close()
    print(f"\n{'':18}{'failed as required':>20}{'no harm':>10}{'WRONG':>8}")
    for axis, counter in sorted(counts.items(), key=lambda item: (item[0] not in VERBS, item[0])):
        print(f"{axis:18}{counter['failed as required']:>20}{counter['no harm']:>10}{counter['WRONG']:>8}")
    seconds = time.monotonic() - began
    print(f"\n{reached} failures injected in {seconds:.0f} s (seed {options.seed}): {len(wrong)} wrong")
    return int(bool(wrong) or not reached)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
