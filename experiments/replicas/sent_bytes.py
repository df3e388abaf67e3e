"""The bytes that a worker sends to average: exact sizes, from the configuration and the shapes of the parameters.

Counted is what a worker contributes to an average, once: the parameters, or what stands for them in fewer bits. How a
network spreads it (a ring sends it almost twice) is left out, because it is the same for all methods. A worker is one
device. Without a method, it is a data-parallel step: the gradient, in float32, after every step.
"""

import collections
import math
from typing import Any

import jax

from pma_jax.config import Config, ReplicasConfig
from pma_jax.replicas import fragments
from pma_jax.replicas.method import Sync, sync_after
from pma_jax.replicas.sparta import share_count

FLOAT32, SCALE = 4, 4  # bytes: of a number, and of the scale of a rounded leaf
BITS = {"int8": 8, "int4": 4, "e3m0": 4}


def sent_bytes(config: Config, params: Any) -> int:
    """Return the bytes that a worker sends over a complete run.

    Args:
        config: The run.
        params: Its parameters, or anything with their shapes.
    """
    step_ends = range(config.batch_tokens, config.training.total_tokens + 1, config.batch_tokens)
    if config.replicas.method == "none":
        return len(step_ends) * leaf_bytes(params)
    if config.replicas.count == 1:
        return 0
    counts = collections.Counter(sync_after(config, tokens) for tokens in step_ends)
    return sum(count * sync_bytes(config.replicas, sync, params) for sync, count in counts.items())


def sync_bytes(config: ReplicasConfig, sync: Sync, params: Any) -> int:
    """Return the bytes that a worker sends in one sync."""
    sent = 0
    if sync.outer:
        sent += leaf_bytes(params)
    if sync.share:
        sent += FLOAT32 * sum(share_count(config.sparta_share, size) for size in sizes(params))
    if sync.sent is not None:
        sent += leaf_bytes(fragment_shapes(config, sync.sent, params), config.streaming_dtype)
    return sent


def leaf_bytes(tree: Any, dtype: str = "float32") -> int:
    """Return the bytes of all leaves in a type; each rounded leaf has a scale, and 4-bit values are packed in pairs."""
    if dtype == "float32":
        return FLOAT32 * sum(sizes(tree))
    return sum(math.ceil(size * BITS[dtype] / 8) + SCALE for size in sizes(tree))


def sizes(tree: Any) -> list[int]:
    """Return the number of elements of each leaf."""
    return [math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)]


def fragment_shapes(config: ReplicasConfig, fragment: int, params: Any) -> Any:
    """Return the shapes of what is sent of a fragment."""
    plain = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    return jax.eval_shape(lambda tree: fragments.take(tree, fragment, config.streaming_fragments), plain)
