"""A tiny run for tests: a few hundred documents in a folder, a 2-layer model, 24 steps of 256 tokens.

It writes a snapshot every 4 steps (1024 tokens), and a state every 8 steps (2048) and at the horizon (6144).
"""

import dataclasses
import os
import random
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import processes
import pytest
from orbax.checkpoint import v1 as ocp

from pma_jax import config as configuration
from pma_jax.config import SNAPSHOT_KINDS, Config
from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import snapshots, states, steps
from pma_jax.runs.directory import Run, open_run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage import digests
from pma_jax.training import loop
from pma_jax.training.loop import train
from pma_jax.training.state import abstract_state

BATCH_TOKENS = 256  # 8 sequences of 32
HORIZON = 24 * BATCH_TOKENS
SNAPSHOTS = [4, 8, 12, 16, 20, 24]  # steps
STATES = [8, 16, 24]


def write_corpus(folder: Path, documents: int = 200, seed: int = 0) -> str:
    """Write reproducible documents to `folder` and return the glob that matches them."""
    rng = random.Random(seed)
    arguments = [f"{stem}{end}" for stem in ("ar", "ben", "cor", "dal", "em") for end in ("a", "io", "um", "ette")]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        (folder / f"{i:04d}.txt").write_text(f"{i} " + " ".join(rng.choices(arguments, k=40)) + ".\n")
    return str(folder / "*.txt")


def write_functions(folder: Path, documents: int = 200) -> str:
    """Write reproducible Python functions with docstrings to `folder` and return the glob that matches them."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        body = "\n".join(f"    x = x + {(i * 7 + j) % 10}" for j in range(4))
        (folder / f"{i:04d}.txt").write_text(f'def f{i}(x):\n    """Adds {i} digits to x."""\n{body}\n    return x\n')
    return str(folder / "*.txt")


def keys(folder: Path) -> dict[str, dict]:
    """Return the tiny run's keys that are not defaults; its text and token cache are stored in `folder`."""
    corpus = folder / "text"
    glob = str(corpus / "*.txt") if corpus.exists() else write_corpus(corpus)
    cache = str(folder / "cache")
    return {
        "data": {"source": "files", "files": (glob,), "held_out_percent": 20.0, "cache_dir": cache},
        "model": {"width": 16, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 8, "hidden": 32},
        "schedule": {"peak_rate": 1e-2, "warmup_tokens": 4 * BATCH_TOKENS},
        "training": {
            "total_tokens": HORIZON,
            "sequence_length_tokens": 32,
            "batch_size_sequences": 8,
            "log_interval_tokens": BATCH_TOKENS,
        },
        "checkpoint": {
            "interval_tokens": 4 * BATCH_TOKENS,
            "window": 3,
            "state_interval_tokens": 8 * BATCH_TOKENS,
            "keep_states": 3,
        },
        "evaluation": {"tokens": 500, "batch_size_sequences": 8},
        "preview": {"windows": (2, 3)},
    }


def config(folder: Path, **changes) -> Config:
    """Return the tiny run's configuration; `training__seed=1` changes `training.seed`."""
    raw = keys(folder)
    for key, value in changes.items():
        section, name = key.split("__")
        raw.setdefault(section, {})[name] = value
    return configuration.resolve(raw)


def write_config(path: Path, folder: Path, **changes) -> str:
    """Write the same configuration as a configuration file and return its path."""
    resolved = configuration.to_json(config(folder, **changes))
    path.write_text(
        "import json\nfrom pma_jax import config\n\n\ndef get_config():\n    c = config.defaults()\n"
        f"    c.update(json.loads({resolved!r}))\n    return c\n"
    )
    return str(path)


def train_and_record(config, workdir):
    """Train, and return the run and the parameters after each step, keyed by step."""
    weights = {}

    def make_recording_step(*arguments):
        train_step = make_train_step(*arguments)

        def step(*inputs):
            state, metrics = train_step(*inputs)
            weights[int(state.step)] = jax.tree.map(
                np.array, state.params
            )  # Copy: the next step donates these buffers.
            return state, metrics

        return step

    make_train_step = loop.make_train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_train_step", make_recording_step)
        return train(config, workdir), weights


def read_state(run: Run, step: int):
    """Restore the stored training state of a step."""
    (saved,) = [s for s in run.states if s.step == step]
    return states.restore_state(saved, abstract_state(run.config, make_mesh(run.config.mesh)))


def interrupted(run: Run, folder: Path, step: int = 12) -> Run:
    """Return a copy of what a run interrupted after this step would have published."""
    shutil.copytree(run.path, folder)
    copy = open_run(folder)
    for saved in (*copy.snapshots, *copy.states):
        if saved.step > step:
            saved.path.rmtree()
    return copy


def assert_same_run(actual: Run, expected: Run) -> None:
    """Assert that two complete runs have the same records, and bitwise the same snapshots and last state."""
    assert numbers(actual) == numbers(expected)
    for a, e in zip(actual.snapshots, expected.snapshots, strict=True):
        assert_equal(read(a), read(e))
    assert_equal(read_state(actual, 24), read_state(expected, 24))


def read(snapshot: Snapshot):
    """Read a stored snapshot's parameters as numpy arrays."""
    abstract = abstract_params(snapshot.config.model, make_mesh(snapshot.config.mesh))
    return jax.tree.map(np.asarray, snapshots.restore_params(snapshot, abstract))


def write_snapshot(params, snapshot: Snapshot) -> None:
    """Write one snapshot at `snapshot.path`, inside or outside a run."""
    metadata = digests.add_metadata_digest(snapshots._metadata(snapshot, params))
    snapshot.path.parent.mkdir(parents=True, exist_ok=True)
    with steps.uncompressed_context():
        ocp.save_checkpointables(snapshot.path, {"params": params}, custom_metadata=metadata)


def write_block_means(run: Run) -> None:
    """Add a block mean at each point of `run`: the mean of that point and the previous one."""
    points = run.of_kind("point")
    for before, point in zip([points[0], *points], points, strict=False):
        mean = jax.tree.map(lambda a, b: (a + b) / 2, read(before), read(point))
        path = run.path / SNAPSHOT_KINDS["block_mean"].folder / str(point.step)
        write_snapshot(mean, dataclasses.replace(point, path=path, kind="block_mean", loss=None))


class FakeEvaluator:
    """An evaluator that calls a function instead of the model: parameters -> summed loss of each of two documents."""

    sample = types.SimpleNamespace(counts_D=np.ones(2))

    def __init__(self, sum_by_document):
        self.sum_by_document = sum_by_document


def losses(config: Config, models, part: str = SELECT) -> list[float]:
    """Return the held-out loss of each model."""
    evaluate = make_evaluator(config, make_mesh(config.mesh), part)
    return [evaluate(params).loss for params in models]


def loss_of_sum(run: Run, stored: list[dict[str, np.ndarray]], weights, part: str = SELECT) -> float:
    """Evaluate the float64 weighted sum of trees (as `named` returns them) on held-out text."""
    mesh = make_mesh(run.config.mesh)

    def merged(path, like):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        total = sum(w * leaves[name].astype(np.float64) for w, leaves in zip(weights, stored, strict=True))
        return jax.device_put(total.astype(np.float32), like.sharding)

    params = jax.tree_util.tree_map_with_path(merged, abstract_params(run.config.model, mesh))
    return make_evaluator(run.config, mesh, part)(params).loss


def named(tree) -> dict[str, np.ndarray]:
    """Return the tree as a dict of leaf name to numpy array."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def assert_equal(actual, expected) -> None:
    """Assert that two trees are bitwise equal."""
    actual, expected = named(actual), named(expected)
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name, strict=True)


def assert_close(actual, expected, rtol: float, atol: float = 0.0) -> None:
    """Assert that two trees are element-wise close."""
    actual, expected = named(actual), named(expected)
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=rtol, atol=atol, err_msg=name)


def train_split(folder: Path, workspace: Path, **keys) -> Run:
    """Train on a mesh that splits the parameters; assert that the losses equal those of a mesh that copies them."""
    copies = train(config(workspace, **keys), folder / "copies")
    split = train(config(workspace, **keys, mesh__data=2, mesh__fsdp=2, mesh__tensor=2), folder / "split")
    for a, b in zip(split.snapshots, copies.snapshots, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
    return split


def numbers(run: Run, after: int = 0) -> list[dict]:
    """Return the records of metrics.jsonl after `after` tokens, without wall-clock measurements."""
    clock = ("tokens_per_second", "seconds")
    records = [r for r in run.metrics if r["tokens"] > after]
    return [{key: value for key, value in r.items() if key not in clock} for r in records]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below `folder`, keyed by relative path."""
    folder = Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def command(*arguments: str) -> list[str]:
    """Return the command line of `pma` with these arguments, run by the current Python."""
    return [sys.executable, "-c", "import sys; from pma_jax.cli import main; sys.exit(main())", *map(str, arguments)]


def python(code: str, *arguments: object) -> list[str]:
    """Return a command line that runs this code with these arguments in the current Python."""
    return [sys.executable, "-c", code, *map(str, arguments)]


def environment(devices: int = 8) -> dict[str, str]:
    """Return the current environment with this number of simulated devices."""
    return os.environ | {"XLA_FLAGS": processes.xla_flags(devices)}


def pma(*arguments: str, devices: int = 8, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """Run `pma` in a new process."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=300, cwd=cwd, env=environment(devices), check=False
    )
