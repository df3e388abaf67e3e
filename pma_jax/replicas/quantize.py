"""Quantisation of outer gradients, which are sent in 8 or 4 bits, with one float32 scale per leaf and device.

    int8, int4   integers from -(2^(b-1) - 1) to 2^(b-1) - 1, times scale = max |g| / (2^(b-1) - 1)
    e3m0         a sign and a power of two: 0, or sign 2^e with e from -2 to 3, times scale = the median of the |g| that
                 are not 0, of at most 1,024 values at equal distances, rounded down to the precision of bfloat16

Values of 4 bits travel two per byte. What arrives is added in float32.

Sources: Douillard et al., arXiv 2501.18512, for sending E3M0 and adding in float32; the levels and the scale are those
of a public implementation for MLX (grove), which has one scale for the whole model, the median of all values, and does
not pack. The median of a sample is enough, because levels are a factor of 2 apart, and that of all values takes one
pass through memory per bit. Other tables of E3M0 exist, with a seventh magnitude.

Dimensions: L leaves, S values of a sample.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

Kind = Literal["int8", "int4", "e3m0"]
E3M0_LOWEST = -2  # exponent of the lowest level
# Times the scale, the lowest magnitude of each level: the midpoint of 0 and 2^-2, and those of neighbours in log space.
E3M0_BOUNDS = (2.0**-3, *(2.0 ** (e + 0.5) for e in range(E3M0_LOWEST, 3)))
E3M0_SAMPLE = 1024


def leaf_scales(leaves: list[jax.Array], kind: Kind) -> list[jax.Array]:
    """Return the scale of each float32 array, a scalar; 1 where all values are 0."""
    if kind != "e3m0":
        highest = 127 if kind == "int8" else 7
        scales = [jnp.max(jnp.abs(x)) / highest for x in leaves]
    else:
        medians = _lower_medians_of_positive(jnp.stack([_sample(jnp.abs(x).reshape(-1)) for x in leaves]))
        # A sample of a sparse leaf may have zeros only.
        largest = [jnp.max(jnp.abs(x)) for x in leaves]
        scales = [jnp.where(median > 0, median, high) for median, high in zip(medians, largest, strict=True)]
    return [jnp.where(scale > 0, scale, 1.0) for scale in scales]


def quantize_leaf(x: jax.Array, scale: jax.Array, kind: Kind) -> jax.Array:
    """Return the level of each value of a float32 array, int8 of its shape.

    A level of E3M0 is 0, or a number from 1 for the lowest power to 6 for the highest, with the sign of the value.
    """
    if kind != "e3m0":
        return jnp.round(x / scale).astype(jnp.int8)
    level = sum((jnp.abs(x) >= bound * scale).astype(jnp.int8) for bound in E3M0_BOUNDS)
    return jnp.where(x < 0, -level, level)


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


def _sample(x: jax.Array) -> jax.Array:
    """Return values of `x` [N] at equal distances, and zeros up to E3M0_SAMPLE.

    The distance is odd, so that not all of them are of the same few columns of a matrix.
    """
    sample = x[:: math.ceil(x.size / E3M0_SAMPLE) | 1]
    return jnp.pad(sample, (0, E3M0_SAMPLE - sample.size))


def _lower_medians_of_positive(sizes_LxS: jax.Array) -> jax.Array:
    """Return the lower median of the positive values of each row, which has no negative ones; 0 if there are none.

    Rounds values down to the precision of bfloat16, the upper 16 bits of a float32. Floats that are not negative sort
    as their bits do. So the value of a rank is determined bit by bit, which is faster than sorting.
    """
    bits_LxS = (jax.lax.bitcast_convert_type(sizes_LxS.astype(jnp.float32), jnp.uint32) >> 16).astype(jnp.uint16)
    count_L = jnp.sum(bits_LxS > 0, axis=1)
    rank_L = sizes_LxS.shape[1] - count_L + (count_L - 1) // 2

    def narrow(i: jax.Array, found_L: jax.Array) -> jax.Array:
        candidate_L = found_L | (jnp.uint32(1) << (14 - i).astype(jnp.uint32)).astype(jnp.uint16)  # the sign is 0
        below_L = jnp.sum(bits_LxS < candidate_L[:, None], axis=1)
        return jnp.where(below_L <= rank_L, candidate_L, found_L)

    found_L = jax.lax.fori_loop(0, 15, narrow, jnp.zeros(count_L.shape, jnp.uint16))
    median_L = jax.lax.bitcast_convert_type(found_L.astype(jnp.uint32) << 16, jnp.float32)
    return jnp.where(count_L > 0, median_L, 0)
