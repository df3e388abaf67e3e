"""Metrics of a train step with several workers, [K, ...]: per worker of this process, and averaged over all workers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Metrics = dict[str, Any]


def of_local_workers(metrics: Metrics) -> list[Metrics]:
    """Return the metrics of each worker whose devices belong to this process, as NumPy arrays."""
    local = jax.tree.map(_local_rows, metrics)
    return [jax.tree.map(lambda leaf, k=k: leaf[k], local) for k in range(len(local["loss"]))]


def over_all_workers(metrics: Metrics) -> Metrics:
    """Return the metrics of all workers as NumPy arrays: the mean loss of all targets, and means of the others.

    The result has no `spike`, which is a reading per worker. All processes must call this function.
    """
    return jax.device_get(_average(metrics))


def _local_rows(leaf: jax.Array) -> np.ndarray:
    """Return the rows [k, ...] of an array [K, ...] that this process holds, in the order of the workers."""
    rows = {shard.index[0].start or 0: np.asarray(shard.data) for shard in leaf.addressable_shards}
    return np.concatenate([rows[start] for start in sorted(rows)])


@jax.jit
def _average(metrics: Metrics) -> Metrics:
    share_K = metrics["count"] / jnp.maximum(metrics["count"].sum(), 1)
    means = {name: value.mean(0) for name, value in metrics.items() if name not in ("loss", "count", "spike")}
    return {"loss": (metrics["loss"] * share_K).sum(), "count": metrics["count"].sum()} | means
