"""A new run from another run's full state: to anneal, to change the data, to try another rate."""

import contextlib
from collections.abc import Iterable
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.data import shards
from pma_jax.runs import lock, states
from pma_jax.runs.directory import Run, create_run, is_run, open_run
from pma_jax.runs.states import SavedState
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import check_mesh, make_mesh
from pma_jax.storage.paths import absolute_path
from pma_jax.training import starting
from pma_jax.training.loop import run_metadata


def fork_config(source: Run, overrides: Iterable[str]) -> Config:
    """The configuration of `source` with `section.key=value` texts applied."""
    return configuration.resolve(source.config, overrides)


def fork(
    source: Run, at_tokens: int, config: Config, workdir: epath.PathLike, weights: epath.PathLike | None = None
) -> Run:
    """Make a run in `workdir` that begins with the full state of `source` at `at_tokens`.

    The state carries parameters, optimizer moments and data position; `config` decides the rest. With `weights`, a
    snapshot or a merge (PMA-init), its parameters take the place of the state's when training begins: it must be there
    until the new run has saved a state of its own. The same fork that is there already is left as it is. Raises
    ValueError when `source` has no state there (naming those it has), `weights` is no snapshot of this model, or
    `workdir` holds anything else.
    """
    check_mesh(config, make_mesh(config.mesh))  # first: listing states starts JAX, and the devices are then settled
    saved = state_at(source, at_tokens)
    if weights is not None:
        starting.check_weights(config, weights)
    folder = absolute_path(workdir)
    if config.is_horizon(saved.tokens) and not is_run(folder):
        raise ValueError(
            f"nothing is left to train at {saved.tokens:,} of {config.training.total_tokens:,} tokens: fork from an "
            "earlier state, or raise training.total_tokens"
        )
    origin: dict[str, Any] = {"path": str(source.path), "tokens": saved.tokens, "step": saved.step}
    if weights is not None:
        origin["weights"] = str(absolute_path(weights))
    return hosts.run_on_first_then_rest(lambda: _locked_fork(origin, saved, config, folder))


def _locked_fork(origin: dict[str, Any], saved: SavedState, config: Config, folder: epath.Path) -> Run:
    with lock.hold(folder) if hosts.is_first() else contextlib.nullcontext():
        return _fork(origin, saved, config, folder)


def _fork(origin: dict[str, Any], saved: SavedState, config: Config, folder: epath.Path) -> Run:
    if is_run(folder):
        run = open_run(folder)
        if run.metadata.get("forked_from") != origin:
            raise ValueError(f"{folder} holds another run: choose a --workdir that does not exist")
        return run
    metadata = run_metadata(shards.prepare_tokens(config.data), config)
    states.copy_state(saved, folder)
    return create_run(folder, config, metadata | {"forked_from": origin})


def state_at(source: Run, at_tokens: int) -> SavedState:
    """The full state of `source` at the mark `at_tokens`. Raises ValueError that names those it has."""
    states = source.states
    batch = source.config.batch_tokens
    # The step that reached `at_tokens` ended at most one batch past it.
    found = [s for s in states if 0 <= s.tokens - at_tokens < batch]
    if not found:
        have = ", ".join(f"{s.tokens:,}" for s in states) or "none"
        raise ValueError(
            f"{source.path} has no full state at {at_tokens:,} tokens (it has: {have}): name one of these, or train "
            f"with --config.checkpoint.keep_states_at_tokens={at_tokens}"
        )
    return found[0]
