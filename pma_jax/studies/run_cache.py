"""Runs kept by what decides their numbers: who asks for a configuration again gets the run that is there.

    CACHE/<key>/run/           the run directory
    CACHE/<key>/lock           who trains it; others who ask for it wait
    CACHE/<key>/seconds.json   wall seconds that its training took, all sittings together
    CACHE/<key>/merged/        merges of its snapshots, for forks that begin with one
    CACHE/compiled/            XLA's programs: runs of one shape are compiled once

The key of a run is the digest of its configuration; that of a fork is of its parent's key, the fork's tokens, the
weights that it begins with and its own configuration. So a cache may move to another machine, and grow on several.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.evaluation.sweep import Cell
from pma_jax.evaluation.trajectory import snapshot_at
from pma_jax.merging.api import merge
from pma_jax.runs import lock
from pma_jax.runs.directory import Run, is_run, open_run
from pma_jax.runs.snapshots import Snapshot, is_snapshot, read_snapshot
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage import atomic
from pma_jax.storage.paths import absolute_path
from pma_jax.training import forking
from pma_jax.training.loop import train


def trained(cache: epath.PathLike, config: Config) -> Run:
    """The run of this configuration, trained to its horizon: now, on from where it was cut, or long ago.

    Two processes that ask for the same run train it once: the second waits. Raises ValueError as `train` does.
    """
    return _finished(absolute_path(cache) / configuration.digest(config), config)


def forked(
    cache: epath.PathLike, source: Run, at_tokens: int, changes: Iterable[str], weights: Snapshot | None = None
) -> Run:
    """The fork of `source` at `at_tokens` under `changes` (`section.key=value`), trained to its horizon as `trained`.

    Args:
      cache: the folder of runs; `source` is one of them, or any other run.
      source: the run that has a state at `at_tokens`.
      at_tokens: a mark at which a state was kept.
      changes: of the source's configuration.
      weights: what the fork begins with in place of the state's own, such as `merged_at` gives; the optimizer and the
        data position are the state's.

    Raises ValueError as `fork` and `train` do.
    """
    config = forking.fork_config(source, changes)
    make_mesh(config.mesh)  # as in `_finished`
    parts = [
        key(cache, source),
        forking.state_at(source, at_tokens).tokens,
        _weights_key(weights),
        configuration.digest(config),
    ]
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def start(folder: epath.Path) -> None:
        forking.fork(source, at_tokens, config, folder, weights.path if weights else None)

    return _finished(absolute_path(cache) / name, config, start)


def merged_at(run: Run, cell: Cell, at_tokens: int) -> Snapshot:
    """The merge of the newest snapshots at `at_tokens` that `cell` names, written beside the run; once.

    Raises ValueError when there are too few snapshots, or none at `at_tokens`.
    """
    snapshots = run.of_kind(cell.kind)
    until = snapshots[: snapshot_at(snapshots, at_tokens, run.config.batch_tokens) + 1]
    row_K = cell.row(np.array([s.tokens for s in until]))
    folder = run.path.parent / "merged"
    target = folder / f"{cell.text.replace('/', '-').replace(':', '-')}-{until[-1].tokens}"

    def write() -> str:
        used = np.flatnonzero(row_K)
        with lock.held(folder, waits=True):
            if not is_snapshot(target):
                merge([until[k] for k in used], row_K[used], target, cell.recipe)
        return str(target)

    return read_snapshot(hosts.broadcast_from_first(write))


def key(cache: epath.PathLike, run: Run) -> str:
    """What the cache calls a run; a run from elsewhere is called by its configuration and its place."""
    if run.path.parent.parent == absolute_path(cache):
        return run.path.parent.name
    return f"{configuration.digest(run.config)} {run.path}"


def spent(run: Run) -> dict[str, float]:
    """What training a run of a cache took: `seconds` of wall time, and `tokens`, of a fork its own alone."""
    path = run.path.parent / "seconds.json"
    seconds = json.loads(path.read_text())["seconds"] if path.exists() else 0.0
    origin = run.metadata.get("forked_from", {"tokens": 0})["tokens"]
    return {"seconds": seconds, "tokens": run.config.training.total_tokens - origin}


def _finished(entry: epath.Path, config: Config, start: Callable[[epath.Path], Any] | None = None) -> Run:
    """The run in `entry`, made by `start` if there is none, and trained to its horizon."""
    _share_programs(entry.parent)
    make_mesh(config.mesh)  # before states are listed, which starts JAX: the devices are then settled
    folder = entry / "run"
    with contextlib.ExitStack() as stack:
        hosts.enter_on_first(stack, lambda: lock.held(entry, waits=True))
        is_there = hosts.broadcast_from_first(lambda: str(is_run(folder))) == str(True)
        if start and not is_there:
            start(folder)
        began = time.perf_counter()
        had_to_train = not (is_there and _is_done(open_run(folder)))
        run = train(config, folder)
        if had_to_train and hosts.is_first():
            seconds = spent(run)["seconds"] + time.perf_counter() - began
            atomic.write_text(entry / "seconds.json", json.dumps({"seconds": seconds}) + "\n")
    return run


def _is_done(run: Run) -> bool:
    newest = run.newest_state
    return newest is not None and run.config.is_horizon(newest.tokens)


def _weights_key(weights: Snapshot | None) -> list[Any] | None:
    if weights is None:
        return None
    if weights.merge is None:
        return [configuration.digest(weights.config), weights.kind, weights.tokens]
    tokens = [source["tokens"] for source in weights.merge["sources"]]
    return [configuration.digest(weights.config), weights.kind, tokens, weights.merge["coefficients"]]


def _share_programs(cache: epath.Path) -> None:
    # Whoever has named a folder for programs already keeps it.
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
