"""Estimate the disk space of a run's snapshots and training states, and the time to write and merge them."""

import math

import jax

from pma_jax.config import SNAPSHOT_KINDS, WORKER_SNAPSHOTS, Config
from pma_jax.runs import retention
from pma_jax.runs.states import STATES
from pma_jax.training.state import TrainState, worker_dim


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
    kept = [
        len(retention.tokens_to_keep(config, folder, published, end_tokens[-1], []))
        for folder, published in ((SNAPSHOT_KINDS[checkpoint.kinds[0]].folder, snapshot_tokens), (STATES, state_tokens))
    ]
    # A snapshot or state is removed only after the next one is complete, so the peak has one more of each.
    most = [
        min(retention.peak_snapshots(config, snapshot_tokens, state_tokens) + 1, len(snapshot_tokens)),
        min(kept[1] + 1, len(state_tokens)),
    ]
    snapshot_bytes, state_bytes = tree_bytes(state.params) // (worker_dim(state.params) or 1), tree_bytes(state)
    workers = worker_dim(state.params) if WORKER_SNAPSHOTS in checkpoint.kinds else 0
    kinds = [kind for kind in checkpoint.kinds if kind in SNAPSHOT_KINDS]
    sizes = [(len(kinds) + workers) * snapshot_bytes, state_bytes]
    return {
        "snapshot_bytes": snapshot_bytes,
        "state_bytes": state_bytes,
        "kinds": list(checkpoint.kinds),
        "interval_tokens": checkpoint.interval_tokens,
        "window": checkpoint.window,
        "window_bytes": checkpoint.window * snapshot_bytes,
        "snapshots_saved_of_each_kind": len(snapshot_tokens),
        "snapshots_kept_of_each_kind": kept[0],
        "states_saved": len(state_tokens),
        "states_kept": kept[1],
        "bytes_at_the_end": sum(n * size for n, size in zip(kept, sizes, strict=True)),
        "bytes_at_most": sum(n * size for n, size in zip(most, sizes, strict=True)),
        # Memory of a device, not disk: the running mean of the parameters over the current block.
        "block_mean_bytes_per_device": 0 if state.block is None else bytes_per_device(state.block),
    }


def estimate_write_and_merge_seconds(
    config: Config, state: TrainState, hosts: int, bytes_per_second: float, host_bytes_per_second: float
) -> dict[str, float]:
    """Estimate the seconds to write one snapshot, to write one training state, and to merge one window.

    A merge reads `checkpoint.window` snapshots and writes one. It is as long as this takes, because the additions run
    meanwhile: those of the mesh read and write device memory, which is faster than any storage.

    Args:
        config: Configuration of the run.
        state: Abstract training state.
        hosts: Hosts of the run. All of them write snapshots and states, and merge with `--on mesh`.
        bytes_per_second: Bandwidth of the storage for all hosts together, for reads and writes alike.
        host_bytes_per_second: Bandwidth between one host and the storage.
    """
    one_host, all_hosts = (min(bytes_per_second, n * host_bytes_per_second) for n in (1, hosts))
    snapshot_bytes = tree_bytes(state.params) // (worker_dim(state.params) or 1)
    merge_bytes = (config.checkpoint.window + 1) * snapshot_bytes
    return {
        "hosts": hosts,
        "bytes_per_second": bytes_per_second,
        "host_bytes_per_second": host_bytes_per_second,
        "write_snapshot_seconds": snapshot_bytes / all_hosts,
        "write_state_seconds": tree_bytes(state) / all_hosts,
        "merge_window_seconds": merge_bytes / one_host,
        "merge_window_on_mesh_seconds": merge_bytes / all_hosts,
    }
