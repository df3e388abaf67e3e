"""A cache of trained runs, keyed by config digest: each configuration is trained once.

    CACHE/<key>/run/           the run directory
    CACHE/<key>/lock           held by the process that trains the run; others that need the run wait for it
    CACHE/<key>/trained.json   machine seconds of the training, summed over all sessions, whether it is finished, and,
                               if the run diverged, the error
    CACHE/<key>/evaluated.json machine seconds and tokens of the evaluations of merges, summed over all sessions
    CACHE/<key>/readings.json  numbers that experiments read of the run's snapshots, by name
    CACHE/<key>/merged/        merges of the run's snapshots, from which forks can start
    CACHE/compiled/            JAX's persistent compilation cache, so that each program is compiled once

An entry may hold the losses of a run that was trained on another machine, without its snapshots (recorded_runs.py).

A machine second is a second of all cores: a process that has half of them takes half of one per second.

The key of a run is the digest of its configuration, in which initial weights that are in the cache are named by their
path in it. The key of a fork is a digest of its parent's key, the tokens of the fork, its initial weights and its own
configuration. No key depends on the path of the cache, so a cache can be moved, and caches that were filled on several
machines can be combined.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NotRequired, TypedDict

import jax
import numpy as np
from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.config.errors import DivergenceError, UserError
from pma_jax.evaluation.held_out import check_corpus, prepare_tokens
from pma_jax.evaluation.sweep import Cell, snapshots_through
from pma_jax.launch.shares import available_cores
from pma_jax.merging.api import merge
from pma_jax.runs import lock
from pma_jax.runs.directory import Run, is_run, open_run
from pma_jax.runs.snapshots import Snapshot, is_snapshot, read_snapshot
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage import atomic
from pma_jax.storage.json_files import read_json, update_json
from pma_jax.storage.paths import absolute_path, as_path
from pma_jax.training import fork
from pma_jax.training.loop import train

TRAINED = "trained.json"
EVALUATED = "evaluated.json"
READINGS = "readings.json"
Readings = dict[str, dict[str, float]]


class Trained(TypedDict):
    """Contents of trained.json."""

    seconds: float
    is_finished: bool
    divergence: NotRequired[str]  # the error, if the run diverged
    has_losses_only: NotRequired[bool]  # trained on another machine; see recorded_runs.py


def get_or_train(cache: epath.PathLike, config: Config) -> Run:
    """Return the run of `config`, trained to its horizon: train or resume it unless it is finished.

    If two processes need the same run, one trains it and the other waits.

    Raises:
        DivergenceError: The run diverged, now or earlier.
        UserError: As for `train`.
    """
    return _train_entry(absolute_path(cache) / run_key(cache, config), config)


def get_or_fork(
    cache: epath.PathLike, source: Run, at_tokens: int, changes: Iterable[str], weights: Snapshot | None = None
) -> Run:
    """Return the fork of `source` at `at_tokens`, trained to its horizon like `get_or_train`.

    Args:
        cache: Directory of the cache.
        source: The run to fork, in this cache or elsewhere.
        at_tokens: Tokens at which `source` has a training state.
        changes: Overrides of the source's configuration, as `section.key=value`.
        weights: Snapshot whose parameters replace those of the training state, such as a merge from `get_or_merge`.
            The optimizer state and the data position are still those of the training state.

    Raises:
        UserError: As for `fork` and `train`.
    """
    config = configuration.resolve(source.config, changes)
    make_mesh(config.mesh)  # initialise the backend before states are listed; see _train_entry
    name = _fork_key(cache, source, at_tokens, config, weights)

    def start(folder: epath.Path) -> None:
        fork.fork(source, at_tokens, config, folder, weights.path if weights else None)

    return _train_entry(absolute_path(cache) / name, config, start)


def get_even_if_diverged(
    cache: epath.PathLike, config: Config, key: str = "", start: Callable[[epath.Path], Any] | None = None
) -> tuple[Run, str]:
    """Return the run of `config`, trained to its horizon or until it diverges, and the error if it diverged.

    Args:
        cache: Directory of the cache.
        config: The configuration.
        key: Key of a run that does not begin at its first step; by default that of `config`.
        start: Creates the directory of such a run.

    Raises:
        UserError: As for `train`.
    """
    entry, error = absolute_path(cache) / (key or run_key(cache, config)), ""
    try:
        return _train_entry(entry, config, start), error
    except DivergenceError as diverged:
        error = str(diverged)
    return open_run(entry / "run"), error


def get_or_merge(run: Run, cell: Cell, at_tokens: int) -> Snapshot:
    """Return the merge that `cell` describes, of the newest snapshots at `at_tokens`; if missing, make it.

    The merge is stored in merged/ next to the run directory.

    Raises:
        UserError: `run` has too few snapshots, or none at `at_tokens`.
    """
    used = snapshots_through(run.of_kind(cell.kind), at_tokens, run.config.batch_tokens)
    row_K = cell.coefficients(run.config, [s.tokens for s in used])
    folder = run.path.parent / "merged"
    target = folder / f"{cell.text.replace('/', '-').replace(':', '-')}-{used[-1].tokens}"

    def write() -> str:
        indices = np.flatnonzero(row_K).tolist()
        with lock.hold(folder, wait=True):
            if not is_snapshot(target):
                merge([used[k] for k in indices], row_K[indices], target, cell.recipe)
        return str(target)

    return read_snapshot(hosts.broadcast_from_first(write))


def run_key(cache: epath.PathLike, config: Config) -> str:
    """Return the cache key of the run of a configuration."""
    start_from = config.training.start_from.removeprefix(f"{absolute_path(cache)}/")
    training = dataclasses.replace(config.training, start_from=start_from)
    return configuration.digest(dataclasses.replace(config, training=training))


def entry_key(cache: epath.PathLike, run: Run) -> str:
    """Return the cache key of a run; for a run outside the cache, its config digest and path."""
    if run.path.parent.parent == absolute_path(cache):
        return run.path.parent.name
    return f"{configuration.digest(run.config)} {run.path}"


def find(cache: epath.PathLike, config: Config) -> Run | None:
    """Return the finished run of `config`, without training; None if there is none."""
    return _find_entry(absolute_path(cache) / run_key(cache, config))


def has_diverged(cache: epath.PathLike, config: Config) -> bool:
    """Return whether the training of `config` diverged."""
    return bool(_divergence(absolute_path(cache) / run_key(cache, config)))


def find_fork(
    cache: epath.PathLike, source: Run, at_tokens: int, changes: Iterable[str], weights: Snapshot | None = None
) -> Run | None:
    """Return the finished fork of `source` that `get_or_fork` would return, without training; None if there is none."""
    config = configuration.resolve(source.config, changes)
    return _find_entry(absolute_path(cache) / _fork_key(cache, source, at_tokens, config, weights))


def has_losses_only(run: Run) -> bool:
    """Return whether the cache has the losses of a run, but neither its snapshots nor its states."""
    return _read_trained(run.path.parent).get("has_losses_only", False)


def losses_only_error(run: Run, missing: str) -> UserError:
    """Return the error for a run of which the cache has only the losses; `missing` is what else is needed."""
    folder = run.path.parent
    return UserError(
        f"{run.path}: only the losses of this run are here, and not {missing}: remove {folder} to train it again"
    )


def get_or_read(run: Run, name: str, read: Callable[[Run], dict[str, float]]) -> dict[str, float]:
    """Return the numbers that `read` gives for a run; they are stored by name, and computed once.

    Raises:
        UserError: They are not stored, and the snapshots of the run are not here.
    """
    stored = readings(run)
    if name not in stored:
        if has_losses_only(run):
            raise losses_only_error(run, name)
        numbers = read(run)
        stored = update_json(run.path.parent / READINGS, Readings, lambda others: (others or {}) | {name: numbers})
    return stored[name]


def get_or_read_list(run: Run, name: str, read: Callable[[Run], Iterable[float]]) -> list[float]:
    """Return a list of numbers like `get_or_read`; each is stored under its index."""
    stored = get_or_read(run, name, lambda run: {str(i): float(number) for i, number in enumerate(read(run))})
    return [stored[key] for key in sorted(stored, key=int)]


def readings(run: Run) -> Readings:
    """Return the numbers that were read of a run's snapshots, by name."""
    path = run.path.parent / READINGS
    return read_json(as_path(path), Readings) if path.exists() else {}


def remove_recorded(run: Run) -> None:
    """Remove a run of which the cache has only the losses, so that it is trained again; keep any other."""
    with lock.hold(run.path.parent, wait=True):
        if has_losses_only(run):
            (run.path.parent / TRAINED).unlink()
            (run.path.parent / READINGS).unlink(missing_ok=True)
            run.path.rmtree()


def keep_losses_only(run: Run) -> None:
    """Remove the snapshots and states of a finished run, and keep its losses, as for a search that trains many runs.

    Whatever needs more of the run trains it again.
    """
    entry = run.path.parent
    with lock.hold(entry, wait=True):
        # First: an entry that is marked and still has snapshots is harmless.
        update_json(entry / TRAINED, Trained, lambda trained: {**trained, "has_losses_only": True})
        for path in (*run.path.iterdir(), entry / "merged"):
            if path.is_dir():
                path.rmtree()


def finished_runs(cache: epath.PathLike) -> Iterator[Run]:
    """Yield the finished runs of the cache."""
    for path in sorted(absolute_path(cache).glob("*/run")):
        if run := _find_entry(path.parent):
            yield run


def add_evaluation_cost(run: Run, seconds: float, tokens: int) -> None:
    """Add wall seconds to the cost of the evaluations of a run's merges; outside a cache, nothing is recorded."""
    if (run.path.parent / TRAINED).exists():
        spent = {"seconds": seconds * machine_share(), "tokens": tokens}
        update_json(run.path.parent / EVALUATED, dict[str, float], lambda cost: _add(cost, spent))


def evaluation_cost(run: Run) -> dict[str, float]:
    """Return the machine `seconds` and the `tokens` of the recorded evaluations of a run's merges."""
    path = run.path.parent / EVALUATED
    return read_json(as_path(path), dict[str, float]) if path.exists() else {"seconds": 0.0, "tokens": 0}


def training_cost(run: Run) -> dict[str, float]:
    """Return the machine `seconds` and the `tokens` of a run's training; of a fork, the tokens since the fork."""
    seconds = _read_trained(run.path.parent)["seconds"]
    return {"seconds": seconds, "tokens": run.config.training.total_tokens - run.start_tokens}


def finish_time(run: Run) -> float:
    """Return when the last session of a run's training ended, in seconds since the epoch."""
    return (run.path.parent / TRAINED).stat().mtime


def machine_share() -> float:
    """Return the share of the machine's cores that this process may use."""
    return len(available_cores()) / (os.cpu_count() or 1)


def _add(cost: dict[str, float] | None, spent: dict[str, float]) -> dict[str, float]:
    return {name: value + (cost or {}).get(name, 0) for name, value in spent.items()}


def _fork_key(cache: epath.PathLike, source: Run, at_tokens: int, config: Config, weights: Snapshot | None) -> str:
    state_tokens = at_tokens if has_losses_only(source) else fork.state_at(source, at_tokens).tokens
    parts = [entry_key(cache, source), state_tokens, _weights_key(weights), run_key(cache, config)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _find_entry(entry: epath.Path) -> Run | None:
    return open_run(entry / "run") if _read_trained(entry)["is_finished"] else None


def _read_trained(entry: epath.Path) -> Trained:
    path = entry / TRAINED
    return read_json(as_path(path), Trained) if path.exists() else {"seconds": 0.0, "is_finished": False}


def _divergence(entry: epath.Path) -> str:
    """Return the error of a run that diverged, else an empty string."""
    return _read_trained(entry).get("divergence", "")


def _train_entry(entry: epath.Path, config: Config, start: Callable[[epath.Path], Any] | None = None) -> Run:
    """Return the run of a cache entry, trained to its horizon; `start` creates the run directory if it is missing."""
    _enable_compilation_cache(entry.parent)
    make_mesh(config.mesh)  # fixes the device count before listing the states initialises the backend
    folder = entry / "run"
    with contextlib.ExitStack() as stack:
        hosts.broadcast_from_first(lambda: stack.enter_context(lock.hold(entry, wait=True)) or "")
        if divergence := hosts.broadcast_from_first(lambda: _divergence(entry)):
            raise DivergenceError(divergence)
        exists = hosts.broadcast_from_first(lambda: str(is_run(folder))) == str(True)
        if start and not exists:
            start(folder)
        if exists and _is_finished(run := open_run(folder)):
            check_corpus(run, prepare_tokens(config))  # as `train` does
            if _find_entry(entry) is None:  # the last session was killed before it recorded the end
                _record(entry, 0.0, is_finished=True)
            return run
        began = time.perf_counter()
        is_finished, divergence = False, ""
        try:
            run = train(config, folder)
            is_finished = True
        except DivergenceError as error:
            divergence = str(error)
            raise
        finally:
            _record(entry, time.perf_counter() - began, is_finished, divergence)
    return run


def _record(entry: epath.Path, wall_seconds: float, is_finished: bool, divergence: str = "") -> None:
    """Record how a session of an entry's training ended, and add its machine seconds."""
    if hosts.is_first_process():
        seconds = _read_trained(entry)["seconds"] + wall_seconds * machine_share()
        trained: Trained = {"seconds": seconds, "is_finished": is_finished}
        if divergence:
            trained["divergence"] = divergence
        atomic.write_text(entry / TRAINED, json.dumps(trained) + "\n")


def _is_finished(run: Run) -> bool:
    if has_losses_only(run):
        return True
    newest = run.newest_resumable_state
    return newest is not None and run.config.is_run_complete(newest.tokens)


def _weights_key(weights: Snapshot | None) -> list[Any] | None:
    if weights is None:
        return None
    if weights.merge is None:
        return [configuration.digest(weights.config), weights.kind, weights.tokens]
    tokens = [source["tokens"] for source in weights.merge["sources"]]
    return [configuration.digest(weights.config), weights.kind, tokens, weights.merge["coefficients"]]


def _enable_compilation_cache(cache: epath.Path) -> None:
    # A directory that the user configured takes precedence.
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
