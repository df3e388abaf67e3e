"""Estimate the disk space of a run's snapshots and training states, and the time to write and merge them."""

import math

import jax

from pma_jax.config import Config
from pma_jax.runs.snapshots import snapshot_retention_mask
from pma_jax.runs.states import state_retention_mask
from pma_jax.training.state import TrainState


def tree_bytes(tree: object) -> int:
    """Return the total bytes of the arrays, or of the ShapeDtypeStructs, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: object) -> int:
    """Return the bytes of a sharded tree that each device holds."""
    shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * size for shape, size in shards)


def estimate_storage_bytes(config: Config, state: TrainState) -> dict[str, object]:
    """Estimate how many snapshots and training states a run saves and keeps, and the disk space that they take.

    Args:
        config: Configuration of the run.
        state: Abstract training state.

    Returns:
        A dict with the numbers of snapshots and states that the run saves and keeps, the bytes of one snapshot, one
        state and one window of snapshots, the total bytes at the end of the run and at the peak, and the device memory
        of the running block mean.
    """
    checkpoint = config.checkpoint
    end_tokens = range(config.batch_tokens, config.training.total_tokens + config.batch_tokens, config.batch_tokens)
    snapshot_tokens = [tokens for tokens in end_tokens if config.is_snapshot_due(tokens)]
    state_tokens = [tokens for tokens in end_tokens if config.is_state_due(tokens)]
    snapshots_kept = sum(snapshot_retention_mask(config, snapshot_tokens))
    states_kept = sum(state_retention_mask(config, state_tokens))
    snapshot_bytes, state_bytes = tree_bytes(state.params), tree_bytes(state)
    # A snapshot or state is removed only after the next one is complete, so the peak has one more of each.
    save_bytes = len(checkpoint.kinds) * snapshot_bytes
    peak_extra = save_bytes * (snapshots_kept < len(snapshot_tokens)) + state_bytes * (states_kept < len(state_tokens))
    at_end = save_bytes * snapshots_kept + state_bytes * states_kept
    return {
        "snapshot_bytes": snapshot_bytes,
        "state_bytes": state_bytes,
        "kinds": list(checkpoint.kinds),
        "interval_tokens": checkpoint.interval_tokens,
        "window": checkpoint.window,
        "window_bytes": checkpoint.window * snapshot_bytes,
        "snapshots_saved_of_each_kind": len(snapshot_tokens),
        "snapshots_kept_of_each_kind": snapshots_kept,
        "states_saved": len(state_tokens),
        "states_kept": states_kept,
        "bytes_at_the_end": at_end,
        "bytes_at_most": at_end + peak_extra,
        # Memory of a device, not disk: the running mean of the parameters over the current block.
        "block_mean_bytes_per_device": 0 if state.block is None else bytes_per_device(state.block),
    }


def estimate_write_and_merge_seconds(config: Config, state: TrainState, bytes_per_second: float) -> dict[str, float]:
    """Estimate the seconds to write one snapshot, to write one training state, and to merge one window.

    A merge reads `checkpoint.window` snapshots and writes one. `bytes_per_second` is the bandwidth of the storage, for
    reads and writes alike.
    """
    snapshot_seconds = tree_bytes(state.params) / bytes_per_second
    return {
        "bytes_per_second": bytes_per_second,
        "write_snapshot_seconds": snapshot_seconds,
        "write_state_seconds": tree_bytes(state) / bytes_per_second,
        "merge_window_seconds": (config.checkpoint.window + 1) * snapshot_seconds,
    }
