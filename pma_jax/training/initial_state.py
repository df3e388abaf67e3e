"""The state that training starts from: restored, random, or with the parameters of a snapshot in place of its own.

A router's bias is not a trained weight (`model.moe`). If the snapshot has one, the run must keep one and starts with
it: without it other experts would be chosen. If the snapshot has none, as models of Hugging Face have none, a run that
keeps one starts it at zero, which makes the same choices as no bias.
"""

import dataclasses

from etils import epath

from pma_jax.config import Config, ModelConfig
from pma_jax.model.moe import ROUTER_BIAS
from pma_jax.runs import snapshots
from pma_jax.runs.directory import Run, newest_snapshot
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runs.states import Progress
from pma_jax.training import resume
from pma_jax.training.state import TrainState, branch_state, make_state

# Keys of the model that may differ from the snapshot's: they do not change the meaning of the parameters.
_FREE = frozenset({"compute_dtype", "remat", "scan_layers", "logits_chunk_tokens", "separator_token"})
# Keys that only one kind of model reads.
_DENSE = frozenset({"hidden"})
_MIXTURE = frozenset(
    {"experts_per_token", "expert_hidden", "shared_experts", "router_scores", "router_normalized", "router_bias"}
)


def restore_or_make(run: Run, abstract: TrainState, warn: resume.Warn) -> tuple[TrainState, Progress]:
    """Restore the newest intact state of `run`, or make its first one, on the mesh that is set.

    The first state of a fork with `--weights` is its parent's, with these parameters. Corrupt snapshots past the state
    are set aside, and training takes them again.

    Args:
        run: The run; `resume.clean_up` was called.
        abstract: Shapes, dtypes and shardings of the state.
        warn: Takes a line about each corrupt state or snapshot.

    Raises:
        ValueError: All states are corrupt, or the snapshot to start from is missing or of another model.
    """
    saved, state = resume.restore_newest_intact_state(run, abstract, warn)
    progress = saved.progress if saved else Progress()
    origin = run.metadata.get("forked_from", {})
    if saved is None:
        state = make_first(run.config, abstract)
    elif "weights" in origin and progress.tokens == origin["tokens"]:
        state = _with_weights(run.config, state, origin["weights"], "weights", abstract)
    for kind in run.config.checkpoint.kinds:
        for snapshot in run.of_kind(kind):
            if snapshot.tokens > progress.tokens:
                resume.restore_or_set_aside(run, snapshot, abstract.params, warn)
    return state, progress


def make_first(config: Config, abstract: TrainState) -> TrainState:
    """Make a fresh state on the mesh that is set, with the parameters that `training.start_from` names, if any.

    The optimizer, the token count and the data start from zero. Raises as `find_weights` does.
    """
    state, start_from = make_state(config), config.training.start_from
    return _with_weights(config, state, start_from, "training.start_from", abstract) if start_from else state


def find_weights(config: Config, path: epath.PathLike, option: str) -> Snapshot:
    """Return the snapshot at `path`, or the newest of a run, whose parameters fit the model of `config`.

    Args:
        config: Configuration of the run that starts from them.
        path: A snapshot, a merge or a run.
        option: What the user set to `path`, for error messages.

    Raises:
        ValueError: It is no snapshot, or one of another model (naming the keys to change).
    """
    snapshot = newest_snapshot(path)
    ours, theirs = dataclasses.asdict(config.model), dataclasses.asdict(snapshot.config.model)
    free = _FREE | (_DENSE if snapshot.config.model.experts else _MIXTURE)
    if _has_bias(config.model) and not _has_bias(snapshot.config.model):
        free |= {"router_bias"}
    differing = [
        f"--config.model.{key}={value}" for key, value in theirs.items() if value != ours[key] and key not in free
    ]
    if differing:
        raise ValueError(f"{option}: {path} is another model: give {' '.join(differing)}")
    return snapshot


def _with_weights(
    config: Config, state: TrainState, path: epath.PathLike, option: str, abstract: TrainState
) -> TrainState:
    snapshot, like = find_weights(config, path, option), abstract.params
    if not _has_bias(config.model) or _has_bias(snapshot.config.model):
        return branch_state(config, state, snapshots.restore_params(snapshot, like))
    moe = {name: leaf for name, leaf in like["blocks"]["moe"].items() if name != ROUTER_BIAS}
    params = snapshots.restore_params(snapshot, like | {"blocks": like["blocks"] | {"moe": moe}})
    params["blocks"]["moe"][ROUTER_BIAS] = state.params["blocks"]["moe"][ROUTER_BIAS]
    return branch_state(config, state, params)


def _has_bias(model: ModelConfig) -> bool:
    return model.experts > 0 and model.router_bias
