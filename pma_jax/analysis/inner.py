"""The inner product of two parameter trees."""

from typing import Any

import jax
import jax.numpy as jnp


def inner(first: Any, second: Any) -> jax.Array:
    """Sum over all leaves of first · second, float32; every device sums its own shards before any travel."""
    # Not a dot of flattened leaves: flattening a sharded leaf would gather it.
    products = jax.tree.map(lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), first, second)
    return sum(jax.tree.leaves(products), jnp.zeros(()))
