"""Quantisation of outer gradients, which are sent in 8 or 4 bits, with one float32 scale per leaf and device.

    int8, int4   integers from -(2^(b-1) - 1) to 2^(b-1) - 1, times scale = max |g| / (2^(b-1) - 1)
    e3m0         a sign and a power of two: 0, or sign 2^e with e from -2 to 3, times scale = the median of the |g| that
                 are not 0, of at most 512 values at equal distances, rounded down to the precision of bfloat16

Values of 4 bits travel two per byte. What arrives is added in float32.

Sources: Douillard et al., arXiv 2501.18512, for sending E3M0 and adding in float32; the levels and the scale are those
of a public implementation for MLX (grove), which has one scale for the whole model, the median of all values, and does
not pack. The median of a sample is enough, because levels are a factor of 2 apart, and that of all values takes one
pass through memory per bit. Other tables of E3M0 exist, with a seventh magnitude.

Dimensions: K workers of a device, L leaves, N values of a leaf, S values of a sample.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pma_jax.replicas.workers import IN_BOUNDS

Kind = Literal["int8", "int4", "e3m0"]
E3M0_LOWEST, E3M0_HIGHEST = -2, 3  # exponents
E3M0_SMALLEST = 2.0**-3  # times the scale: smaller values are 0; the midpoint of 0 and 2^-2
E3M0_SAMPLE = 512  # values of a leaf from which its scale is computed


def leaf_scales(leaves_K: list[jax.Array], kind: Kind) -> list[jax.Array]:
    """Return the scale [K] of each array [K, ...] of K workers; 1 where all values are 0."""
    magnitudes = [jnp.abs(x).reshape(x.shape[0], -1) for x in leaves_K]
    largest_KxL = jnp.stack([_largest(x_KxN) for x_KxN in magnitudes], axis=1)
    if kind == "e3m0":
        median_KxL = _lower_medians_of_positive(jnp.stack([_sample(x_KxN) for x_KxN in magnitudes], axis=1))
        # The sample of a sparse leaf may have zeros only.
        scale_KxL = jnp.where(median_KxL > 0, median_KxL, largest_KxL)
    else:
        scale_KxL = largest_KxL / (127 if kind == "int8" else 7)
    scale_KxL = jnp.where(scale_KxL > 0, scale_KxL, 1.0)
    return [scale_KxL[:, i] for i in range(len(leaves_K))]


def quantize_leaf(x: jax.Array, scale: jax.Array, kind: Kind) -> jax.Array:
    """Return the level of each value of a float32 array, int8 of its shape.

    A level of E3M0 is 0, or a number from 1 for the lowest power to 6 for the highest, with the sign of the value.
    """
    if kind != "e3m0":
        return jnp.round(x / scale).astype(jnp.int8)
    ratio = jnp.abs(x / scale).astype(jnp.float32)
    # The exponent of the float sqrt(2) * ratio is log2(ratio), rounded to the nearest integer.
    bits = jax.lax.bitcast_convert_type(ratio * math.sqrt(2), jnp.int32)
    exponent = jnp.clip((bits >> 23) - 127, E3M0_LOWEST, E3M0_HIGHEST)
    level = jnp.where(ratio < E3M0_SMALLEST, 0, exponent - E3M0_LOWEST + 1).astype(jnp.int8)
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


def _largest(x_KxN: jax.Array) -> jax.Array:
    """Return the largest value [K] of each row.

    On CPU, XLA compares one pair of values at a time in a reduction, but several in an element-wise operation. So
    reduce a row to a quarter of its length first, by the element-wise maximum of four slices, which may overlap.
    """
    size = x_KxN.shape[1]
    length = -(-size // 4)
    starts = [min(i * length, size - length) for i in range(4)]
    slices = [jax.lax.slice_in_dim(x_KxN, start, start + length, axis=1) for start in starts]
    return jnp.max(functools.reduce(jnp.maximum, slices), axis=1)


def _sample(x_KxN: jax.Array) -> jax.Array:
    """Return values [K, S] at equal distances, and zeros up to E3M0_SAMPLE.

    The distance is odd, so that not all of them are of the same few columns of a matrix.
    """
    size = x_KxN.shape[1]
    index = np.arange(0, size, math.ceil(size / E3M0_SAMPLE) | 1)
    # A gather: XLA for TPU runs out of memory with a strided slice of a large array.
    sample = x_KxN.at[:, index].get(**IN_BOUNDS)
    return jnp.pad(sample, ((0, 0), (0, E3M0_SAMPLE - sample.shape[1])))


def _lower_medians_of_positive(x_KxLxS: jax.Array) -> jax.Array:
    """Return the lower median [K, L] of the positive values of each sample, which has no negative ones; 0 if none is.

    Rounds values down to the precision of bfloat16, the upper 16 bits of a float32. A value of a rank is determined bit
    by bit, which is faster than sorting.
    """
    bits_KxLxS = (jax.lax.bitcast_convert_type(x_KxLxS.astype(jnp.float32), jnp.uint32) >> 16).astype(jnp.uint16)
    count_KxL = jnp.sum(bits_KxLxS > 0, axis=-1)
    rank_KxL = x_KxLxS.shape[-1] - count_KxL + (count_KxL - 1) // 2

    def narrow(i: jax.Array, found_KxL: jax.Array) -> jax.Array:
        candidate_KxL = found_KxL | (jnp.uint32(1) << (14 - i).astype(jnp.uint32)).astype(jnp.uint16)  # the sign is 0
        below_KxL = jnp.sum(bits_KxLxS < candidate_KxL[..., None], axis=-1)
        return jnp.where(below_KxL <= rank_KxL, candidate_KxL, found_KxL)

    found_KxL = jax.lax.fori_loop(0, 15, narrow, jnp.zeros(count_KxL.shape, jnp.uint16))
    median_KxL = jax.lax.bitcast_convert_type(found_KxL.astype(jnp.uint32) << 16, jnp.float32)
    return jnp.where(count_KxL > 0, median_KxL, 0)
