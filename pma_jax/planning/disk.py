"""Disk space of the snapshots and states of a run, and the time to write and merge them."""

import math

import jax

from pma_jax.config import Config
from pma_jax.runs.snapshots import snapshot_retention_mask
from pma_jax.runs.states import state_retention_mask
from pma_jax.training.state import TrainState


def tree_bytes(tree: object) -> int:
    """Return the bytes of all arrays of a tree of abstract leaves; Orbax adds some kilobytes of metadata on disk."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: object) -> int:
    """Return the bytes of the shards of a tree on one device."""
    shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * size for shape, size in shards)


def summarize_storage(config: Config, state: TrainState) -> dict[str, object]:
    """Count the snapshots and states that a run saves and keeps, and their bytes, by the retention rules of the run.

    Args:
        config: Configuration of the run.
        state: Abstract training state.

    Returns:
        Counts and bytes, serialisable as JSON.
    """
    keep = config.checkpoint
    step_ends = range(config.batch_tokens, config.training.total_tokens + config.batch_tokens, config.batch_tokens)
    snapshots = [tokens for tokens in step_ends if config.is_snapshot(tokens)]
    states = [tokens for tokens in step_ends if config.is_state(tokens)]
    kept = sum(snapshot_retention_mask(config, snapshots))
    states_kept = sum(state_retention_mask(config, states))
    snapshot_bytes, state_bytes = tree_bytes(state.params), tree_bytes(state)
    # An old checkpoint is removed only after the new one is complete, so the peak has one more of each.
    peak_extra = len(keep.kinds) * (kept < len(snapshots)) * snapshot_bytes + (states_kept < len(states)) * state_bytes
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
        "bytes_at_most": at_end + peak_extra,
        "block_mean_bytes_per_device": 0 if state.block is None else bytes_per_device(state.block),
    }


def estimate_storage_seconds(config: Config, state: TrainState, bytes_per_second: float) -> dict[str, float]:
    """Return the seconds to write a snapshot or a state, and to merge a window (read N snapshots, write one)."""
    snapshot = tree_bytes(state.params) / bytes_per_second
    return {
        "bytes_per_second": bytes_per_second,
        "write_snapshot_seconds": snapshot,
        "write_state_seconds": tree_bytes(state) / bytes_per_second,
        "merge_window_seconds": (config.checkpoint.window + 1) * snapshot,
    }
