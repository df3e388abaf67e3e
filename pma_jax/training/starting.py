"""What a new run begins with: random weights, or those of a snapshot, such as an imported model."""

import dataclasses

from etils import epath

from pma_jax import checkpoint
from pma_jax.checkpoint import Snapshot
from pma_jax.config import Config
from pma_jax.training.state import TrainState, make_state

# Keys of the model that may differ from the snapshot's: the weights mean the same.
_FREE = frozenset({"compute_dtype", "remat", "scan_layers", "logits_chunk_tokens", "separator_token"})


def check_start(config: Config, workdir: epath.PathLike) -> None:
    """Check `training.start_from` of a run that is still to be made in `workdir`.

    Raises ValueError when it is no snapshot, or one of another model, naming the keys to change.
    """
    if config.training.start_from and not checkpoint.is_run(workdir):
        _snapshot(config)


def starting_state(config: Config, abstract: TrainState) -> TrainState:
    """A fresh state on the devices of the mesh that is set, with the weights that `training.start_from` names.

    The optimizer, the tokens and the data begin anew. Raises as `check_start` does.
    """
    state = make_state(config)
    if not config.training.start_from:
        return state
    return dataclasses.replace(state, params=checkpoint.restore_params(_snapshot(config), abstract.params))


def _snapshot(config: Config) -> Snapshot:
    path = config.training.start_from
    snapshot = checkpoint.find_snapshots([path])[-1]
    ours, theirs = dataclasses.asdict(config.model), dataclasses.asdict(snapshot.config.model)
    differing = [
        f"--config.model.{key}={value}" for key, value in theirs.items() if value != ours[key] and key not in _FREE
    ]
    if differing:
        raise ValueError(f"training.start_from: {path} is another model: give {' '.join(differing)}")
    return snapshot
