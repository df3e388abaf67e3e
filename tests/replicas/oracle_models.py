"""The models of the oracles: one that is linear in its parameters, and a decoder; and their inner optimizer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from pma_jax.config import ModelConfig, OptimizerConfig
from pma_jax.model.decoder import abstract_params, graph_definition
from pma_jax.model.loss import loss_sums
from pma_jax.runtime.mesh import MeshConfig, make_mesh

LAYERS, WIDTH = 4, 3
RATE = 0.05
# Epsilon is large, so that AdamW does not amplify the rounding of gradients near 0.
OPTIMIZER = OptimizerConfig(weight_decay=0.1, clip_norm=0.0, epsilon=1e-3)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with blocks of `LAYERS` layers.

    Attributes:
        start: From a generator, the parameters from which all workers start, as a flat dict in float64.
        inputs: From a generator, the numbers of steps and of workers, the inputs of each.
        slopes: From a tree with a leading dim of workers and the inputs of each, the gradient of each worker.
    """

    start: Callable[[np.random.Generator], dict[str, np.ndarray]]
    inputs: Callable[[np.random.Generator, int, int], np.ndarray]
    slopes: Callable[[Any, np.ndarray], Any]


def to_tree(flat):
    """Return the nested dict of a flat one."""
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def to_flat(tree):
    """Return the flat dict of a nested one, as NumPy arrays."""
    return {name: np.asarray(leaf) for name, leaf in flax.traverse_util.flatten_dict(tree, sep="/").items()}


def linear_loss(tree, x):
    """Return the mean squared error of a model that is linear in its parameters, at inputs [batch, LAYERS, WIDTH]."""
    blocks = tree["blocks"]
    y = jnp.einsum("bli,lij->bj", x, blocks["w"]) + blocks["b"].sum(0)
    y += tree["embedding_VxD"][:2].sum(0) + tree["final_norm_D"]
    return ((y - x[:, 0, ::-1]) ** 2).mean()


def _linear_start(rng):
    shapes = {
        "blocks/b": (LAYERS, WIDTH),
        "blocks/w": (LAYERS, WIDTH, WIDTH),
        "embedding_VxD": (5, WIDTH),
        "final_norm_D": (WIDTH,),
    }
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


LINEAR = Model(
    start=_linear_start,
    inputs=lambda rng, steps, count: rng.normal(size=(steps, count, 6, LAYERS, WIDTH)),
    slopes=jax.jit(jax.vmap(jax.grad(linear_loss))),
)

_DECODER = ModelConfig(vocabulary_size=32, width=8, layers=LAYERS, heads=2, kv_heads=1, head_dim=4, hidden=8)


def _decoder_start(rng):
    mesh = make_mesh(MeshConfig())
    leaves = flax.traverse_util.flatten_dict(abstract_params(_DECODER, mesh), sep="/")
    return {name: ("norm" in name) + 0.3 * rng.normal(size=leaf.shape) for name, leaf in leaves.items()}


def _decoder_slopes(tree_K, x_K):
    """Compute the gradients of the workers one by one."""
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(_DECODER, mesh))
        trees = [jax.device_put(jax.tree.map(lambda leaf, k=k: leaf[k], tree_K), shardings) for k in range(len(x_K))]
        slopes = [_decoder_gradient()(tree, x) for tree, x in zip(trees, x_K, strict=True)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *slopes)


@functools.cache
def _decoder_gradient():
    graph = graph_definition(_DECODER)

    def mean_loss(params, tokens):
        objective, sums = loss_sums(graph, params, tokens)
        return objective / sums["count"]

    return jax.jit(jax.grad(mean_loss))


DECODER = Model(
    start=_decoder_start,
    inputs=lambda rng, steps, count: rng.integers(0, 32, (steps, count, 2, 9)).astype(np.int32),
    slopes=_decoder_slopes,
)
