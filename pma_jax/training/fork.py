"""Forking: a new run from another run's training state, to anneal, change the data, or try another learning rate."""

import contextlib
from typing import Any

from etils import epath

from pma_jax.config import Config
from pma_jax.data import shards
from pma_jax.runs import lock, states
from pma_jax.runs.directory import Run, create_run, is_run, open_run
from pma_jax.runs.states import SavedState
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import check_mesh, make_mesh
from pma_jax.storage.paths import absolute_path
from pma_jax.training.initial_state import find_weights
from pma_jax.training.resume import run_metadata


def fork(
    source: Run, at_tokens: int, config: Config, workdir: epath.PathLike, weights: epath.PathLike | None = None
) -> Run:
    """Create a run in `workdir` that starts from the training state of `source` at `at_tokens`.

    The state provides parameters, optimizer moments and data position; `config` decides the rest. If the same fork
    exists already, it is opened.

    Args:
        source: The run to fork.
        at_tokens: Tokens at which one of its states was scheduled.
        config: Of the new run.
        workdir: Where to create it.
        weights: A snapshot or a merge (PMA-init) whose parameters replace the state's when training starts; it must
            exist until the new run has saved a state of its own.

    Raises:
        ValueError: `source` has no state there (naming those it has), `weights` is no snapshot of this model, or
            `workdir` holds another run.
    """
    check_mesh(config, make_mesh(config.mesh))  # before states are listed: that starts JAX, which fixes the devices
    saved, folder = state_at(source, at_tokens), absolute_path(workdir)
    origin: dict[str, Any] = {"path": str(source.path), "tokens": saved.tokens, "step": saved.step}
    if weights is not None:
        find_weights(config, weights, "weights")
        origin["weights"] = str(absolute_path(weights))
    if config.is_run_complete(saved.tokens) and not is_run(folder):
        raise ValueError(
            f"nothing is left to train at {saved.tokens:,} of {config.training.total_tokens:,} tokens: fork from an "
            "earlier state, or raise training.total_tokens"
        )

    def create() -> Run:
        with lock.hold(folder) if hosts.is_first() else contextlib.nullcontext():
            if not is_run(folder):
                metadata = run_metadata(shards.prepare_tokens(config.data), config)
                states.copy_state(saved, folder)
                return create_run(folder, config, metadata | {"forked_from": origin})
            run = open_run(folder)
            if run.metadata.get("forked_from") != origin:
                raise ValueError(f"{folder} holds another run: choose a --workdir that does not exist")
            return run

    return hosts.run_on_first_then_rest(create)


def state_at(source: Run, at_tokens: int) -> SavedState:
    """Return the training state that `source` saved at the mark `at_tokens`.

    Raises:
        ValueError: There is none; the message lists those that exist.
    """
    # The step that reached `at_tokens` ended less than one batch past it.
    for saved in source.states:
        if 0 <= saved.tokens - at_tokens < source.config.batch_tokens:
            return saved
    have = ", ".join(f"{s.tokens:,}" for s in source.states) or "none"
    raise ValueError(
        f"{source.path} has no training state at {at_tokens:,} tokens (it has: {have}): name one of these, or train "
        f"with --config.checkpoint.keep_states_at_tokens={at_tokens}"
    )
