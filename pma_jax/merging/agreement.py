"""What must agree before parameter trees are averaged: names, shapes, dtypes, and integer leaves' values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike


def check_same(first: Any, other: Any, name: str, dtypes: bool = True) -> None:
    """Refuses a tree whose leaves are not those of the first: names, shapes, and dtypes (or their kind only).

    Args:
      first: tree of arrays or ShapeDtypeStructs.
      other: the tree to compare.
      name: what to call `other`, for example "checkpoint 3".
      dtypes: whether dtypes must be equal; otherwise float against integer is still refused.

    Raises:
      ValueError: they differ; names the first 10 leaves and says how many there are.
    """
    wanted, found = (
        {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)} for tree in (first, other)
    )
    problems = [f"{path} is missing" for path in wanted.keys() - found.keys()]
    problems += [f"{path} is not in the first" for path in found.keys() - wanted.keys()]
    for path in wanted.keys() & found.keys():
        a, b = wanted[path], found[path]
        if tuple(a.shape) != tuple(b.shape):
            problems.append(f"{path} has shape {tuple(b.shape)} and not {tuple(a.shape)}")
        elif a.dtype != b.dtype and (dtypes or is_float(a.dtype) != is_float(b.dtype) or not is_float(a.dtype)):
            problems.append(f"{path} is {b.dtype} and not {a.dtype}")
    if not problems and jax.tree.structure(first) != jax.tree.structure(other):
        problems = ["the containers (dict, list, class) are of other types"]
    if problems:
        raise ValueError(f"{name} differs from the first in {_listed(problems)}")


def check_equal_integers(first: Any, other: Any, name: str) -> None:
    """Refuses a tree whose integer or boolean leaves are not the first's. Each process compares its own shards.

    Raises:
      ValueError: names the leaves that differ (first 10 and a count).
    """
    unequal = [
        leaf_name(path)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(other), strict=True)
        if not is_float(a.dtype) and not equal(a, b)
    ]
    refuse_unequal(unequal, name)


def equal(a: Any, b: Any) -> bool:
    """Whether two arrays of the same sharding hold the same values, as far as this process holds them."""
    return all(np.array_equal(x, y) for x, y in zip(_shards(a), _shards(b), strict=True))


def refuse_unequal(unequal: list[str], name: str) -> None:
    """Raises ValueError when integer leaves are listed as unequal."""
    if unequal:
        raise ValueError(f"{name} differs from the first in integer leaves, which are not averaged: {_listed(unequal)}")


def place(params: Any, like: Any) -> Any:
    """Moves leaves to the shardings of `like` (arrays or ShapeDtypeStructs); those already there are not copied."""
    return jax.tree.map(lambda x, target: jax.device_put(x, getattr(target, "sharding", None)), params, like)


def is_float(dtype: DTypeLike) -> bool:
    """Whether leaves of this dtype are averaged; integers and booleans are not. Raises ValueError for others."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return True
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        return False
    raise ValueError(f"leaves of dtype {dtype} cannot be averaged: leave them out")


def _shards(x: Any) -> list[np.ndarray]:
    return [np.asarray(s.data) for s in x.addressable_shards] if isinstance(x, jax.Array) else [np.asarray(x)]


def _listed(problems: list[str]) -> str:
    shown = sorted(problems)[:10]
    more = f"; … and {len(problems) - 10} more" if len(problems) > 10 else ""
    return f"{len(problems)} {'leaf' if len(problems) == 1 else 'leaves'}: {'; '.join(shown)}{more}"


def leaf_name(path: tuple) -> str:
    """A leaf's name in messages, such as `layers/up`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
