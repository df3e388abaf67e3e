"""Quantisation of outer gradients, which are sent in 8 or 4 bits, with one float32 scale per leaf and device.

    int8, int4   integers from -(2^(b-1) - 1) to 2^(b-1) - 1, times scale = max |g| / (2^(b-1) - 1)
    e3m0         a sign and a power of two: 0, or sign 2^e with e from -2 to 3, times scale = the median of the |g| that
                 are not 0

Values of 4 bits travel two per byte. What arrives is added in float32.

Sources: Douillard et al., arXiv 2501.18512, for sending E3M0 and adding in float32; the levels and the scale are those
of a public implementation for MLX (grove), which has one scale for the whole model and does not pack. Other tables of
E3M0 exist, with a seventh magnitude.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

Kind = Literal["int8", "int4", "e3m0"]
E3M0_LOWEST, E3M0_HIGHEST = -2, 3  # exponents
E3M0_SMALLEST = 2.0**-3  # times the scale: smaller values are 0; the midpoint of 0 and 2^-2


def encode(x: jax.Array, kind: Kind) -> tuple[jax.Array, jax.Array]:
    """Return the codes of a float32 array, as uint8 [bytes], and their float32 scale."""
    flat = x.reshape(-1)
    if kind == "int8":
        scale, codes = _integers(flat, 127)
        return jax.lax.bitcast_convert_type(codes, jnp.uint8), scale
    if kind == "int4":
        scale, codes = _integers(flat, 7)
        return _pack(codes + 8), scale
    magnitude = jnp.abs(flat)
    scale = _positive(_median_of_positive(magnitude))
    magnitude /= scale
    exponent = jnp.clip(jnp.round(jnp.log2(jnp.maximum(magnitude, E3M0_SMALLEST))), E3M0_LOWEST, E3M0_HIGHEST)
    level = jnp.where(magnitude < E3M0_SMALLEST, 0, exponent - E3M0_LOWEST + 1).astype(jnp.int8)  # 0 to 6
    return _pack(level + 8 * (flat < 0)), scale


def decode(codes: jax.Array, scale: jax.Array, kind: Kind, shape: tuple[int, ...]) -> jax.Array:
    """Return the float32 array of `shape` that `encode` encoded."""
    if kind == "int8":
        return (jax.lax.bitcast_convert_type(codes, jnp.int8) * scale).reshape(shape)
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)[: math.prod(shape)].astype(jnp.int8)
    if kind == "int4":
        return ((nibbles - 8) * scale).reshape(shape)
    level, sign = nibbles & 7, jnp.where(nibbles & 8, -1.0, 1.0)
    # Not a lookup in a table of levels: XLA takes minutes to compile such a gather for TPU.
    magnitude = jnp.where(level > 0, 2.0**E3M0_LOWEST * (1 << jnp.maximum(level - 1, 0).astype(jnp.int32)), 0.0)
    return (sign * magnitude * scale).reshape(shape)


def _integers(flat: jax.Array, highest: int) -> tuple[jax.Array, jax.Array]:
    scale = _positive(jnp.max(jnp.abs(flat)) / highest)
    return scale, jnp.round(flat / scale).astype(jnp.int8)


def _median_of_positive(x: jax.Array) -> jax.Array:
    """Return the median of the positive values of `x` [N], which has no negative ones; 0 if there are none.

    Floats that are not negative sort as their bits do. So the value of a rank is determined bit by bit, with one pass
    through `x` per bit, which is faster than the sort of `jnp.median`.
    """
    width = 8 * x.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))
    count = jnp.sum(bits > 0)
    lower_rank, upper_rank = x.size - count + (count - 1) // 2, x.size - count + count // 2

    def narrow(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.ones((), bits.dtype) << (width - 2 - i).astype(bits.dtype))
        return jnp.where(jnp.sum(bits < candidate) <= lower_rank, candidate, found)

    lower = jax.lax.fori_loop(0, width - 1, narrow, jnp.zeros((), bits.dtype))  # the sign is always 0
    next_above = jnp.min(jnp.where(bits > lower, bits, bits.max()))
    upper = jnp.where(jnp.sum(bits <= lower) > upper_rank, lower, next_above)
    both = jax.lax.bitcast_convert_type(jnp.stack([lower, upper]), x.dtype)
    return jnp.where(count > 0, both.mean(), 0)


def _positive(scale: jax.Array) -> jax.Array:
    """Return the scale, or 1 where it is 0, because all values are."""
    return jnp.where(scale > 0, scale, 1.0)


def _pack(codes: jax.Array) -> jax.Array:
    """Pack codes below 16 into bytes, the first of a pair in the lower half."""
    codes = jnp.pad(codes.astype(jnp.uint8), (0, codes.size % 2))
    return codes[::2] | (codes[1::2] << 4)
