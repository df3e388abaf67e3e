"""Leaves that a merge does not sum, such as integers: they must be equal in all sources."""

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.merging.engine.plan import MergePlan
from pma_jax.merging.engine.schedule import BLOCK_ELEMENTS
from pma_jax.storage.formats.open import read_leaf_bytes
from pma_jax.storage.formats.source import CheckpointSource


def check_unsummed_leaves_equal(plan: MergePlan) -> list[str]:
    """Check that leaves which cannot be averaged (integers, for example) are equal in all sources.

    Called before any unit is merged. Integer and boolean leaves may differ if the plan takes those of the newest
    source; in that case return a note that names them.
    """
    unequal: dict[bool, list[str]] = {True: [], False: []}  # by whether the dtype is integer or boolean
    for name, leaf in plan.sources[0].leaves.items():
        different = None if leaf.is_summed else _find_different_source(plan, name)
        if different is not None:
            unequal[leaf.is_integer].append(f"{name} ({leaf.dtype}) in {different.origin}")
    integers, others = unequal[True], unequal[False]
    if others:
        raise UserError(
            f"{len(others)} leaves are not equal in all checkpoints, and their dtypes cannot be averaged: "
            f"{'; '.join(others[:10])}; remove them, or convert them to another dtype"
        )
    if integers and plan.integers == "equal":
        raise UserError(
            f"{len(integers)} integer or boolean leaves are not equal in all checkpoints and cannot be averaged: "
            f"{'; '.join(integers[:10])}; to take those of the newest checkpoint, give --integers newest"
        )
    newest = plan.sources[-1].origin
    names = ", ".join(name.partition(" (")[0] for name in integers[:10])
    return [f"{len(integers)} integer leaves differ, and are those of {newest}: {names}"] if integers else []


def _find_different_source(plan: MergePlan, name: str) -> CheckpointSource | None:
    """Return a source whose leaf `name` differs from the first source's; None if the leaf is equal in all sources."""
    leaf = plan.sources[0].leaves[name]
    # Read complete regions (what TensorStore decodes at once), or the complete leaf if it is stored as zstd frames, so
    # that nothing is decoded twice.
    default_elements = leaf.elements if name in plan.schedule.zstd_leaves else BLOCK_ELEMENTS
    elements_per_read = plan.schedule.region_elements.get(name, default_elements)
    for start in range(0, leaf.elements, elements_per_read):
        stop = min(start + elements_per_read, leaf.elements)
        first = read_leaf_bytes(plan.sources[0], name, start, stop)
        for source in plan.sources[1:]:
            if not np.array_equal(first, read_leaf_bytes(source, name, start, stop)):
                return source
    return None
