"""Merge stored checkpoints into stored checkpoints, as `pma merge` does. Imports neither JAX nor Orbax."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError
from pma_jax.merging import recipes
from pma_jax.merging.engine import merge as engine
from pma_jax.merging.engine.plan import MergePlan, plan
from pma_jax.merging.engine.rounding import validate_weights
from pma_jax.merging.gather import (
    CheckpointSeries,
    check_snapshots_match,
    load_used,
    open_each,
    order_advice,
    snapshot_metadata,
)
from pma_jax.merging.ordering import order_checkpoints
from pma_jax.runtime.formatting import format_memory_bytes
from pma_jax.storage.digests import drop_digests
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.paths import as_path

# Recipes that compute weights from token positions, not only from the order.
_BY_POSITION = ("decay", "lagfree", "power")


def plan_merge(
    series: CheckpointSeries, recipe_texts: Sequence[str], **options: Any
) -> tuple[MergePlan, CheckpointSeries]:
    """Plan one merge per recipe, so that all merges read each checkpoint only once.

    Args:
        series: The checkpoints, oldest first.
        recipe_texts: Recipes, as `recipes.parse` reads them.
        **options: `dtype`, `integers`, `format`, `memory_limit_bytes`, `shard_bytes` and `is_alone` of
            `engine.plan.plan`.

    Returns:
        The plan, and the checkpoints that have a nonzero coefficient.

    Raises:
        UserError: A recipe is invalid or does not fit the checkpoints, or they cannot be merged.
    """
    if len(set(recipe_texts)) < len(recipe_texts):
        raise UserError("two recipes are the same: leave one out")
    return plan_rows(
        series, np.stack([recipe_coefficients(text, series) for text in recipe_texts]), recipe_texts, **options
    )


def plan_rows(
    series: CheckpointSeries, rows: np.ndarray, recipe_texts: Sequence[str], **options: Any
) -> tuple[MergePlan, CheckpointSeries]:
    """Plan one merge per row of coefficients, float64 [R, K]; otherwise as `plan_merge`."""
    series, rows = load_used(series, rows)
    merge_plan = plan(series.sources, rows, recipes=recipe_texts, metadata=_merged_metadata(series.sources), **options)
    return merge_plan, series


def merge(
    addresses: Sequence[str | Path], weights: ArrayLike, out: str | Path, recipe: str = "weights"
) -> list[CheckpointSource]:
    """Write the merge sum_k weights[k] * checkpoint_k to `out`, record `recipe` in its provenance, return the sources.

    Each weight belongs to the address at its index, in any order. The newest checkpoint is added last, and gives the
    output its step, tokens and configuration; if the newest is not known, it is the last address.

    Raises:
        UserError: An address stands for several checkpoints, one is given twice, or as `plan_merge` and `engine.merge`;
            nothing is published then.
    """
    row = validate_weights(np.atleast_2d(weights), len(addresses))[0]
    sources, stages = zip(*open_each(addresses), strict=True)
    check_snapshots_match(sources)
    newest = order_checkpoints(sources, stages).indices[-1]
    indices = [*(i for i in range(len(sources)) if i != newest), newest]
    sources = [sources[i] for i in indices]
    engine.merge(plan(sources, row[indices], recipes=[recipe], metadata=_merged_metadata(sources)), [out])
    return sources


def recipe_coefficients(text: str, series: CheckpointSeries) -> np.ndarray:
    """Return the coefficients of a recipe, float64 [K].

    Raises:
        UserError: They depend on the order or the positions of the checkpoints, which are not known.
    """
    recipe = recipes.parse(text)
    positions, unit = series.positions, series.unit
    has_ties = (np.diff(positions) == 0).any()
    if recipe.name in _BY_POSITION and len(positions) > 1 and (has_ties or unit not in ("tokens", "steps")):
        raise UserError(
            f"{text} computes weights from tokens, which are not known or not increasing here: "
            "give --tokens-per-step, or another recipe"
        )
    row = recipes.coefficients(text, np.arange(len(positions)) if has_ties else positions)
    for a, b in itertools.pairwise(range(len(positions))):
        if positions[a] == positions[b] and row[a] != row[b]:
            doubt = series.doubt or f"{series.sources[a].origin} and {series.sources[b].origin} have the same position"
            raise UserError(f"{text} gives unequal weights: {order_advice(doubt)}")
    if recipe.name == "weights" and series.is_reordered and len(set(row.tolist())) > 1:
        raise UserError(
            f"{text}: the weights are for the checkpoints oldest first, and the command names them in another order: "
            "name them oldest first, or give --order given"
        )
    return row


def output_paths(out: str | Path, recipe_texts: Sequence[str]) -> list[Path]:
    """Return the output directory of each recipe: `out` for a single one, else a subdirectory named by the recipe."""
    if len(recipe_texts) == 1:
        return [as_path(out)]
    return [as_path(out) / text.replace(":", "-").replace("/", "-") for text in recipe_texts]


def describe_merge(merge_plan: MergePlan, series: CheckpointSeries, outs: Sequence[Path]) -> dict[str, Any]:
    """Return a planned merge as JSON values: inputs with their coefficients, bytes, memory, outputs, notes."""
    inputs = [
        source.identity | {"bytes": source.nbytes, "coefficients": merge_plan.coefficients[:, k].tolist()}
        for k, source in enumerate(merge_plan.sources)
    ]
    return {
        "recipes": list(merge_plan.recipes),
        "inputs": inputs,
        "leaves": len(merge_plan.leaves),
        "outs": [str(out) for out in outs],
        "format": merge_plan.format,
        "dtype": merge_plan.dtype,
        "read_bytes": merge_plan.read_bytes,
        "write_bytes": merge_plan.write_bytes,
        "memory_bytes": merge_plan.schedule.memory_bytes,
        "cores": merge_plan.schedule.threads * merge_plan.schedule.processes,
        "notes": [*series.notes, *merge_plan.notes],
    }


def format_plan(description: Mapping[str, Any]) -> str:
    """Format the result of `describe_merge` as lines of text, for --dry-run."""
    lines = [f"inputs, oldest first, and their coefficients in {', '.join(description['recipes'])}:"]
    for entry in description["inputs"]:
        position = f"  step {entry['step']:,}" if entry["step"] is not None else ""
        position = f"  {entry['tokens']:,} tokens" if entry["tokens"] is not None else position
        weights = "  ".join(f"{c:+.6f}" for c in entry["coefficients"])
        lines.append(f"  {weights}{position}  {entry['source']}")
    read, written, memory = (format_memory_bytes(description[f"{name}_bytes"]) for name in ("read", "write", "memory"))
    lines.append(
        f"{description['leaves']} leaves; reads {read}, writes {written} of {description['format']} "
        f"(dtype {description['dtype']}), about {memory} of memory, {description['cores']} cores"
    )
    lines += [f"would write {out}" for out in description["outs"]]
    return "\n".join(lines)


def format_result(description: Mapping[str, Any]) -> str:
    """Format the result of `describe_merge`, with `seconds` added, as lines of text about the finished merge."""
    inputs = description["inputs"]
    known = [entry["tokens"] for entry in inputs if entry["tokens"] is not None]
    span = f" ({known[0]:,} to {known[-1]:,} tokens)" if len(known) == len(inputs) else ""
    names = ", ".join(description["recipes"])
    written = "\n".join(f"written to {out}" for out in description["outs"])
    return f"{names} of {len(inputs)} checkpoints{span} in {description['seconds']:.1f} s\n{written}"


def _merged_metadata(sources: Sequence[CheckpointSource]) -> dict[str, Any] | None:
    """Return the metadata that makes the merge a pma_jax snapshot, if all inputs are pma_jax snapshots; else None."""
    metadata = [snapshot_metadata(source) for source in sources]
    newest = metadata[-1]
    return drop_digests(newest) | {"loss": None} if newest is not None and all(metadata) else None
