"""NoLoCo: every H tokens, random pairs of workers average; nothing is ever sent to all.

Each worker i has outer parameters phi_i and a momentum m_i of its own. With its partner j, and mean_ij over the two:

    Delta_i = theta_i - phi_i
    m_i     <- beta m_i + eta mean_ij(Delta) + gamma (mean_ij(phi) - phi_i)
    phi_i   <- phi_i + m_i
    theta_i <- phi_i

The two means are one message: eta mean_ij(Delta) + gamma mean_ij(phi) = mean_ij(eta theta + (gamma - eta) phi). The
pairs of all workers are one of the K - 1 rounds of a round-robin tournament, chosen at random.

With gamma = eta, the default, it is m_i <- beta m_i + eta (mean_ij(theta) - phi_i).

Source: Kolehmainen et al., arXiv 2506.10911, and its public code, whose gamma is eta; the paper calls the momentum
alpha and the rate beta, and has a gamma of its own. The code pairs a random permutation; here a round is drawn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from pma_jax.config import ReplicasConfig
from pma_jax.replicas.workers import AXIS, Tree, Workers, axis_size, broadcast, on_shards

SEED = 0  # of the choice of pairs; it is the same in all workers and runs
Outer = dict[str, Tree]  # "params": phi; "momentum": m, both [K, ...]


def init(config: ReplicasConfig, params: Tree, count: int) -> Outer:
    """Return the outer parameters of each worker, which begin at its parameters, and a momentum of 0."""
    del config
    return {"params": broadcast(params, count), "momentum": broadcast(jax.tree.map(jnp.zeros_like, params), count)}


def sync(config: ReplicasConfig, workers: Workers, step: jax.Array) -> Workers:
    """Average over random pairs of workers, chosen by the number of the step; each continues from its new phi."""
    eta, gamma = config.noloco_rate, config.noloco_pull
    phi_K, momentum_K = workers.outer["params"], workers.outer["momentum"]
    sent_K = jax.tree.map(lambda theta: eta * theta, workers.params)
    if gamma != eta:  # a product with 0 would still read all of phi
        sent_K = jax.tree.map(lambda sent, phi: sent + (gamma - eta) * phi, sent_K, phi_K)
    mean_K = pair_mean(sent_K, step)
    momentum_K = jax.tree.map(
        lambda m, pair, phi: config.noloco_momentum * m + pair - gamma * phi, momentum_K, mean_K, phi_K
    )
    phi_K = jax.tree.map(jnp.add, phi_K, momentum_K)
    # Copied, because the next step donates both.
    return Workers(jax.tree.map(jnp.copy, phi_K), workers.moments, {"params": phi_K, "momentum": momentum_K})


def pair_mean(tree: Tree, step: jax.Array) -> Tree:
    """Average [K, ...] over pairs of workers, which the number of the step decides."""
    count = jax.tree.leaves(tree)[0].shape[0]
    rounds = round_robin(count)
    number = jax.random.randint(jax.random.fold_in(jax.random.key(SEED), step), (), 0, len(rounds))

    def with_partner(shards: list[jax.Array], number: list[jax.Array]) -> list[jax.Array]:
        if axis_size() == 1:
            partner = jnp.asarray(rounds)[number[0]]
            return [(x + x[partner]) / 2 for x in shards]
        exchanges = [functools.partial(_exchange, list(enumerate(partners))) for partners in rounds.tolist()]
        received = jax.lax.switch(number[0], exchanges, shards)
        return [(x + other) / 2 for x, other in zip(shards, received, strict=True)]

    return on_shards(with_partner, tree, [jax.reshard(number, P())])


def _exchange(pairs: list[tuple[int, int]], shards: list[jax.Array]) -> list[jax.Array]:
    """Send shards along pairs (from, to) of devices along `replica`."""
    return [jax.lax.ppermute(x, AXIS, pairs) for x in shards]


def round_robin(count: int) -> np.ndarray:
    """Return the partner of each worker in each of the K - 1 rounds in which every pair meets once, int [K - 1, K]."""
    assert count % 2 == 0
    rounds = []
    for number in range(count - 1):
        circle = [0, *np.roll(np.arange(1, count), number)]  # the first stays, the others move on by one place
        partners = np.empty(count, int)
        for a, b in zip(circle[: count // 2], circle[::-1], strict=False):
            partners[a], partners[b] = b, a
        rounds.append(partners)
    return np.asarray(rounds)
