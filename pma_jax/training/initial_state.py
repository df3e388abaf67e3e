"""The initial train state: restored from the run, randomly initialized, or with the parameters of a snapshot.

The router bias is not a trained weight (`model.moe`). If the snapshot has a router bias, the run must enable
`model.router_bias` and starts from that bias, because routing would change without it. If the snapshot has none (for
example, one imported from Hugging Face), a run with `model.router_bias` initializes its bias to zero, which leaves
routing unchanged.
"""

import jax
from etils import epath

from pma_jax.config import Config, ModelConfig
from pma_jax.config.errors import UserError
from pma_jax.config.same_model import model_differences
from pma_jax.model.decoder import Params, abstract_params
from pma_jax.model.moe import ROUTER_BIAS
from pma_jax.runs import snapshots
from pma_jax.runs.directory import Run, newest_snapshot
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runs.states import Progress
from pma_jax.training import resume
from pma_jax.training.state import TrainState, begin_bema, eval_params, init_state_from_seed, replace_params
from pma_jax.training.worker_count import describe_change


def restore_or_initialize(run: Run, abstract: TrainState, warn: resume.Warn) -> tuple[TrainState, Progress]:
    """Restore the newest intact state of `run`, or initialize one, on the current mesh (`jax.set_mesh`).

    A fork created with `--weights SNAPSHOT` starts from its parent's state, with the parameters replaced by those of
    SNAPSHOT. Also verify the snapshots newer than the restored state, and move corrupt ones to RUN/damaged, so that
    training saves them again.

    Args:
        run: The run, after `resume.clean_up`.
        abstract: Shapes, dtypes and shardings of the state.
        warn: Called with a one-line message for each corrupt state or snapshot.

    Raises:
        UserError: All states are corrupt, or the snapshot to start from is missing or does not match the run's model.
    """
    params = abstract_params(run.config.model, jax.sharding.get_mesh())
    saved, state = resume.restore_newest_intact_state(run, abstract, warn)
    progress = saved.progress if saved else Progress()
    if saved and (change := describe_change(run.config, saved, abstract)):
        warn(change)
    forked_from = run.metadata.get("forked_from", {})
    if saved is None:
        state = make_initial_state(run.config, params)
    elif "weights" in forked_from and progress.tokens == forked_from["tokens"]:
        state = _with_params_of(run.config, state, forked_from["weights"], "weights", params)
    state = begin_bema(run.config, state, progress.tokens)

    def list_newer() -> list[Snapshot]:
        listed = [snapshot for folder in run.snapshot_folders for snapshot in run.read_steps(folder)]
        return [snapshot for snapshot in listed if snapshot.tokens > progress.tokens]

    for snapshot in resume.agree_on_snapshots(list_newer):
        # Verifies the snapshot: the parameters are not used.
        resume.restore_or_set_aside(run, snapshot, params, warn)
    return state, progress


def make_initial_state(config: Config, abstract: Params) -> TrainState:
    """Make a new state on the current mesh, with random parameters or those of the snapshot `training.start_from`.

    The optimizer state is new, and the step is 0. Raises as `find_compatible_snapshot` does.
    """
    state, start_from = init_state_from_seed(config), config.training.start_from
    return _with_params_of(config, state, start_from, "training.start_from", abstract) if start_from else state


def find_compatible_snapshot(config: Config, path: epath.PathLike, option: str) -> Snapshot:
    """Find the snapshot at `path` (for a run: its newest), and check that `config.model` can use its parameters.

    Args:
        config: Configuration of the run that starts from the snapshot's parameters.
        path: Path of a snapshot, a merge or a run.
        option: Name of the option that gave `path`, for error messages.

    Raises:
        UserError: There is no snapshot at `path`, or its model does not match `config` (the message lists the options
            to change).
    """
    snapshot = newest_snapshot(path)
    differing = model_differences(snapshot.config.model, config.model)
    if _has_router_bias(config.model) and not _has_router_bias(snapshot.config.model):
        differing.pop("router_bias", None)
    options = [f"--config.model.{key}={value}" for key, value in differing.items()]
    if options:
        raise UserError(f"{option}: the model of {path} does not match the run's: pass {' '.join(options)}")
    return snapshot


def _with_params_of(
    config: Config, state: TrainState, path: epath.PathLike, option: str, abstract: Params
) -> TrainState:
    """Return `state` with the parameters of a snapshot, except for a router bias that the snapshot does not have."""
    snapshot = find_compatible_snapshot(config, path, option)
    if not _has_router_bias(config.model) or _has_router_bias(snapshot.config.model):
        return replace_params(config, state, snapshots.restore_params(snapshot, abstract))
    moe = {name: leaf for name, leaf in abstract["blocks"]["moe"].items() if name != ROUTER_BIAS}
    params = snapshots.restore_params(snapshot, abstract | {"blocks": abstract["blocks"] | {"moe": moe}})
    params["blocks"]["moe"][ROUTER_BIAS] = eval_params(config, state)["blocks"]["moe"][ROUTER_BIAS]
    return replace_params(config, state, params)


def _has_router_bias(model: ModelConfig) -> bool:
    return model.experts > 0 and model.router_bias
