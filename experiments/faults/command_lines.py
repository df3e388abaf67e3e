"""Call `pma` wrongly, in every verb, with every option and every kind of mistake.

    python experiments/faults/command_lines.py

Each command line must end with status 1 or 2 and one line on standard error, within 20 s, and must write nothing. They
are run in this process, one after the other. Prints counts per verb and kind. Exit status 1 if a case fails.
"""

import argparse
import collections
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from command_workspace import LONG, NOT_PATHS, TookTooLong, Workspace, call

LIMIT_SECONDS = 60  # the first name of a task takes 10 s of processor time: lm-eval lists its tasks
LAUNCHED = ("--", "train", "--config", "demo", "--workdir", "gs://bucket/run")  # what `pma launch` runs
# Options that take any name, or, of `grid`, any new directory.
FREE_TEXTS = ("root", "image", "name", "queue", "namespace", "service_account", "gpu_type")
NOT_NUMBERS = (
    "",
    "x y",
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e999999999",
    "9" * 5000 + "x",
    "\udcff",
    "1\n2",
    "²",
    "0x",
    "\0",
)
OVERRIDES = ("", "=", "a", "a=1", "a.b=1", ".=1", "training=1", "training.=1", "training.seed", "training.seed=",
             "training.seed=x", "training.seed=1.5", "training.seed=1=2", "training.sead=1", "training.total_tokens=-1",
             "training.total_tokens=1e400", "model.width=\0", "data.source=\udcff", "mesh.cpu_devices=100000",
             "training.seed=" + "9" * 5000, "model.layers=" + "(" * 5000)  # fmt: skip


class Case(NamedTuple):
    """A wrong command line, the verb, and the kind of mistake."""

    verb: str
    kind: str
    words: list[str]


def actions_of(package_parser: Any) -> dict[str, list[argparse.Action]]:
    """Return the options and arguments of each verb."""
    subparsers = next(a for a in package_parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name: list(verb._actions) for name, verb in subparsers.choices.items()}


def make_cases(workspace: Workspace, actions: dict[str, list[argparse.Action]]) -> Iterator[Case]:
    """Yield the wrong command lines."""
    yield from random_words()
    yield from of_scores(workspace)
    for verb in actions:
        for case in of_verb(workspace, verb, actions[verb]):
            yield case._replace(words=[*case.words, *(LAUNCHED if verb == "launch" else ())])


def of_verb(workspace: Workspace, verb: str, actions: list[argparse.Action]) -> Iterator[Case]:
    """Yield the mistakes with one verb."""
    valid = workspace.valid(verb)
    yield Case(verb, "unknown option", [*valid, "--nonsense"])
    yield Case(verb, "unknown option", [*valid, "--nonsense=\udcff\n"])
    yield Case(verb, "missing arguments", [verb])
    for override in OVERRIDES:
        yield Case(verb, "override", [*valid, f"--config.{override}"])
    for action in actions:
        if action.dest not in FREE_TEXTS:
            yield from of_action(workspace, verb, valid, action)


def random_words() -> Iterator[Case]:
    """Yield command lines of random words."""
    rng = random.Random(0)
    words = [
        *NOT_PATHS.values(),
        "train",
        "merge",
        "--out",
        "--config",
        "--config.",
        "--",
        "-h ",
        "-x",
        "1",
        "--last",
        "🙂",
    ]
    yield Case("none", "no words", [])
    for _ in range(60):
        first = rng.choice([w for w in words if w not in ("train", "merge")])
        yield Case("none", "random words", [first, *rng.choices(words, k=rng.randrange(6))])
    yield Case("none", "random words", ["merg", "x" * 100_000])
    yield Case("merge", "long argument", ["merge", "x" * 100_000, "--out", "y" * 100_000])


def of_scores(workspace: Workspace) -> Iterator[Case]:
    """Yield mistakes with sweeps that `pma evaluate` scores, and with `pma evaluate --numbers`."""
    snapshots, run, model = (str(path) for path in (workspace.run / "snapshots", workspace.run, workspace.model))
    for words in (
        [snapshots, "--limit", "1"],
        [snapshots, "--tasks", "pma:brackets", "--score", "echo 1"],
        [snapshots, "--tasks", "{}"],
        [snapshots, "--windows", "99"],
        [snapshots, "--subtree", "params"],
        [snapshots, "--format", "safetensors"],
        [snapshots, "--out", run],
        [snapshots, "--score", "echo 1", "--config.training.seed=1"],
        [snapshots, "--disk-limit", "1KB", "--windows", "2"],
        [model],
        [run, model],
        [run, "--tasks", "pma:brackets", "--ends", "50%"],
    ):
        yield Case("sweep", "scored by pma evaluate", ["sweep", *words])
    yield Case("evaluate", "--numbers", ["evaluate", run, snapshots, "--numbers"])
    yield Case("evaluate", "--numbers", ["evaluate", run, "--numbers", "--json"])


def of_action(workspace: Workspace, verb: str, valid: list[str], action: argparse.Action) -> Iterator[Case]:
    """Yield the mistakes with one option or argument."""
    name = action.option_strings[-1] if action.option_strings else ""
    if name in ("--help", "--debug", "--config.SECTION.KEY=VALUE"):
        return
    if not name:
        at = 1
        for kind, text in workspace.not_sources().items():
            yield Case(verb, kind, [*valid[:at], text, *valid[at + 1 :]])
        return
    rest = without(valid, name)
    if action.nargs == 0:
        yield Case(verb, f"{name} with a value", [*rest, f"{name}=1"])
        return
    yield Case(verb, f"{name} without a value", [*rest, name])
    if action.dest not in ("recipe", "subtrees"):
        value = valid[valid.index(name) + 1] if name in valid else "1"
        yield Case(verb, f"{name} twice", [*rest, name, value, name, value])
    if action.choices:
        texts: dict[str, str] = {
            f"choice {text!r:.10}": text for text in ("", "nonsense", "KEEP", "keep ", "\0", "\udcff")
        }
    elif action.dest in ("workdir", "out"):
        texts = workspace.not_outputs()
        if verb == "plan":
            texts = {kind: texts[kind] for kind in ("nul", "long name", "bucket of another kind", "out below a file")}
        elif verb == "report":
            texts = {
                k: texts[k]
                for k in ("nul", "long name", "device", "out is a file", "out below a file", "out not writable")
            }
        elif action.dest == "workdir":
            del texts["out is a source"], texts["out is another run's snapshot"], texts["out is a dangling link"]
    elif action.dest == "config":
        files = ("bad", "exit", "exit_later", "interrupt", "recursion", "nothing", "fifo")
        texts = NOT_PATHS | {f"config {f}": str(workspace.folder / f"{f}.py") for f in files}
    elif action.dest in ("weights", "tokenizer"):
        texts = {kind: text for kind, text in workspace.not_sources().items() if kind != "empty"}
    elif action.dest in ("recipe", "recipes", "topology", "subtrees", "kind"):
        texts = {
            f"text {text!r:.10}": text
            for text in ("nonsense", "sma:", "ema:alpha=", "ema:alpha=2", "\udcff", "\0", LONG)
        }
    else:
        texts = {f"number {text!r:.10}": text for text in NOT_NUMBERS}
    for kind, text in texts.items():
        yield Case(verb, f"{name}: {kind}", [*rest, name, text])


def without(words: list[str], name: str) -> list[str]:
    """Return a command line without an option and its value."""
    at = words.index(name) if name in words else len(words)
    return [*words[:at], *words[at + 2 :]]


def files_below(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the size and time of every file, and every directory."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[path] = (status.st_size, 0 if path.is_dir() and not path.is_symlink() else status.st_mtime_ns)
    return found


def check(main: Any, workspace: Workspace, case: Case, current: Path) -> str:
    """Run a case, and return what is wrong with how it ended ("" if nothing)."""
    before, started = [files_below(workspace.folder), files_below(current)], time.monotonic()
    status, out, error = call(main, case.words)
    problems = []
    if status not in (1, 2):
        problems.append(f"status {status}")
    lines = [line for line in error.splitlines() if not line.startswith("prepared ")]  # the corpus, once
    if len(lines) != 1 or not lines[0].startswith("error: ") or "Traceback" in error:
        problems.append(f"standard error: {error[-500:]!r}")
    if out:
        problems.append(f"standard output: {out[:200]!r}")
    if time.monotonic() - started > LIMIT_SECONDS:
        problems.append("took too long")
    for folder, old in zip((workspace.folder, current), before, strict=True):
        written = {path for path, state in files_below(folder).items() if old.get(path) != state}
        if written := {path for path in written if "cache" not in path.parts and path.name != "lock"}:
            problems.append(f"wrote {[str(path) for path in sorted(written)[:4]]}")
            for path in written - old.keys():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return "; ".join(problems)


def main() -> None:
    """Run all command lines, print counts per verb, and exit with 1 if one failed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--package", type=Path, default=Path(__file__).parents[2], help="the checkout to test")
    options.add_argument("--only", help="only this verb")
    options.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th command line")
    given = options.parse_args()
    sys.path.insert(0, str(given.package.absolute()))
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    from pma_jax.cli import main as pma

    try:
        from pma_jax.cli.arguments import parser
    except ImportError:
        from pma_jax.cli import parser  # pyrefly: ignore[missing-module-attribute]

    def too_long(*_: object) -> None:
        raise TookTooLong

    def pma_in_time(words: list[str]) -> int:
        signal.alarm(LIMIT_SECONDS)
        try:
            return pma(words)
        finally:
            signal.alarm(0)

    signal.signal(signal.SIGALRM, too_long)
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # a KeyboardInterrupt is now one that a configuration raises
    folder = Path(tempfile.mkdtemp(prefix="pma-command-lines-"))
    workspace, current = Workspace(folder / "space", pma), folder / "current"
    current.mkdir()
    os.chdir(current)
    cases = list(make_cases(workspace, actions_of(parser())))[:: given.every]
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failed = 0
    for case in cases:
        if given.only not in (None, case.verb):
            continue
        problem = check(pma_in_time, workspace, case, current)
        counts[case.verb, "FAILED" if problem else "right"] += 1
        if problem:
            failed += 1
            shown = [word if len(word) < 100 else f"{word[:40]}… ({len(word)} characters)" for word in case.words]
            print(f"FAILED {case.verb}, {case.kind}: {shown}: {problem}", flush=True)
    for (verb, kind), count in sorted(counts.items()):
        print(f"{verb:9} {kind:7} {count}")
    print(f"{counts.total()} command lines: {failed} failed")
    os.chdir("/")
    shutil.rmtree(folder)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
