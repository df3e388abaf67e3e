"""Disk space of the snapshots and states of a run, the time to write and merge them, and memory of the block mean."""

import math

import jax

from pma_jax.config import Config
from pma_jax.runs.snapshots import snapshot_retention_mask
from pma_jax.runs.states import state_retention_mask
from pma_jax.training.state import TrainState


def tree_bytes(tree: object) -> int:
    """Return the size in bytes of the arrays of a tree, concrete or abstract, without Orbax's metadata on disk."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: object) -> int:
    """Return the size in bytes of the shards that one device holds of a tree."""
    shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * size for shape, size in shards)


def estimate_storage_bytes(config: Config, state: TrainState) -> dict[str, object]:
    """Estimate how many snapshots and training states a run saves and retains, and the disk space that they take.

    Args:
        config: Configuration of the run.
        state: Abstract training state.

    Returns:
        Counts of snapshots and states, and bytes: of one of each, at the end of the run, and at most.
    """
    checkpoint = config.checkpoint
    step_ends = range(config.batch_tokens, config.training.total_tokens + config.batch_tokens, config.batch_tokens)
    snapshots = [tokens for tokens in step_ends if config.is_snapshot_due(tokens)]
    states = [tokens for tokens in step_ends if config.is_state_due(tokens)]
    snapshots_kept = sum(snapshot_retention_mask(config, snapshots))
    states_kept = sum(state_retention_mask(config, states))
    snapshot_bytes, state_bytes = tree_bytes(state.params), tree_bytes(state)
    # A snapshot or state is removed only after the next one is complete, so the peak has one more of each.
    saved_bytes = len(checkpoint.kinds) * snapshot_bytes
    peak_extra = saved_bytes * (snapshots_kept < len(snapshots)) + state_bytes * (states_kept < len(states))
    at_end = saved_bytes * snapshots_kept + state_bytes * states_kept
    return {
        "snapshot_bytes": snapshot_bytes,
        "state_bytes": state_bytes,
        "kinds": list(checkpoint.kinds),
        "interval_tokens": checkpoint.interval_tokens,
        "window": checkpoint.window,
        "window_bytes": checkpoint.window * snapshot_bytes,
        "snapshots_saved_of_each_kind": len(snapshots),
        "snapshots_kept_of_each_kind": snapshots_kept,
        "states_saved": len(states),
        "states_kept": states_kept,
        "bytes_at_the_end": at_end,
        "bytes_at_most": at_end + peak_extra,
        # Device memory of the running block mean.
        "block_mean_bytes_per_device": 0 if state.block is None else bytes_per_device(state.block),
    }


def estimate_storage_seconds(config: Config, state: TrainState, bytes_per_second: float) -> dict[str, float]:
    """Estimate the seconds to write one snapshot, to write one training state, and to merge one window.

    A merge reads `checkpoint.window` snapshots and writes one. `bytes_per_second` is the bandwidth of the storage, for
    reads and writes alike.
    """
    snapshot = tree_bytes(state.params) / bytes_per_second
    return {
        "bytes_per_second": bytes_per_second,
        "write_snapshot_seconds": snapshot,
        "write_state_seconds": tree_bytes(state) / bytes_per_second,
        "merge_window_seconds": (config.checkpoint.window + 1) * snapshot,
    }
