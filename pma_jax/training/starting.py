"""What a new run begins with: random weights, or those of a snapshot, such as an imported model.

A router's bias is no weight (`model.moe`). Where the snapshot has one, the run must keep one, and begins with it:
without it other experts would be chosen. Where the snapshot has none, as models of Hugging Face have none, a run that
keeps one begins it at zero, which chooses as none does.
"""

import dataclasses

from etils import epath

from pma_jax.config import Config, ModelConfig
from pma_jax.model.decoder import Params
from pma_jax.model.moe import ROUTER_BIAS
from pma_jax.runs import snapshots
from pma_jax.runs.directory import Run, find_snapshots, is_run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runs.states import SavedState
from pma_jax.training.state import TrainState, make_state, with_params

# Keys of the model that may differ from the snapshot's: the weights mean the same.
_FREE = frozenset({"compute_dtype", "remat", "scan_layers", "logits_chunk_tokens", "separator_token"})
# Keys that only one kind of model reads.
_DENSE = frozenset({"hidden"})
_MIXTURE = frozenset(
    {"experts_per_token", "expert_hidden", "shared_experts", "router_scores", "router_normalized", "router_bias"}
)


def check_start(config: Config, workdir: epath.PathLike) -> None:
    """Check `training.start_from` of a run that is still to be made in `workdir`.

    Raises ValueError when it is no snapshot, or one of another model, naming the keys to change.
    """
    if config.training.start_from and not is_run(workdir):
        _snapshot(config, config.training.start_from, "training.start_from")


def starting_state(config: Config, abstract: TrainState) -> TrainState:
    """A fresh state on the devices of the mesh that is set, with the weights that `training.start_from` names.

    The optimizer, the tokens and the data begin anew. Raises as `check_start` does.
    """
    state = make_state(config)
    if not config.training.start_from:
        return state
    return _with_weights(state, _snapshot(config, config.training.start_from, "training.start_from"), config, abstract)


def check_weights(config: Config, weights: epath.PathLike) -> None:
    """Raise ValueError when `weights` is no snapshot, or one of another model than `config`'s."""
    _snapshot(config, weights, "weights")


def forked_state(run: Run, resumed: SavedState, state: TrainState, abstract: TrainState) -> TrainState:
    """`state`, restored from `resumed`; where a fork begins with weights of its own, with those.

    Optimizer, data position and counters stay the parent's. Raises ValueError when the weights are no longer there.
    """
    origin = run.metadata.get("forked_from", {})
    if "weights" not in origin or resumed.tokens != origin["tokens"]:
        return state
    return _with_weights(state, _snapshot(run.config, origin["weights"], "weights"), run.config, abstract)


def _with_weights(state: TrainState, snapshot: Snapshot, config: Config, abstract: TrainState) -> TrainState:
    if not _has_bias(config.model) or _has_bias(snapshot.config.model):
        return with_params(config, state, snapshots.restore_params(snapshot, abstract.params))
    params = snapshots.restore_params(snapshot, _without_bias(abstract.params))
    params["blocks"]["moe"][ROUTER_BIAS] = state.params["blocks"]["moe"][ROUTER_BIAS]
    return with_params(config, state, params)


def _snapshot(config: Config, path: epath.PathLike, given_as: str) -> Snapshot:
    snapshot = find_snapshots([path])[-1]
    ours, theirs = dataclasses.asdict(config.model), dataclasses.asdict(snapshot.config.model)
    free = _FREE | (_DENSE if snapshot.config.model.experts else _MIXTURE)
    if _has_bias(config.model) and not _has_bias(snapshot.config.model):
        free |= {"router_bias"}
    differing = [
        f"--config.model.{key}={value}" for key, value in theirs.items() if value != ours[key] and key not in free
    ]
    if differing:
        raise ValueError(f"{given_as}: {path} is another model: give {' '.join(differing)}")
    return snapshot


def _has_bias(model: ModelConfig) -> bool:
    return model.experts > 0 and model.router_bias


def _without_bias(params: Params) -> Params:
    moe = {name: leaf for name, leaf in params["blocks"]["moe"].items() if name != ROUTER_BIAS}
    return params | {"blocks": params["blocks"] | {"moe": moe}}
