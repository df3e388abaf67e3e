"""What a run leaves on disk, and the time to write and to merge it."""

import math

import jax

from pma_jax.config import Config
from pma_jax.runs.snapshots import kept_snapshots
from pma_jax.runs.states import kept_states
from pma_jax.training.state import TrainState


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays of a tree of abstract leaves; on disk Orbax adds some kilobytes of names and shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: object) -> int:
    """The same, of one device's shards."""
    shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * size for shape, size in shards)


def snapshot_save_points(config: Config) -> list[int]:
    """Tokens at which a run to the horizon saves a snapshot of each kind."""
    return sorted(_marks(config, config.checkpoint.interval_tokens) | {_horizon(config)})


def state_save_points(config: Config) -> list[int]:
    """Tokens at which it saves a full state."""
    named = {_step_end(config, t) for t in config.checkpoint.keep_states_at_tokens if 0 < t <= _horizon(config)}
    return sorted(_marks(config, config.checkpoint.state_interval_tokens) | named | {_horizon(config)})


def summarize_storage(config: Config, state: TrainState) -> dict[str, object]:
    """Counts and bytes of what is saved and what is kept, by the retention rules that the run itself follows.

    Args:
      config: the run's.
      state: abstract.
    """
    keep = config.checkpoint
    snapshots, states = snapshot_save_points(config), state_save_points(config)
    kept = sum(kept_snapshots(config, snapshots))
    states_kept = sum(kept_states(config, states))
    snapshot_bytes, state_bytes = tree_bytes(state.params), tree_bytes(state)
    # The old one goes when the new one is there.
    beside = len(keep.kinds) * (kept < len(snapshots)) * snapshot_bytes + (states_kept < len(states)) * state_bytes
    at_end = len(keep.kinds) * kept * snapshot_bytes + states_kept * state_bytes
    return {
        "snapshot_bytes": snapshot_bytes,
        "state_bytes": state_bytes,
        "kinds": list(keep.kinds),
        "interval_tokens": keep.interval_tokens,
        "window": keep.window,
        "window_bytes": keep.window * snapshot_bytes,
        "snapshots_saved_of_each_kind": len(snapshots),
        "snapshots_kept_of_each_kind": kept,
        "states_saved": len(states),
        "states_kept": states_kept,
        "bytes_at_the_end": at_end,
        "bytes_at_most": at_end + beside,
        "block_mean_bytes_per_device": 0 if state.block is None else bytes_per_device(state.block),
    }


def estimate_storage_seconds(config: Config, state: TrainState, bytes_per_second: float) -> dict[str, float]:
    """Seconds to write a snapshot, to write a state, and to merge a window: N snapshots read, one written."""
    snapshot = tree_bytes(state.params) / bytes_per_second
    return {
        "bytes_per_second": bytes_per_second,
        "write_snapshot_seconds": snapshot,
        "write_state_seconds": tree_bytes(state) / bytes_per_second,
        "merge_window_seconds": (config.checkpoint.window + 1) * snapshot,
    }


def _marks(config: Config, interval_tokens: int) -> set[int]:
    last = _horizon(config) // interval_tokens
    return {_step_end(config, k * interval_tokens) for k in range(1, last + 1)}


def _horizon(config: Config) -> int:
    return _step_end(config, config.training.total_tokens)


def _step_end(config: Config, tokens: int) -> int:
    """Tokens at the end of the step that reaches `tokens`."""
    return -(-tokens // config.batch_tokens) * config.batch_tokens
