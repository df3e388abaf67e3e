"""`pma merge`: from what a user names to merged checkpoints on disk, by the engine. Imports neither JAX nor Orbax."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.merging import recipes
from pma_jax.merging.engine import merge as engine
from pma_jax.merging.engine.plan import MergePlan, plan
from pma_jax.merging.gather import CheckpointSeries, check_same_kind, drop_unused, snapshot_metadata
from pma_jax.storage.digests import drop_digests
from pma_jax.storage.formats.open import open_source
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.paths import locate


def plan_merge(
    gathered: CheckpointSeries,
    recipe_texts: Sequence[str],
    *,
    dtype: str = "keep",
    format: str = "keep",
    memory_limit_bytes: int = 2**30,
    shard_bytes: int = 5 * 10**9,
) -> tuple[MergePlan, CheckpointSeries]:
    """The plan of one merge a recipe, all in one pass over the checkpoints; and the checkpoints that take part.

    Raises:
        ValueError: a recipe cannot be read or does not fit the checkpoints, or the plan refuses; one line.
    """
    if len(set(recipe_texts)) < len(recipe_texts):
        raise ValueError("two recipes are the same: leave one out")
    positions = gathered.positions
    if (np.diff(positions) <= 0).any():  # parallel runs, named one by one
        gathered = replace(gathered, unit="order", notes=(*gathered.notes, "several are at one position: order counts"))
        positions = np.arange(len(positions))
    by_tokens = [text for text in recipe_texts if recipes.parse(text).name in ("power", "decay")]
    if gathered.unit == "order" and by_tokens and len(positions) > 1:
        raise ValueError(
            f"{by_tokens[0]} weighs by tokens, and those of these checkpoints are not known or not increasing: "
            "give --tokens-per-step, or another recipe"
        )
    rows = np.stack([recipes.coefficients(text, positions) for text in recipe_texts])
    gathered, rows = drop_unused(gathered, rows)
    made = plan(
        gathered.sources,
        rows,
        recipes=recipe_texts,
        dtype=dtype,
        format=format,
        memory_limit_bytes=memory_limit_bytes,
        shard_bytes=shard_bytes,
        metadata=_merged_metadata(gathered.sources),
    )
    return made, gathered


def merge_one(addresses: Sequence[str | Path], weights: ArrayLike, out: str | Path, recipe: str = "weights") -> None:
    """Writes sum_k weights[k] * checkpoint k, the checkpoints in the order that is given; `recipe` is only told.

    Raises:
        ValueError: see `plan_merge` and `engine.merge`; nothing is published then.
    """
    sources = [open_source(address) for address in addresses]
    rows = np.atleast_2d(np.asarray(weights, np.float64))
    if rows.shape != (1, len(sources)):
        raise ValueError(f"{rows.size} weights for {len(sources)} snapshots: give one weight a snapshot")
    check_same_kind(sources)
    engine.merge(plan(sources, rows, recipes=[recipe], metadata=_merged_metadata(sources)), [out])


def output_paths(out: str | Path, recipe_texts: Sequence[str]) -> list[Path]:
    """The directory of each merge: `out`, or one below it for each of several recipes."""
    if len(recipe_texts) == 1:
        return [locate(out)]
    return [locate(out) / text.replace(":", "-").replace("/", "-") for text in recipe_texts]


def describe_merge(made: MergePlan, gathered: CheckpointSeries, outs: Sequence[Path]) -> dict[str, Any]:
    """What a merge would do, ready for JSON: every input with its coefficients, bytes, memory, outputs, notes."""
    inputs = [
        {
            "source": source.origin,
            "kind": source.kind,
            "tokens": source.tokens,
            "step": source.step,
            "bytes": source.nbytes,
            "coefficients": made.coefficients[:, k].tolist(),
        }
        for k, source in enumerate(made.sources)
    ]
    return {
        "recipes": list(made.recipes),
        "inputs": inputs,
        "leaves": len(made.leaves),
        "outs": [str(out) for out in outs],
        "format": made.kind,
        "dtype": made.dtype,
        "read_bytes": made.read_bytes,
        "write_bytes": made.write_bytes,
        "memory_bytes": made.schedule.memory_bytes,
        "cores": made.schedule.threads * made.schedule.processes,
        "notes": [*gathered.notes, *made.notes],
    }


def format_plan(description: Mapping[str, Any]) -> str:
    """The description for a person."""
    lines = [f"inputs, oldest first, and their coefficients in {', '.join(description['recipes'])}:"]
    for entry in description["inputs"]:
        where = "" if entry["tokens"] is None else f"  {entry['tokens']:,} tokens"
        where = f"  step {entry['step']:,}" if not where and entry["step"] is not None else where
        weights = "  ".join(f"{c:+.6f}" for c in entry["coefficients"])
        lines.append(f"  {weights}{where}  {entry['source']}")
    lines.append(
        f"{description['leaves']} leaves; reads {_bytes(description['read_bytes'])}, "
        f"writes {_bytes(description['write_bytes'])} of {description['format']} (dtype {description['dtype']}), "
        f"at most {_bytes(description['memory_bytes'])} of memory, {description['cores']} cores"
    )
    lines += [f"would write {out}" for out in description["outs"]]
    return "\n".join(lines)


def format_result(description: Mapping[str, Any]) -> str:
    """What a merge did, for a person."""
    inputs = description["inputs"]
    known = [entry["tokens"] for entry in inputs if entry["tokens"] is not None]
    span = f" ({known[0]:,} to {known[-1]:,} tokens)" if len(known) == len(inputs) else ""
    made = ", ".join(description["recipes"])
    written = "\n".join(f"written to {out}" for out in description["outs"])
    return f"{made} of {len(inputs)} checkpoints{span} in {description['seconds']:.1f} s\n{written}"


def _merged_metadata(sources: Sequence[CheckpointSource]) -> dict[str, Any] | None:
    """What the merge says of itself where every input is a snapshot of ours: it is one too; None otherwise."""
    facts = [snapshot_metadata(source) for source in sources]
    newest = facts[-1]
    return drop_digests(newest) | {"loss": None} if newest is not None and all(facts) else None


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
