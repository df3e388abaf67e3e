"""Validation that parameter trees can be averaged: equal names, shapes, dtypes and integer leaves; common shardings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from pma_jax.runs.integrity import named_leaves
from pma_jax.storage.formats.source import leaf_differences


def check_same_structure(first: Any, other: Any, name: str) -> None:
    """Raise unless two trees have the same leaf names, shapes and dtypes.

    Args:
        first: Tree of arrays or ShapeDtypeStructs.
        other: The tree to compare.
        name: Name of `other` in the message, for example "checkpoint 3".

    Raises:
        ValueError: They differ; the message names the first 10 leaves and counts the others.
    """
    problems = leaf_differences(named_leaves(first, "/"), named_leaves(other, "/"))
    if not problems and jax.tree.structure(first) != jax.tree.structure(other):
        problems = ["the containers (dict, list, class) are of other types"]
    if problems:
        raise ValueError(f"{name} differs from the first in {_format(problems)}")


def check_equal_integers(first: Any, other: Any, name: str) -> None:
    """Raise unless the integer and boolean leaves of two trees are equal; each process compares its addressable shards.

    Raises:
        ValueError: They differ; the message names the first 10 leaves and counts the others.
    """
    unequal = [
        path
        for (path, a), b in zip(named_leaves(first, "/").items(), jax.tree.leaves(other), strict=True)
        if not is_float(a.dtype)
        and not all(np.array_equal(x, y) for x, y in zip(_local_shards(a), _local_shards(b), strict=True))
    ]
    if unequal:
        raise ValueError(f"{name} differs from the first in integer leaves, which are not averaged: {_format(unequal)}")


def device_put_like(params: Any, like: Any) -> Any:
    """Move each leaf to the sharding of that leaf in `like`, a tree of arrays or ShapeDtypeStructs."""
    return jax.tree.map(lambda x, target: jax.device_put(x, getattr(target, "sharding", None)), params, like)


def is_float(dtype: DTypeLike) -> bool:
    """Return whether a dtype is floating point, so that its leaves are averaged; False for integers and booleans.

    Raises:
        ValueError: The dtype is neither, for example complex.
    """
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return True
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        return False
    raise ValueError(f"leaves of dtype {dtype} cannot be averaged: leave them out")


def _local_shards(x: Any) -> list[np.ndarray]:
    return [np.asarray(s.data) for s in x.addressable_shards] if isinstance(x, jax.Array) else [np.asarray(x)]


def _format(problems: list[str]) -> str:
    shown = sorted(problems)[:10]
    more = f"; … and {len(problems) - 10} more" if len(problems) > 10 else ""
    return f"{len(problems)} {'leaf' if len(problems) == 1 else 'leaves'}: {'; '.join(shown)}{more}"
