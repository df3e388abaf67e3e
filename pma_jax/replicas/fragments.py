"""Fragments of a model: ranges of its layers, of which Streaming DiLoCo averages one after the other.

The parameters of the blocks are stacked along their first dim, the layers. A fragment is a range of layers; the first
one also has the embedding, the last one all other parameters (the final norm and the output projection).
"""

import jax

from pma_jax.replicas.workers import Tree

EMBEDDING = "embedding_VxD"


def layer_range(fragment: int, fragments: int, layers: int) -> tuple[int, int]:
    """Return the first layer of a fragment, and the one after its last."""
    return fragment * layers // fragments, (fragment + 1) * layers // fragments


def take(tree: Tree, fragment: int, fragments: int, dim: int = 0) -> list[jax.Array]:
    """Return the leaves of a fragment: those of its layers are slices.

    Args:
        tree: The parameters, or a tree of the same structure.
        fragment: Number of the fragment, from 0.
        fragments: Number of fragments.
        dim: The dim of the layers: 1 if the first one is that of the workers.
    """
    taken = []
    for path, leaf in jax.tree.flatten_with_path(tree)[0]:
        index = _index(path, leaf, fragment, fragments, dim)
        if index is not None:
            taken.append(leaf[index])
    return taken


def put(tree: Tree, part: list[jax.Array], fragment: int, fragments: int, dim: int = 0) -> Tree:
    """Return `tree` with the leaves of a fragment, in the order of `take`."""
    remaining = iter(part)

    def replace(path: tuple, leaf: jax.Array) -> jax.Array:
        index = _index(path, leaf, fragment, fragments, dim)
        return leaf if index is None else leaf.at[index].set(next(remaining))

    return jax.tree.map_with_path(replace, tree)


def _index(path: tuple, leaf: jax.Array, fragment: int, fragments: int, dim: int) -> tuple[slice, ...] | None:
    """Return the index of a fragment's part of a leaf; None if it has none."""
    if path[0].key == "blocks":
        return *[slice(None)] * dim, slice(*layer_range(fragment, fragments, leaf.shape[dim]))
    owner = 0 if path[0].key == EMBEDDING else fragments - 1
    return (slice(None),) if fragment == owner else None
