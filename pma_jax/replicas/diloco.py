"""DiLoCo: every H tokens, an outer optimizer moves the outer parameters by the mean change of the workers.

    Delta   = (1/K) sum_k (theta - theta_k)          the outer gradient; theta are the outer parameters
    v       <- Delta + beta v
    theta   <- theta - eta (Delta + beta v)          with Nesterov's momentum; without it, theta <- theta - eta v
    theta_k <- theta

The moments of the inner optimizer stay those of each worker. With eta = 1 and beta = 0 it is periodic averaging. With
one worker it is SNOO (Kallusky et al., arXiv 2510.15830), Nesterov's momentum on the changes of a single run.

Source: Douillard et al., arXiv 2311.08105, Algorithm 1, where Nesterov with eta = 0.7 and beta = 0.9 is the best outer
optimizer (Section 3.2). In exo gym's code the first average comes after H + 1 steps; here it comes after H.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from pma_jax.config import ReplicasConfig
from pma_jax.replicas.workers import Tree, Workers, broadcast, mean

Outer = dict[str, Tree]  # "params": theta; "momentum": v, both with the shapes of the parameters


def init(config: ReplicasConfig, params: Tree) -> Outer:
    """Return the outer parameters, which begin at those of the workers, and an outer momentum of 0."""
    del config
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def sync(config: ReplicasConfig, workers: Workers) -> Workers:
    """Take a step of the outer optimizer; each worker continues from the new outer parameters."""
    count = jax.tree.leaves(workers.params)[0].shape[0]
    theta = workers.outer["params"]
    change = jax.tree.map(lambda outer, inner: outer - inner, theta, mean(workers.params))
    optimizer = optax.trace(config.diloco_momentum, config.diloco_nesterov)
    theta, momentum = outer_step(optimizer, config.diloco_rate, change, theta, workers.outer["momentum"])
    return Workers(broadcast(theta, count), workers.moments, {"params": theta, "momentum": momentum})


def outer_step(
    optimizer: optax.GradientTransformation, rate: float, change: Tree, theta: Tree, momentum: Tree
) -> tuple[Tree, Tree]:
    """Apply one step of SGD with momentum, as `optax.sgd` does; return the new theta and its momentum.

    Args:
        optimizer: The momentum, an `optax.trace`.
        rate: The learning rate.
        change: The outer gradient.
        theta: The outer parameters.
        momentum: Their momentum.
    """
    updates, state = optimizer.update(change, optax.TraceState(momentum))
    moved: Any = jax.tree.map(lambda leaf, update: leaf - rate * update, theta, updates)
    return moved, cast(optax.TraceState, state).trace
