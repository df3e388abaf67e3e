"""Fresh parameters: float32, with their sharding from the start."""

import math

import jax.numpy as jnp
from flax import nnx
from jax import P


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], spec: P, fan_in: int, gain: float = 1.0) -> nnx.Param:
    """Normal of standard deviation gain / sqrt(fan_in), cut off at twice that."""
    initializer = nnx.initializers.truncated_normal(stddev=gain / math.sqrt(fan_in))
    return nnx.Param(initializer(rngs.params(), shape, jnp.float32, out_sharding=spec))


def ones(size: int) -> nnx.Param:
    """The scale of a norm."""
    return nnx.Param(jnp.ones((size,), jnp.float32))
