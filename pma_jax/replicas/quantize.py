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


def quantize_leaf(x: jax.Array, kind: Kind) -> tuple[jax.Array, jax.Array]:
    """Return the level of each value of a float32 array, int8 of its shape, and their float32 scale.

    A level of E3M0 is 0, or a number from 1 for the lowest power to 6 for the highest, with the sign of the value.
    """
    magnitude = jnp.abs(x)
    if kind != "e3m0":
        highest = 127 if kind == "int8" else 7
        scale = _positive(jnp.max(magnitude) / highest)
        return jnp.round(x / scale).astype(jnp.int8), scale
    scale = _positive(_median_of_positive(magnitude.reshape(-1)))
    magnitude /= scale
    exponent = jnp.clip(jnp.round(jnp.log2(jnp.maximum(magnitude, E3M0_SMALLEST))), E3M0_LOWEST, E3M0_HIGHEST)
    level = jnp.where(magnitude < E3M0_SMALLEST, 0, exponent - E3M0_LOWEST + 1)
    return jnp.where(x < 0, -level, level).astype(jnp.int8), scale


def dequantize_leaf(levels: jax.Array, scale: jax.Array, kind: Kind) -> jax.Array:
    """Return the float32 values that levels stand for."""
    if kind != "e3m0":
        return levels * scale
    # Not a lookup in a table of levels: XLA takes minutes to compile such a gather for TPU.
    power = 2.0**E3M0_LOWEST * (1 << jnp.maximum(jnp.abs(levels) - 1, 0).astype(jnp.int32))
    return jnp.sign(levels) * power * scale


def pack(levels: jax.Array, kind: Kind) -> jax.Array:
    """Pack levels into uint8 [bytes]: one of int8 per byte, two of 4 bits, the first in the lower half."""
    flat = levels.reshape(-1)
    if kind == "int8":
        return jax.lax.bitcast_convert_type(flat, jnp.uint8)
    codes = jnp.pad((flat + 8).astype(jnp.uint8), (0, flat.size % 2))
    return codes[::2] | (codes[1::2] << 4)


def unpack(codes: jax.Array, kind: Kind, shape: tuple[int, ...]) -> jax.Array:
    """Return the levels of `shape` that `pack` packed, int8."""
    if kind == "int8":
        return jax.lax.bitcast_convert_type(codes, jnp.int8).reshape(shape)
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)[: math.prod(shape)]
    return nibbles.astype(jnp.int8).reshape(shape) - 8


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
