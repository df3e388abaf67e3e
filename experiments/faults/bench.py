"""The workspace of the fault harnesses: a tiny run, its configuration, and comparisons of what commands make."""

import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "pma-kills-compiled"))

import forked
from forked import Kill, Outcome

BATCH_TOKENS = 256
HORIZON = 36 * BATCH_TOKENS
FORK_TOKENS = 12 * BATCH_TOKENS
# Snapshots and block means every 2 steps, of which few are kept; states every 6 steps, of which one is kept.
OFTEN = {
    "checkpoint.kinds": "point,block_mean",
    "checkpoint.block_every_steps": 1,
    "checkpoint.interval_tokens": 2 * BATCH_TOKENS,
    "checkpoint.state_interval_tokens": 6 * BATCH_TOKENS,
    "checkpoint.window": 3,
    "preview.windows": "2,3",
}
KEPT = {
    "checkpoint.keep_windows": 1,
    "checkpoint.archive_interval_tokens": 8 * BATCH_TOKENS,
    "checkpoint.keep_states": 1,
}
CONFIG = """
from pma_jax import config


def get_config():
    c = config.defaults()
    c.data.source, c.data.files, c.data.held_out_percent, c.data.cache_dir = "files", ({files!r},), 20.0, {cache!r}
    m = c.model
    m.width, m.layers, m.heads, m.kv_heads, m.head_dim, m.hidden = 16, 2, 2, 2, 8, 32
    c.schedule.peak_rate, c.schedule.warmup_tokens = 1e-2, 1024
    t = c.training
    t.total_tokens, t.sequence_length_tokens, t.batch_size_sequences, t.log_interval_tokens = {horizon}, 32, 8, 256
    c.evaluation.tokens, c.evaluation.batch_size_sequences = 500, 8
    return c
"""
CLOCK = ("seconds", "tokens_per_second")


class Lost(Exception):  # noqa: N818
    """Something was lost, or differs from a command that was not killed."""


def check(condition: object, text: str, output: str = "") -> None:
    """Raise Lost with the text and the end of a child's output if the condition is false."""
    if not condition:
        raise Lost(f"{text}\n{output[-2000:]}")


# --- What a run directory holds ---------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file of records, without wall times."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines]


def published(run: Path, skip_corrupt: bool = False) -> dict[str, Any]:
    """Map each published step to its metadata, which hold its tokens, its loss and the digests of its arrays."""
    found = {}
    for folder in ("snapshots", "block_means", "states"):
        for path in (run / folder).glob("*"):
            if path.name.isdigit() and (path / "commit_success.txt").exists():
                try:
                    metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
                except (OSError, ValueError) as error:
                    check(skip_corrupt, f"{path}: {error}")
                    continue
                found[f"{folder}/{path.name}"] = {
                    key: value for key, value in metadata.items() if not key.endswith("digest") and key != "config"
                }
    return found


def leftovers(run: Path) -> list[str]:
    """List what should not remain in a run directory: unpublished steps, temporary files, set-aside steps."""
    steps = [path for folder in ("snapshots", "block_means", "states") for path in (run / folder).glob("*")]
    unpublished = [p for p in steps if not p.name.isdigit() or not (p / "commit_success.txt").exists()]
    return [str(p.relative_to(run)) for p in (*unpublished, *run.glob(".*.writing"), *run.glob("damaged"))]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below `folder` by name; of the provenance, only what is not about time."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    found.pop("provenance.json", None)
    return {name: data for name, data in found.items() if not name.endswith(".lock")}


class Bench:
    """The workspace: the text, the configuration, uninterrupted runs, and what each cell did."""

    def __init__(self, root: Path, main: Callable[..., int], rng: random.Random, journals: bool = False):
        self.root, self.main, self.rng, self.journals = root, main, rng, journals
        self.kills: Counter = Counter()  # (cell, phase) -> kills
        self.after_kill: Callable[[Path], None] = lambda _: None
        (root / "text").mkdir(parents=True)
        words = [stem + end for stem in ("ar", "ben", "cor", "dal", "em") for end in ("a", "io", "um", "ette")]
        text = random.Random(0)
        for i in range(200):
            (root / "text" / f"{i:04d}.txt").write_text(f"{i} " + " ".join(text.choices(words, k=40)) + ".\n")
        self.config = root / "config.py"
        values = {"files": str(root / "text" / "*.txt"), "cache": str(root / "shared_cache"), "horizon": HORIZON}
        self.config.write_text(CONFIG.format(**values))

    def train(self, run: Path, **keys: Any) -> list[object]:
        """Return the command that trains `run`."""
        return ["train", "--config", self.config, "--workdir", run, *options(OFTEN | KEPT | keys)]

    def journal(self, root: Path) -> Path:
        """Return where the operations on files below `root` are recorded."""
        return root.parent / f"{root.name}.journal"

    def run(self, arguments: list[object], root: Path, kill: Kill | None = None, **keywords: Any) -> Outcome:
        """Run a command in a child."""
        journal = self.journal(root) if self.journals and kill else None
        return forked.run(self.main, arguments, root, kill, journal=journal, **keywords)

    def finish(self, arguments: list[object], root: Path, **keywords: Any) -> Outcome:
        """Run a command to its end, which must be status 0."""
        outcome = self.run(arguments, root, **keywords)
        check(outcome.status == 0, f"status {outcome.status} of {' '.join(map(str, arguments[:2]))}", outcome.output)
        return outcome

    def make_references(self) -> None:
        """Train the run that keeps every step, and the one with retention."""
        self.full, self.kept = self.root / "full" / "run", self.root / "kept" / "run"
        keep_all = {"checkpoint.keep_windows": 0, "checkpoint.keep_states": 1000}
        self.finish(self.train(self.full, **keep_all), self.full.parent)
        self.train_phases = self.finish(self.train(self.kept), self.kept.parent)
        full, kept = read_lines(self.full / "metrics.jsonl"), read_lines(self.kept / "metrics.jsonl")
        check(full == kept and any(r["kind"] == "preview" for r in full), "retention changes the records")


def options(keys: dict[str, Any]) -> list[str]:
    """Format configuration keys as options."""
    return [f"--config.{key}={value}" for key, value in keys.items()]


def choose_kill(bench: Bench, cell: str, phases: Counter, seconds: float) -> Kill:
    """Choose the phase that was killed least, `any time` included, and a random event of it."""
    names = [*phases, *[Kill().name] * 2]
    bench.rng.shuffle(names)
    name = min(names, key=lambda phase: bench.kills[cell, phase] / names.count(phase))
    if name == Kill().name:
        return Kill(seconds=bench.rng.uniform(0, seconds))
    # A resumed command has fewer events than a complete one.
    return Kill(name, bench.rng.randint(1, max(phases[name] // bench.rng.choice([1, 2, 4, 8]), 1)))


def kill_once(bench: Bench, cell: str, arguments: list[object], root: Path, kill: Kill, **keywords: Any) -> Outcome:
    """Run a command, kill it, and count the kill; the command may have ended before, with status 0."""
    outcome = bench.run(arguments, root, kill, **keywords)
    check(outcome.status in (0, -9), f"{cell}: status {outcome.status} before {kill}", outcome.output)
    check("it hung" not in outcome.output, f"{cell}: hangs, with {kill}", outcome.output)
    if outcome.status:
        bench.kills[cell, kill.name] += 1
        bench.after_kill(root)
    else:
        for path in root.parent.glob(f"{bench.journal(root).name}*"):
            path.unlink()
    return outcome


def cell_kills(bench: Bench, cell: str) -> int:
    """Return the number of kills of a cell."""
    return sum(count for (name, _), count in bench.kills.items() if name == cell)
