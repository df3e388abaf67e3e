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
import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CALLS = {"open": 1, "read": 2, "write": 3, "rename": 4, "fsync": 5, "mmap": 6, "unlink": 7}
ERRORS = ("ENOSPC", "EIO", "EMFILE", "EACCES", "ENOMEM")
_CONTROL = struct.Struct("iiiil8ll512s512s")
_ALL = -1
_LIMIT_SECONDS, _MAX_SECONDS_AFTER_FAILURE = 100, 20
_CLOCK_KEYS = {"seconds", "tokens_per_second", "written", "command", "host", "created", "time", "bytes_read"}

CONFIG = """
import json
from pma_jax import config

def get_config():
    c = config.defaults()
    c.update(json.loads({keys!r}))
    return c
"""


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


class Result(NamedTuple):
    """How a process ended."""

    status: int
    output: str
    errors: str
    seen: Sequence[int]  # number of matching calls, indexed by CALLS
    fired: int
    fired_path: str
    seconds: float


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


class Workplace:
    """A template of the files that verbs need, and a server process that has imported the libraries.

    The server forks one child per command, which saves the seconds that importing takes.
    """

    def __init__(self, folder: Path, tree: Path):
        self.folder, self.template, self.tree = folder, folder / "template", tree
        self.control = folder / "control"
        self.case = folder / "case"
        library = folder / "libfail.so"
        source = Path(__file__).with_name("fail_system_calls.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.arm()
        environment = os.environ | {
            "LD_PRELOAD": str(library),
            "FAIL_CONTROL": str(self.control),
            "PYTHONPATH": str(tree),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONWARNINGS": "ignore",
        }
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tree,
        )
        self._prepare()

    def _prepare(self) -> None:
        self.template.mkdir()
        text = self.template / "text"
        text.mkdir()
        rng = random.Random(0)
        for i in range(120):
            (text / f"{i:04d}.txt").write_text(
                f"{i} " + " ".join(rng.choices(["aria", "benio", "corum", "dalette", "ema"], k=40))
            )
        keys = {
            "data": {
                "source": "files",
                "files": [f"{self.case}/text/*.txt"],
                "held_out_percent": 25.0,
                "cache_dir": f"{self.case}/cache",
            },
            "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "hidden": 32},
            "schedule": {"peak_rate": 1e-2, "warmup_tokens": 256},
            "training": {
                "total_tokens": 1024,
                "sequence_length_tokens": 16,
                "batch_size_sequences": 8,
                "log_interval_tokens": 128,
            },
            "checkpoint": {
                "interval_tokens": 256,
                "window": 2,
                "keep_windows": 0,
                "state_interval_tokens": 512,
                "keep_states": 2,
            },
            "evaluation": {"tokens": 256, "batch_size_sequences": 8},
            "preview": {"windows": [2]},
        }
        (self.template / "config.py").write_text(CONFIG.format(keys=json.dumps(keys)))
        # Paths are recorded, so the template is made where the cases run.
        self.template.rename(self.case)
        run = ["train", "--config", "{}/config.py", "--workdir", "{}/run"]
        self._check(run)
        self._check(["export", "{}/run", "--out", "{}/model"])
        shutil.copytree(self.case / "run", self.case / "half")
        for name in ("states/8", "snapshots/8"):
            shutil.rmtree(self.case / "half" / name)
        self.case.rename(self.template)

    def _check(self, words: list[str]) -> None:
        result = self.run(words)
        assert result.status == 0, (words, result.status, result.errors[-3000:])

    def close(self) -> None:
        """End the server."""
        self.server.communicate()

    def reset(self, verb: str) -> None:
        """Make a new folder for a case of `verb`."""
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(self.template, self.case)
        if verb == "train":
            shutil.rmtree(self.case / "cache")

    def arm(self, kind: int = 0, error: int = 0, nth: int = 0, stays: bool = False) -> None:
        """Choose the calls to count and the one to fail."""
        path = str(self.case) if kind else ""
        packed = _CONTROL.pack(kind, error, stays, 0, nth, *[0] * 9, path.encode(), b"")
        with contextlib.suppress(FileExistsError):
            self.control.touch(exist_ok=False)
        with self.control.open("r+b") as file:
            file.write(packed)

    def run(self, words: list[str]) -> Result:
        """Run a command in a child of the server."""
        out, err = self.folder / "out", self.folder / "err"
        words = [word.replace("{}", str(self.case)) for word in words]
        began = time.monotonic()
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(json.dumps([words, str(out), str(err), _LIMIT_SECONDS]) + "\n")
        self.server.stdin.flush()
        status = json.loads(self.server.stdout.readline())
        fields = _CONTROL.unpack(self.control.read_bytes()[: _CONTROL.size])
        fired_path = fields[15].rstrip(b"\0").decode(errors="replace")
        seconds = time.monotonic() - began
        return Result(status, out.read_text(), err.read_text(), fields[5:13], fields[13], fired_path, seconds)


SERVER = """
import json, os, signal, sys, time
import jax, tensorstore, numpy, optax, grain
from pma_jax.cli import main
from pma_jax.training import loop
gone = False
for line in sys.stdin:
    words, out, err, limit = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        sys.stdin = open(os.devnull)
        sys.argv = ["pma", *words]
        sys.exit(main())
    end, status = time.monotonic() + limit, None
    while status is None:
        pid, raw = os.waitpid(child, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(raw)
        elif time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = -99
        else:
            time.sleep(0.01)
    print(json.dumps(status), flush=True)
"""


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
    work.arm(_ALL)
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
        return f"did not end within {_LIMIT_SECONDS} s"
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
