"""Forking: a new run from another run's training state, to anneal, change the data, or try another learning rate."""

import contextlib
from typing import Any

from etils import epath

from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.runs import lock, states
from pma_jax.runs.directory import Run, create_run, is_run, open_run
from pma_jax.runs.states import SavedState
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import check_mesh, make_mesh
from pma_jax.storage.paths import absolute_path
from pma_jax.training.initial_state import find_compatible_snapshot
from pma_jax.training.resume import prepare_inputs
from pma_jax.training.state import abstract_state
from pma_jax.training.worker_count import abstract_as_saved


def fork(
    source: Run, at_tokens: int, config: Config, workdir: epath.PathLike, weights: epath.PathLike | None = None
) -> Run:
    """Create a run in `workdir` that starts from the training state of `source` at `at_tokens`; `loop.train` trains it.

    The state provides the parameters, the optimizer state and the data position; `config` decides the rest. If
    `workdir` already holds a fork of the same state with the same `weights`, open that run with
    its own configuration. It is not compared with `config` here: `loop.train` raises UserError if a key that affects
    the results differs.

    Args:
        source: The run to fork.
        at_tokens: Token count to fork at, for example one from `checkpoint.keep_states_at_tokens`. The fork starts from
            the state of `source` that was saved at this count or less than one batch after it.
        config: Configuration of the new run.
        workdir: Directory of the new run.
        weights: Path of a snapshot, a merge (PMA-init: training starts from merged parameters) or a run, whose newest
            snapshot is taken. Its parameters replace those of the state when training starts. Do not delete it before
            the new run has saved its first training state.

    Raises:
        UserError: `source` has no training state for `at_tokens`, `config` leaves nothing to train or does not fit its
            mesh, `weights` does not hold parameters of this model, or `workdir` holds a different run.
    """
    # The mesh comes first: listing the states initializes the JAX backend, after which the device count is fixed.
    mesh = make_mesh(config.mesh)
    check_mesh(config, mesh)
    saved, folder = state_at(source, at_tokens), absolute_path(workdir)
    origin: dict[str, Any] = {"path": str(source.path), "tokens": saved.tokens, "step": saved.step}
    if weights is not None:
        find_compatible_snapshot(config, weights, "weights")  # raises if there is none
        origin["weights"] = str(absolute_path(weights))
    if config.is_run_complete(saved.tokens) and not is_run(folder):
        raise UserError(
            f"nothing is left to train at {saved.tokens:,} of {config.training.total_tokens:,} tokens: fork from an "
            "earlier state, or raise training.total_tokens"
        )

    metadata = {}
    if not is_run(folder):
        # Before anything is written.
        states.check_fits(saved, abstract_as_saved(saved, abstract_state(config, mesh)))
        metadata = prepare_inputs(config, is_new=config.evaluation != source.config.evaluation)[1]

    def create() -> Run:
        with lock.hold(folder) if hosts.is_first_process() else contextlib.nullcontext():
            if not is_run(folder):
                states.copy_state(saved, folder)
                return create_run(folder, config, metadata | {"forked_from": origin})
            run = open_run(folder)
            if run.metadata.get("forked_from") != origin:
                raise UserError(f"{folder} already holds a different run: choose a new --workdir")
            return run

    return hosts.run_on_first_then_rest(create)


def state_at(source: Run, at_tokens: int) -> SavedState:
    """Return the training state that `source` saved after the first step that reached `at_tokens`.

    Raises:
        UserError: `source` has no such state. The message lists the token counts of its states.
    """
    # The step that reached `at_tokens` ended less than one batch past it.
    for saved in source.states:
        if 0 <= saved.tokens - at_tokens < source.config.batch_tokens:
            return saved
    available = ", ".join(f"{s.tokens:,}" for s in source.states) or "none"
    raise UserError(
        f"{source.path} has no training state at {at_tokens:,} tokens (it has: {available}): name one of these, or "
        f"train with --config.checkpoint.keep_states_at_tokens={at_tokens}"
    )
