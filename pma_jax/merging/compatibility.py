"""Check that parameter trees can be averaged, and move them to common shardings."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from pma_jax.config.errors import UserError
from pma_jax.runs.integrity import named_leaves
from pma_jax.storage.formats.source import leaf_differences

_CODES = ("float4_", "float6_", "float8_e8m0")


def check_same_structure(first: Any, other: Any, name: str) -> None:
    """Raise an error if two trees differ in leaf names, shapes, dtypes or container types.

    Args:
        first: Tree of arrays or ShapeDtypeStructs.
        other: The tree to compare.
        name: Name of `other` in the message, for example "checkpoint 3".

    Raises:
        UserError: The trees differ; the message names up to 10 leaves and counts the others.
    """
    leaves, treedef = jax.tree.flatten(first)
    other_leaves, other_treedef = jax.tree.flatten(other)
    if treedef == other_treedef and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(leaves, other_leaves, strict=True)
    ):
        return  # without naming the leaves, which takes longer than the sum of small trees
    problems = leaf_differences(named_leaves(first, "/"), named_leaves(other, "/"))
    if problems:
        raise UserError(f"{name} differs from the first in {_format(problems)}")
    if treedef != other_treedef:
        raise UserError(f"{name} differs from the first in container types (dict, list, class); the leaves match")


def check_equal_integers(first: Any, other: Any, name: str) -> None:
    """Raise an error if integer or boolean leaves of two trees differ.

    The trees must have the same structure and shardings. Each process compares only its addressable shards.

    Raises:
        UserError: The trees differ; the message names up to 10 leaves and counts the others.
    """
    if all(is_float(x.dtype) for x in jax.tree.leaves(first)):
        return
    unequal = [
        path
        for (path, a), b in zip(named_leaves(first, "/").items(), jax.tree.leaves(other), strict=True)
        if not is_float(a.dtype)
        and not all(np.array_equal(x, y) for x, y in zip(_local_shards(a), _local_shards(b), strict=True))
    ]
    if unequal:
        raise UserError(
            "leaves that are not floating point are not averaged and must be equal; "
            f"{name} differs in {_format(unequal)}"
        )


def device_put_like(params: Any, like: Any) -> Any:
    """Move each leaf to the sharding of the same leaf of `like`, a tree of arrays or ShapeDtypeStructs."""

    def put(x: Any, target: Any) -> jax.Array:
        sharding = getattr(target, "sharding", None)
        # `device_put` would return such an array unchanged, but takes 0.1 ms.
        is_there = isinstance(x, jax.Array) and x.committed and x.sharding == sharding
        return x if is_there else jax.device_put(x, sharding)

    return jax.tree.map(put, params, like)


def check_64_bit_leaves(params: Any) -> None:
    """Raise an error if JAX would change leaves by converting them to 32 bits, as it does without `jax_enable_x64`.

    Raises:
        UserError: A leaf is float64 or complex128, or has integers that need 64 bits.
    """
    if all(np.dtype(x.dtype).itemsize < 8 for x in jax.tree.leaves(params)):
        return
    for name, x in named_leaves(params, "/").items():
        dtype, narrow = np.dtype(x.dtype), jax.dtypes.canonicalize_dtype(x.dtype)
        if dtype == narrow:
            continue
        if jnp.issubdtype(dtype, jnp.inexact) or not np.array_equal(np.asarray(x).astype(narrow), x):
            raise UserError(
                f"{name} is {dtype}, which JAX would convert to {narrow}: set JAX_ENABLE_X64=1, or merge in storage "
                "(pma merge)"
            )


@functools.cache
def is_float(dtype: DTypeLike) -> bool:
    """Return whether leaves of a dtype are averaged: floating-point numbers, which also have negative values.

    Leaves of other dtypes (integers, booleans, complex numbers, codes of quantised weights) must be equal.
    """
    dtype = jnp.dtype(dtype)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and not dtype.name.startswith(_CODES)


def _local_shards(x: Any) -> list[np.ndarray]:
    return [np.asarray(s.data) for s in x.addressable_shards] if isinstance(x, jax.Array) else [np.asarray(x)]


def _format(problems: list[str]) -> str:
    shown = sorted(problems)[:10]
    more = f"; … and {len(problems) - 10} more" if len(problems) > 10 else ""
    return f"{len(problems)} {'leaf' if len(problems) == 1 else 'leaves'}: {'; '.join(shown)}{more}"
