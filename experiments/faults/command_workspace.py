"""A workspace of a run, a merge and an exported model, in which command lines of `pma` are called in this process."""

import contextlib
import io
import os
import random
import shutil
import traceback
from pathlib import Path
from typing import Any

CONFIG = """
from pma_jax import config
def get_config():
    c = config.defaults()
    c.data.source, c.data.files, c.data.held_out_percent = "files", ({corpus!r},), 25.0
    c.data.cache_dir = {cache!r}
    c.model.width, c.model.layers, c.model.heads, c.model.kv_heads = 16, 1, 2, 2
    c.model.head_dim, c.model.hidden = 8, 32
    c.schedule.peak_rate, c.schedule.warmup_tokens = 1e-2, 1024
    c.training.total_tokens, c.training.sequence_length_tokens, c.training.batch_size_sequences = 4096, 32, 8
    c.training.log_interval_tokens = 256
    c.checkpoint.interval_tokens, c.checkpoint.window, c.checkpoint.state_interval_tokens = 1024, 3, 2048
    c.evaluation.tokens, c.evaluation.batch_size_sequences = 500, 8
    return c
"""
LONG = "a" * 300  # longer than a file's name may be
NOT_PATHS = {
    "empty": "",
    "nul": "a\0b",
    "surrogate": "absent-\udcff",
    "newline": "absent\nhere",
    "long name": LONG,
    "long path": "a/" * 3000,
    "absent": "absent/x",
    "device": "/dev/null",
    "endless device": "/dev/zero",
    "proc": "/proc/self/mem",
    "bucket of another kind": "s3://bucket/x",
    "web address": "https://example.invalid/x",
    "hub address without a name": "hf://",
    "hub address without a repository": "hf://org",
    "dash": "-",
    "home of nobody": "~nobody-here/x",
    "escape": "absent-\x1b[31m",
}


class TookTooLong(BaseException):
    """Raised when a command line takes longer than the limit."""


def call(main: Any, words: list[str]) -> tuple[Any, str, str]:
    """Run `pma` in this process; return its status, or the exception that it raised, and what it printed."""
    out, error = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status: Any = main(words)
        except SystemExit as left:
            status = left.code
        except (Exception, TookTooLong, KeyboardInterrupt) as raised:
            status = "".join(traceback.format_exception(raised))[-1500:]
    for stream in (out, error):
        stream.seek(0)
    return status, out.read(), error.read()


class Workspace:
    """A run, a merge, an exported model and things that are none of them."""

    def __init__(self, folder: Path, main: Any, run: Path | None = None):
        """Make it in `folder`; the run is a copy of `run`, if that is given, and trained otherwise."""
        self.folder = folder
        rng = random.Random(0)
        (folder / "text").mkdir(parents=True)
        for i in range(240):
            (folder / "text" / f"{i:03d}.txt").write_text(f"{i} {' '.join(rng.choices(('ar', 'ben', 'cor'), k=50))}.\n")
        text = CONFIG.format(corpus=str(folder / "text" / "*.txt"), cache=str(folder / "cache"))
        (folder / "config.py").write_text(text)
        self.run, self.merged, self.model = folder / "run", folder / "merged", folder / "model"
        if run is not None:
            shutil.copytree(run, self.run)
        for words in (
            *([["train", "--config", str(folder / "config.py"), "--workdir", str(self.run)]] if run is None else []),
            ["merge", str(self.run), "--last", "2", "--out", str(self.merged)],
            ["export", str(self.run), "--out", str(self.model)],
        ):
            status, _, error = call(main, words)
            if status:
                raise SystemExit(f"cannot prepare: {words} {error}")
        (folder / "empty").mkdir()
        (folder / "file").write_text("text\n")
        (folder / "bad.py").write_text("def get_config(:\n")
        (folder / "exit.py").write_text("import sys\nsys.exit(0)\n")
        (folder / "exit_later.py").write_text("def get_config():\n    raise SystemExit(0)\n")
        (folder / "interrupt.py").write_text("raise KeyboardInterrupt\n")
        (folder / "recursion.py").write_text("def get_config():\n    return get_config()\n")
        (folder / "nothing.py").write_text("def get_config():\n    pass\n")
        (folder / "other.json").write_text("{}")
        os.mkfifo(folder / "fifo")
        os.mkfifo(folder / "fifo.py")
        (folder / "loop").symlink_to("loop")
        (folder / "dangling").symlink_to("nowhere")

    def valid(self, verb: str) -> list[str]:
        """Return a command line of a verb that is right, to which a mistake is added."""
        out = str(self.folder / "out")
        config = ["--config", str(self.folder / "config.py")]
        return {
            "train": ["train", *config, "--workdir", out],
            "fork": ["fork", str(self.run), "--at-tokens", "2048", "--workdir", out],
            "merge": ["merge", str(self.run), "--out", out],
            "sweep": ["sweep", str(self.run)],
            "watch": ["watch", str(self.run), "--once"],
            "evaluate": ["evaluate", str(self.run)],
            "inspect": ["inspect", str(self.run)],
            "plan": ["plan", *config, "--topology", "v5e:2x2"],
            "import": ["import", str(self.model), "--out", out],
            "export": ["export", str(self.merged), "--out", out],
            "report": ["report", str(self.run), "--out", str(self.folder / "empty")],
            "grid": ["grid", *config, "--root", out, "--vary", "training.seed=0,1"],
            "launch": ["launch", "--engine", "gke", "--topology", "v6e:4x4", "--image", "registry/pma", "--dry-run"],
        }[verb]

    def not_sources(self) -> dict[str, str]:
        """Return things that are neither a run nor a checkpoint, by kind."""
        names = ("file", "empty", "fifo", "loop", "dangling", "text", "other.json", "config.py")
        return NOT_PATHS | {f"source is {name}": str(self.folder / name) for name in names}

    def not_outputs(self) -> dict[str, str]:
        """Return paths where nothing may be written, by kind."""
        refused = ("empty", "nul", "long name", "long path", "device", "proc", "bucket of another kind")
        others = {
            "out is a source": self.run,
            "out is a file": self.folder / "file",
            "out below a file": self.folder / "file" / "x",
            "out is a fifo": self.folder / "fifo",
            "out is a loop": self.folder / "loop",
            "out is a dangling link": self.folder / "dangling",
            "out below a loop": self.folder / "loop" / "x",
            "out not writable": Path("/proc/out"),
            "out is another run's snapshot": self.run / "snapshots",
        }
        return {kind: NOT_PATHS[kind] for kind in refused} | {kind: str(path) for kind, path in others.items()}
