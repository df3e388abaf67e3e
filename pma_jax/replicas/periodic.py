"""Periodic averaging, also called local SGD or FedAvg: every H tokens, each worker continues from the mean.

    theta_k <- (1/K) sum_j theta_j

The optimizer's moments stay those of each worker, or are averaged as the parameters are (`replicas.periodic_moments`).
With H of one step and SGD, it is data-parallel training.

Source: McMahan et al., arXiv 1602.05629, Algorithm 1; Stich, arXiv 1805.09767, Algorithm 1.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pma_jax.config import ReplicasConfig
from pma_jax.replicas.workers import Tree, Workers, axis_size, on_shards, sum_over_devices


def init(config: ReplicasConfig, params: Tree) -> None:
    """Return what is kept between two averages: nothing."""
    del config, params


def sync(config: ReplicasConfig, workers: Workers) -> Workers:
    """Average the parameters of the workers, and their moments if the configuration says so."""
    workers = dataclasses.replace(workers, params=average(workers.params))
    if not config.periodic_moments:
        return workers
    return dataclasses.replace(workers, moments=average(workers.moments))


def average(tree: Tree) -> Tree:
    """Replace each worker's leaves by the mean over the workers; integers, such as step counts, are left alone."""

    def replace(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        # Not `worker_mean`: XLA would fuse its sum of slices with the copies, and add them once per copy.
        return jnp.broadcast_to(sum_over_devices(x.sum(0)) / (x.shape[0] * axis_size()), x.shape)

    return on_shards(lambda shards: [replace(x) for x in shards], tree)
