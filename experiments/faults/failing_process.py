"""A workplace where one system call of a command fails: the files that commands need, and a process that runs them."""

import contextlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CALLS = {"open": 1, "read": 2, "write": 3, "rename": 4, "fsync": 5, "mmap": 6, "unlink": 7}
_CONTROL = struct.Struct("iiiil8ll512s512s")
ALL = -1  # calls of every kind are counted, and none fails
LIMIT_SECONDS = 100

CONFIG = """
import json
from pma_jax import config

def get_config():
    c = config.defaults()
    c.update(json.loads({keys!r}))
    return c
"""


class Result(NamedTuple):
    """How a process ended."""

    status: int
    output: str
    errors: str
    seen: Sequence[int]  # number of matching calls, indexed by CALLS
    fired: int
    fired_path: str
    seconds: float


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
        self.server.stdin.write(json.dumps([words, str(out), str(err), LIMIT_SECONDS]) + "\n")
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
