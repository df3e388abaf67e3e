"""What a merged checkpoint is made of, written beside it, and checking that it still is."""

import contextlib
import hashlib
import json
import math
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.merging.engine import sums
from pma_jax.merging.engine.journal import Record, segment_digests
from pma_jax.merging.engine.plan import MergePlan, Unit
from pma_jax.storage.digests import (
    CHECKSUMS,
    METADATA_DIGEST_KEY,
    SegmentHasher,
    checkpoint_digest,
    file_digest,
    leaf_digest,
)
from pma_jax.storage.formats.open import open_source, read_leaf_bytes
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource, LeafInfo
from pma_jax.storage.json_files import read_object
from pma_jax.storage.paths import locate

FILE_NAME = "provenance.json"
# Rounding noise of half of what merging moved: about where a bfloat16 result is no longer better than the newest
# source.
_ROUNDING_WARNING = 0.5


def build(plan: MergePlan, records: Mapping[int, Record], row: int, command: str) -> dict[str, Any]:
    """The provenance of merged checkpoint `row`; the same inputs give the same text, so it has no clock in it."""
    units = list(plan.units())
    sources = []
    for k, source in enumerate(plan.sources):
        digests = _leaf_digests(plan, units, [records[n].read[k] for n in range(len(units))])
        sources.append(
            {
                "source": source.origin,
                "kind": source.kind,
                "tokens": source.tokens,
                "step": source.step,
                "coefficient": float(plan.coefficients[row, k]),
                "digest": checkpoint_digest(source.leaves, digests),
                "leaves": digests,
            }
        )
    written = _leaf_digests(plan, units, [records[n].written[row] for n in range(len(units))])
    squares = np.sum([records[n].squares[row] for n in range(len(units))] or [[0.0, 0.0]], axis=0)
    layout = plan.layout
    return {
        "made_by": "pma merge",
        "command": command,
        "recipe": plan.recipes[row],
        "coefficients": plan.coefficients[row].tolist(),
        "tokens": plan.sources[-1].tokens,
        "dtype": plan.dtype,
        "accumulation_dtypes": sorted({sums.accumulation_dtype(leaf.dtype) for leaf in _summed(plan).values()}),
        "copied_leaves": [name for name, leaf in plan.sources[0].leaves.items() if not leaf.is_summed],
        "rounding_over_moved": math.sqrt(squares[0] / squares[1]) if squares[1] else None,
        "checksum": plan.checksum,
        "digest": checkpoint_digest(plan.leaves, written),
        "leaves": written,
        "files": {name: _text_digest(text) for name, text in layout.texts.items()}
        | {name: file_digest(path) for name, path in layout.copies.items()},
        "sources": sources,
        "notes": list(plan.notes),
        "plan": plan.digest,
        "versions": _versions(),
    }


def _summed(plan: MergePlan) -> dict[str, LeafInfo]:
    return {name: leaf for name, leaf in plan.sources[0].leaves.items() if leaf.is_summed}


def _leaf_digests(plan: MergePlan, units: list[Unit], segments: list[list[str]]) -> dict[str, str]:
    of_leaf: dict[str, list[str]] = {name: [] for name in plan.leaves}
    for unit, digests in zip(units, segments, strict=True):
        of_leaf[unit.name] += digests
    return {name: leaf_digest(digests) for name, digests in of_leaf.items()}


def _text_digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _versions() -> dict[str, str]:
    # From loaded modules: importlib.metadata takes as long to import as numpy. ml_dtypes counts only where it was used.
    modules = {"pma-jax": "pma_jax", "numpy": "numpy", "ml-dtypes": "ml_dtypes"}
    versions = {name: sys.modules[module].__version__ for name, module in modules.items() if module in sys.modules}
    return versions | {"python": platform.python_version()}


def check_inputs_unchanged(plan: MergePlan, facts: Mapping[str, Any]) -> None:
    """Compare what a merge read of its sources with the digests that these carry, if they do; costs no read.

    Raises:
        ValueError: a source is not what was written; names the source, the leaf and the files that hold it.
    """
    for source, entry in zip(plan.sources, facts["sources"], strict=True):
        wanted = recorded_digests(source, plan.checksum)
        changed = [name for name, digest in entry["leaves"].items() if wanted.get(name, digest) != digest]
        if changed:
            raise ValueError(
                f"{source.origin} is damaged: {len(changed)} leaves are not what was written: "
                f"{', '.join(f'{name} ({format_leaf_files(source, name)})' for name in changed[:5])}"
            )


def recorded_digests(source: CheckpointSource, checksum: str) -> dict[str, str]:
    """Leaf -> digest as a checkpoint carries them: a snapshot of ours in its metadata, a merge in its provenance.

    Empty where it has none that this version knows, or of another checksum.
    """
    facts, item = source.metadata.get("custom", {}), source.metadata.get("item", "")
    if METADATA_DIGEST_KEY not in facts:
        facts, item = {}, ""
        with contextlib.suppress(ValueError):
            facts = read(source.path)
    if facts.get("checksum") != checksum:
        return {}
    # A state has the leaves of its items, by the items' names.
    return {name.removeprefix(f"{item}."): digest for name, digest in facts["leaves"].items()}


def format_leaf_files(source: CheckpointSource, name: str) -> str:
    """The files that hold a leaf, for a message."""
    paths = list(dict.fromkeys(str(byte_range.path) for byte_range in source.byte_ranges.get(name, ())))
    return ", ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "") or str(source.path)


def rounding_warning(plan: MergePlan, facts: Mapping[str, Any], row: int) -> str | None:
    """A warning, if rounding to the output's dtype loses more than merging gains."""
    ratio = facts["rounding_over_moved"]
    if ratio is None or ratio <= _ROUNDING_WARNING:
        return None
    dtypes = sorted({leaf.dtype for leaf in plan.leaves.values() if leaf.is_summed})
    return (
        f"{plan.recipes[row]}: rounding to {' and '.join(dtypes)} "
        f"changes the weights by {ratio:.2f} of what merging changed; keep the gain with dtype float32"
    )


def write(directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes `provenance.json` into a directory."""
    (directory / FILE_NAME).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(directory: Path) -> dict[str, Any]:
    """Reads a merged checkpoint's provenance.

    Raises:
        ValueError: there is none, or it is not one; one line.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        raise ValueError(f"{directory}: has no {FILE_NAME}; it was not made by pma merge")
    facts = read_object(path)
    wanted = {"leaves": dict, "files": dict, "sources": list, "digest": str, "plan": str}
    if not all(isinstance(facts.get(key), kind) for key, kind in wanted.items()):
        raise ValueError(f"{path}: is not a provenance that this version wrote")
    if facts.get("checksum") not in CHECKSUMS:
        raise ValueError(f"{path}: has checksums that this version does not know; it knows {', '.join(CHECKSUMS)}")
    return facts


def read_plan_digest(directory: Path) -> str | None:
    """The digest of the plan that made a directory; None if no merge made it."""
    try:
        return read(directory)["plan"]
    except ValueError:
        return None


def compute_digests(source: CheckpointSource, checksum: str) -> dict[str, str]:
    """The digest of every leaf of a checkpoint; reads all of it."""
    return {name: compute_leaf_digest(source, name, checksum) for name in source.leaves}


def compute_leaf_digest(source: CheckpointSource, name: str, checksum: str) -> str:
    """The digest of one leaf of a checkpoint; reads all of it."""
    leaf = source.leaves[name]
    if name in source.byte_ranges:
        return leaf_digest(segment_digests(leaf, source.byte_ranges[name], Unit(name, 0, leaf.elements), checksum))
    hasher = SegmentHasher(ITEM_BYTES[leaf.dtype], checksum)
    hasher.update(read_leaf_bytes(source, name, 0, leaf.elements))
    return leaf_digest(hasher.hexdigests())


def verify(directory: str | Path, with_sources: bool = False) -> list[str]:
    """Recomputes a merged checkpoint's digests; every difference, one line each, none if it is what was written.

    Args:
        directory: what `merge` published.
        with_sources: also read every source again, where its provenance says it was.

    Raises:
        ValueError: the directory has no provenance, or is no checkpoint any more.
    """
    directory = locate(directory)
    facts = read(directory)
    problems = _compare(directory.name, open_source(directory), facts)
    for name, digest in facts["files"].items():
        path = directory / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            problems.append(f"{FILE_NAME}: names {name[:80]!r}, which is outside")
        elif not path.is_file():
            problems.append(f"{name}: is missing")
        elif file_digest(path) != digest:
            problems.append(f"{name}: has changed")
    for entry in facts["sources"] if with_sources else []:
        problems += _compare(entry["source"], open_source(entry["source"]), facts | entry)
    return problems


def _compare(what: str, source: CheckpointSource, facts: Mapping[str, Any]) -> list[str]:
    found, leaves = compute_digests(source, facts["checksum"]), facts["leaves"]
    problems = [f"{what}: {name} has changed" for name in leaves if name in found and found[name] != leaves[name]]
    problems += [f"{what}: {name} is missing" for name in leaves if name not in found]
    problems += [f"{what}: {name} is new" for name in found if name not in leaves]
    if not problems and checkpoint_digest(source.leaves, found) != facts["digest"]:
        problems.append(f"{what}: a shape or dtype has changed")
    return problems
