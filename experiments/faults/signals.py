"""Send SIGTERM and SIGINT to every verb at random moments of its first seconds, and check how it ends.

    python experiments/faults/signals.py --count 200 --seed 0

A command must end with 143 or 130 and one line, or have ended with its own status; what it leaves must be complete or
absent, and after it the same command must end as if nothing had happened. A signal before the first line of `main` has
Python's own effect: the harness knows from a pipe when `main` begins. Exit status 1 if a case fails.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

SIGNALS = (signal.SIGTERM, signal.SIGINT)
VERBS = ("train", "fork", "merge", "sweep", "watch", "evaluate", "report", "inspect", "export", "import")
BATCH = 256  # tokens
MAX_DELAY_SECONDS = 5.0
MARGIN_SECONDS = 0.03  # between the byte in the pipe and the handlers, also on a busy machine
CODE = "import os, sys; from pma_jax.cli import main; os.write(int(sys.argv.pop(1)), b'1'); sys.exit(main())"
CONFIG = """
from pma_jax import config
def get_config():
    c = config.defaults()
    c.data.source, c.data.files, c.data.held_out_percent = "files", ({corpus!r},), 25.0
    c.data.cache_dir = {cache!r}
    c.model.width, c.model.layers, c.model.heads, c.model.kv_heads = 16, 2, 2, 2
    c.model.head_dim, c.model.hidden = 8, 32
    c.schedule.peak_rate, c.schedule.warmup_tokens = 1e-2, 1024
    c.training.total_tokens, c.training.sequence_length_tokens, c.training.batch_size_sequences = 10240, 32, 8
    c.training.log_interval_tokens = 256
    c.checkpoint.interval_tokens, c.checkpoint.window, c.checkpoint.state_interval_tokens = 1024, 3, 2048
    c.checkpoint.keep_states = 5
    c.evaluation.tokens, c.evaluation.batch_size_sequences = 500, 8
    c.preview.windows = (2, 3)
    return c
"""


class Case(NamedTuple):
    """One command and the signals that it gets: (delay since the start in seconds, number)."""

    number: int
    verb: str
    signals: tuple[tuple[float, int], ...]


class Ended(NamedTuple):
    """How a command ended. `sent` holds the signals that it got, `is_python` says that the first came before `main`."""

    status: int
    out: str
    error: str
    sent: list[int]
    is_python: bool


class Workspace:
    """A corpus, a finished run, a merge, an exported model, and what each verb leaves if nothing disturbs it."""

    def __init__(self, folder: Path, package: Path):
        self.folder, self.package = folder, package
        self.seconds: dict[str, float] = {}
        rng = random.Random(0)
        (folder / "text").mkdir(parents=True)
        for i in range(240):
            words = " ".join(rng.choices(("ara", "bene", "corum", "dal", "emette"), k=50))
            (folder / "text" / f"{i:03d}.txt").write_text(f"{i} {words}.\n")
        text = CONFIG.format(corpus=str(folder / "text" / "*.txt"), cache=str(folder / "cache"))
        (folder / "config.py").write_text(text)
        self.run = folder / "run"
        self._prepare("train", folder)  # its workdir is `self.run`
        for verb in (*VERBS[1:-2], "export", "import"):
            self._prepare(verb, self.case_folder(f"reference-{verb}"))

    def _prepare(self, verb: str, folder: Path) -> None:
        self.run_undisturbed(verb, folder)  # fills the compilation cache
        if verb in ("train", "fork"):
            folder = self.case_folder(f"again-{verb}")
        else:
            shutil.rmtree(folder)
            folder = self.case_folder(folder.name)
        started = time.monotonic()
        self.run_undisturbed(verb, folder)
        self.seconds[verb] = time.monotonic() - started

    def case_folder(self, name: str) -> Path:
        """Make the folder of a case, with a copy of the run, which some verbs write to."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copytree(self.run, folder / "copy")
        return folder

    def run_undisturbed(self, verb: str, folder: Path) -> None:
        """Run a command to its end, and raise if it fails."""
        ended = self.run_case(Case(0, verb, ()), folder)
        if ended.status:
            raise SystemExit(f"cannot prepare {verb}: {ended.error}")

    def arguments(self, verb: str, folder: Path) -> list[str]:
        """Return the command line of a verb that writes to `folder`."""
        copy, out = folder / "copy", folder / "out"
        workdir = folder / "run" if verb == "train" else out
        words = {
            "train": ["--config", self.folder / "config.py", "--workdir", workdir],
            "fork": [self.run, "--at-tokens", "4096", "--workdir", workdir],
            "merge": [self.run, "--last", "3", "--out", out],
            "sweep": [copy, "--windows", "2,3", "--recipes", "sma,wma"],
            "watch": [copy, "--recipe", "wma", "--windows", "2,3"],
            "evaluate": [copy, self.run],
            "report": [copy],
            "inspect": [self.run, "--json"],
            "export": [self.run, "--out", out],
            "import": [self.folder / "reference-export" / "out", "--out", out],
        }[verb]
        return [verb, *map(str, words)]

    def run_case(self, case: Case, folder: Path) -> Ended:
        """Run a command and send it the signals of the case."""
        read_end, write_end = os.pipe()
        environment = os.environ | {
            "PYTHONPATH": str(self.package),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, "-c", CODE, str(write_end), *self.arguments(case.verb, folder)]
        with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as error:
            process = subprocess.Popen(
                command, stdout=out, stderr=error, env=environment, pass_fds=(write_end,), cwd=folder
            )
            os.close(write_end)
            started, sent, is_python = time.monotonic(), [], False
            for delay, number in case.signals:
                time.sleep(max(0.0, delay - MARGIN_SECONDS - (time.monotonic() - started)))
                has_begun = bool(select.select([read_end], [], [], 0)[0])
                time.sleep(MARGIN_SECONDS)
                if process.poll() is None:
                    is_python = is_python or not (has_begun or sent)
                    process.send_signal(number)
                    sent.append(number)
            try:
                status = process.wait(600)
            except subprocess.TimeoutExpired:
                process.kill()
                status = -9
            os.close(read_end)
            out.seek(0)
            error.seek(0)
            return Ended(status, out.read(), error.read(), sent, is_python)

    def check(self, case: Case) -> tuple[str, str]:
        """Run a case; return how it ended, and what is wrong with that ("" if nothing)."""
        folder = self.case_folder(f"case-{case.number}-{case.verb}")
        ended = self.run_case(case, folder)
        kind, problem = self._judge(case, ended)
        if not problem and case.verb in ("import", "export"):
            left = {path.name for path in folder.iterdir()} - {"copy", "stdout", "stderr", "out"}
            problem = f"left {left}" if left and not ended.is_python else ""
        problem = problem or self._compare(case, folder, is_complete=ended.status == 0)
        if not problem and ended.status in (130, 143) and case.verb in ("train", "fork", "merge", "export", "import"):
            again = self.run_case(Case(case.number, case.verb, ()), folder)
            problem = f"the same command failed: {again.error[-500:]}" if again.status else ""
            problem = problem or self._compare(case, folder, is_complete=True)
        if not problem:
            shutil.rmtree(folder)
        return kind, problem

    def _judge(self, case: Case, ended: Ended) -> tuple[str, str]:
        allowed = {128 + number for number in ended.sent} | {0}
        if ended.is_python:
            return "before main", "" if ended.status in {*allowed, 1, *(-n for n in ended.sent)} else str(ended)
        for text in ("Traceback", "Exception ignored", "Fatal", "terminate called", "Segmentation"):
            if text in ended.error:
                return "failed", f"status {ended.status}: {ended.error[-1500:]}"
        if ended.status not in allowed:
            return "failed", f"status {ended.status}: {ended.error[-500:]}"
        if ended.status == 0:
            return "had ended", "" if ended.out.strip() or case.verb == "watch" else "printed nothing"
        lines = ended.error.splitlines()
        if not lines or not lines[-1].startswith("stopped"):
            return "failed", f"the last line does not begin with 'stopped': {ended.error[-500:]}"
        return str(ended.status), ""

    def _compare(self, case: Case, folder: Path, is_complete: bool) -> str:
        """Compare what a command left with what it leaves undisturbed."""
        if case.verb in ("train", "fork"):
            workdir = folder / ("run" if case.verb == "train" else "out")
            reference = self.run if case.verb == "train" else self.folder / "reference-fork" / "out"
            return compare_runs(workdir, reference) if is_complete else ""
        if case.verb in ("merge", "export", "import"):
            out, reference = folder / "out", self.folder / f"reference-{case.verb}" / "out"
            if out.exists() or is_complete:
                return "" if contents(out) == contents(reference) else f"{out} differs from {reference}"
        for file in (folder / "copy").glob("*.json"):
            json.loads(file.read_text())
        return ""


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files that do not depend on paths or times."""
    files = (path for path in folder.rglob("*") if path.is_file())
    names = ("provenance.json", "_CHECKPOINT_METADATA", "generated.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name not in names}


def compare_runs(run: Path, reference: Path) -> str:
    """Compare the records and the digests of all snapshots and states of two runs."""
    for what in (records, digests):
        if what(run) != what(reference):
            return f"the {what.__name__} of {run} differ from those of {reference}"
    return ""


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without measured times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k not in ("tokens_per_second", "seconds")} for x in lines]


def digests(run: Path) -> dict[str, Any]:
    """Return the digests of the arrays of each snapshot and state."""
    files = sorted(run.glob("*/[0-9]*/_CHECKPOINT_METADATA"))
    return {str(f.parent.relative_to(run)): json.loads(f.read_text())["custom_metadata"]["leaves"] for f in files}


def make_cases(count: int, seed: int, verbs: list[str], seconds: dict[str, float]) -> list[Case]:
    """Spread cases over verbs, signals and moments; every fifth gets a second signal."""
    rng, cases = random.Random(seed), []
    cells = [(verb, number) for verb in verbs for number in SIGNALS]
    for i in range(count):
        verb, number = cells[i % len(cells)]
        rounds = -(-count // len(cells))
        share = (i // len(cells) + rng.random()) / rounds  # stratified over the time that the verb takes
        # Every third case may come later, when a run is training.
        delay = share * (1.05 * seconds[verb] if i % 3 == 2 else min(MAX_DELAY_SECONDS, 1.05 * seconds[verb]))
        signals = [(delay, number)]
        if i % 5 == 0:
            signals.append((delay + rng.random() * 0.5, rng.choice(SIGNALS)))
        cases.append(Case(i, verb, tuple(signals)))
    return cases


def main() -> None:
    """Run the cases, print counts per verb, signal and moment, and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of cases (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default 0)")
    parser.add_argument("--only", choices=VERBS, help="only this verb")
    parser.add_argument("--jobs", type=int, default=2, help="commands at the same time (default 2)")
    parser.add_argument("--package", type=Path, default=Path(__file__).parents[2], help="the checkout to test")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children inherit a signal that is ignored
    folder = Path(tempfile.mkdtemp(prefix="pma-signals-"))
    workspace = Workspace(folder, options.package.absolute())
    print("undisturbed, seconds:", {verb: round(taken, 1) for verb, taken in workspace.seconds.items()}, flush=True)
    verbs = [options.only] if options.only else list(VERBS)
    cases = make_cases(options.count, options.seed, verbs, workspace.seconds)
    counts: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for case, (kind, problem) in zip(cases, pool.map(workspace.check, cases), strict=True):
            names = "+".join(signal.Signals(number).name for _, number in case.signals)
            moment = f"{int(2 * case.signals[0][0]) / 2:.1f} s"
            counts[case.verb, names, moment, "FAILED" if problem else kind] += 1
            if problem:
                failed += 1
                print(f"FAILED {case}: {problem}", flush=True)
    for (verb, names, moment, kind), count in sorted(counts.items()):
        print(f"{verb:9} {names:16} from {moment}: {kind:12} {count}")
    totals = collections.Counter(kind for *_, kind in counts.elements())
    print(f"{len(cases)} cases: {dict(totals)}; {failed} failed")
    if not failed:
        shutil.rmtree(folder)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
