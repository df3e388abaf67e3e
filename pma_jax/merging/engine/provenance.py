"""The provenance of a merged checkpoint: provenance.json in its directory, which `merging.verify` compares with it.

It lists each input with its coefficient and the digests of its leaves, and the digests of all leaves and files written.
"""

import hashlib
import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.merging.engine import sums
from pma_jax.merging.engine.journal import Record, compute_segment_digests
from pma_jax.merging.engine.plan import MergePlan, Unit
from pma_jax.storage.digests import (
    CHECKSUM,
    METADATA_DIGEST_KEY,
    SegmentHasher,
    checkpoint_digest,
    file_sha256,
    leaf_digest,
)
from pma_jax.storage.formats.open import read_leaf_bytes
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.json_schema import Count, check_schema
from pma_jax.storage.paths import exists, name_file

FILE_NAME = "provenance.json"
# Warn above this ratio of the rounding error to the change by merging: about here, rounding to bfloat16 undoes the
# lower loss of a merge.
_ROUNDING_WARNING = 0.5


class _SourceEntry(TypedDict):
    source: str
    tokens: NotRequired[Count | None]
    step: NotRequired[Count | None]
    coefficient: NotRequired[float]
    digest: str
    leaves: dict[str, str]


class Provenance(TypedDict):
    """Contents of provenance.json, as far as they are read."""

    recipe: NotRequired[str]
    coefficients: NotRequired[list[float]]
    tokens: NotRequired[Count | None]
    accumulation_dtypes: NotRequired[list[str]]
    checksum: NotRequired[str]
    digest: str
    leaves: dict[str, str]
    files: dict[str, str]
    sources: list[_SourceEntry]
    plan: str


def build(plan: MergePlan, work: MergePlan, records: Mapping[int, Record], row: int, command: str) -> dict[str, Any]:
    """Build the provenance of merged checkpoint number `row`. It has no timestamp, so equal inputs give equal text.

    Args:
        plan: The merge.
        work: The plan of the units: the same, or with packs as leaves.
        records: The record of each unit, by number.
        row: Number of the recipe.
        command: The command line that was run, to be recorded.
    """
    units = list(work.units())
    sources = []
    for k, source in enumerate(plan.sources):
        digests = _collect_leaf_digests(plan, work, units, [records[n].read[k] for n in range(len(units))])
        sources.append(
            source.identity
            | {
                "coefficient": float(plan.coefficients[row, k]),
                "digest": checkpoint_digest(source.leaves, digests),
                "leaves": digests,
            }
        )
    written = _collect_leaf_digests(plan, work, units, [records[n].written[row] for n in range(len(units))])
    squares = np.sum([records[n].squares[row] for n in range(len(units))] or [[0.0, 0.0]], axis=0)
    inputs = plan.sources[0].leaves
    return {
        "made_by": "pma merge",
        "command": command,
        "recipe": plan.recipes[row],
        "coefficients": plan.coefficients[row].tolist(),
        "tokens": plan.sources[-1].tokens,
        "dtype": plan.dtype,
        "integers": plan.integers,
        "accumulation_dtypes": sorted({sums.accumulation_dtype(x.dtype) for x in inputs.values() if x.is_summed}),
        "copied_leaves": [name for name, leaf in inputs.items() if not leaf.is_summed],
        "rounding_over_moved": math.sqrt(squares[0] / squares[1]) if squares[1] else None,
        "checksum": CHECKSUM,
        "digest": checkpoint_digest(plan.leaves, written),
        "leaves": written,
        "files": {name: hashlib.sha256(text).hexdigest() for name, text in plan.layout.texts.items()}
        | {name: file_sha256(path) for name, path in plan.layout.copies.items()},
        "sources": sources,
        "notes": list(plan.notes),
        "plan": plan.digest,
        "versions": _versions(),
    }


def _collect_leaf_digests(
    plan: MergePlan, work: MergePlan, units: list[Unit], segments: list[list[str]]
) -> dict[str, str]:
    segments_of: dict[str, list[str]] = {name: [] for name in plan.leaves}
    for unit, digests in zip(units, segments, strict=True):
        if unit.name in work.packs:
            segments_of |= {name: [digest] for name, digest in zip(work.packs[unit.name].names, digests, strict=True)}
        else:
            segments_of[unit.name] += digests
    return {name: leaf_digest(digests) for name, digests in segments_of.items()}


def _versions() -> dict[str, str]:
    # From loaded modules: importlib.metadata takes as long to import as NumPy. ml_dtypes is loaded only if used.
    modules = {"pma-jax": "pma_jax", "numpy": "numpy", "ml-dtypes": "ml_dtypes"}
    versions = {name: sys.modules[module].__version__ for name, module in modules.items() if module in sys.modules}
    return versions | {"python": platform.python_version()}


def check_source_digests(plan: MergePlan, provenance: Mapping[str, Any]) -> None:
    """Compare the digests of leaves as the merge read them with those recorded in the sources, where recorded.

    Raises:
        UserError: A source is corrupt; the message names the source, the leaves and the files that hold them.
    """
    for source, entry in zip(plan.sources, provenance["sources"], strict=True):
        recorded = recorded_digests(source)
        changed = [name for name, digest in entry["leaves"].items() if recorded.get(name, digest) != digest]
        if changed:
            raise UserError(
                f"{source.origin} is corrupt: {len(changed)} leaves do not match their digests: "
                f"{', '.join(f'{name} ({format_leaf_files(source, name)})' for name in changed[:5])}"
            )


def recorded_digests(source: CheckpointSource) -> dict[str, str]:
    """Return leaf name -> digest from a snapshot's metadata or a merge's provenance.

    The result is empty if no digests are recorded, or if they use a checksum that this version does not support.
    """
    recorded, item = source.metadata.get("custom", {}), source.metadata.get("item", "")
    if METADATA_DIGEST_KEY not in recorded:
        recorded, item = {}, ""
        path = source.path / FILE_NAME
        if exists(path) and "plan" in read_json_object(path):  # another program's file of this name has no digests
            recorded = _read_file(path)
    if recorded.get("checksum") != CHECKSUM:
        return {}
    # In a training state, the item's name is the first part of every leaf's name.
    return {name.removeprefix(f"{item}."): digest for name, digest in recorded["leaves"].items()}


def format_leaf_files(source: CheckpointSource, name: str) -> str:
    """Format the paths of the files that hold a leaf, for a message."""
    paths = list(dict.fromkeys(str(part.path) for part in source.byte_ranges.get(name, ())))
    return ", ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "") or str(source.path)


def rounding_warning(plan: MergePlan, provenance: Mapping[str, Any], row: int) -> str | None:
    """Return a warning if rounding to the output dtype is large compared with the change by merging; else None."""
    ratio = provenance["rounding_over_moved"]
    if ratio is None or ratio <= _ROUNDING_WARNING:
        return None
    dtypes = sorted({leaf.dtype for leaf in plan.leaves.values() if leaf.is_summed})
    return (
        f"{plan.recipes[row]}: rounding to {' and '.join(dtypes)} "
        f"changes the parameters by {ratio:.2f} of what merging changed; keep the gain with dtype float32"
    )


def equal_source_notes(provenance: Mapping[str, Any]) -> list[str]:
    """Return a note for each source with the same values as an earlier one, such as a copy of the last checkpoint."""
    first_of: dict[str, str] = {}
    notes = []
    for source in provenance["sources"]:
        first = first_of.setdefault(source["digest"], source["source"])
        if first != source["source"]:
            notes.append(f"{source['source']} has the same values as {first}: they count twice")
    return notes


def serialize(provenance: Mapping[str, Any]) -> bytes:
    """Return the content of `provenance.json`."""
    return "".join(_text_parts(provenance)).encode()


def write(directory: Path, provenance: Mapping[str, Any]) -> None:
    """Write `provenance.json` into a directory."""
    with name_file(directory / FILE_NAME), (directory / FILE_NAME).open("w", encoding="utf-8") as file:
        file.writelines(_text_parts(provenance))


def _text_parts(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of `provenance.json` in parts, because that of many leaves is long.

    The text is that of `json.dumps(provenance, indent=1, ensure_ascii=False)`, which encodes one value at a time in
    Python. The digests of leaves are encoded in C: without `indent`, but with a separator that contains it.
    """
    sources = [{**source, "leaves": {}} for source in provenance["sources"]]
    without_leaves = {**provenance, "leaves": {}, "sources": sources}
    key = '"leaves": {'
    # Quotes in strings are escaped, so that the key with an empty object is found only where it was put.
    parts = json.dumps(without_leaves, indent=1, ensure_ascii=False).split(key + "}")
    yield parts[0]
    depths = [1] + [3] * len(provenance["sources"])
    leaves = [provenance["leaves"], *(source["leaves"] for source in provenance["sources"])]
    for digests, depth, part in zip(leaves, depths, parts[1:], strict=True):
        margin = "\n" + " " * depth
        text = json.dumps(digests, ensure_ascii=False, separators=(f",{margin} ", ": "))[1:-1]
        yield f"{key}{margin} {text}{margin}}}" if digests else key + "}"
        yield part
    yield "\n"


def read(directory: Path) -> dict[str, Any]:
    """Read the provenance of a merged checkpoint.

    Raises:
        UserError: There is none, or it is invalid.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        raise UserError(f"{directory}: has no {FILE_NAME}; it was not made by pma merge")
    provenance = _read_file(path)
    if provenance.get("checksum") != CHECKSUM:
        raise UserError(f"{path}: has checksums that this version does not know; it knows {CHECKSUM}")
    return provenance


def _read_file(path: Path) -> dict[str, Any]:
    provenance = read_json_object(path)
    if not {"leaves", "files", "sources", "digest", "plan"} <= provenance.keys():
        raise UserError(f"{path}: is not a provenance that this version wrote")
    check_schema(provenance, Provenance, str(path))
    return provenance


def read_plan_digest(directory: Path) -> str | None:
    """Return `MergePlan.digest` of the merge that wrote a directory; None if no merge wrote it."""
    try:
        return read(directory)["plan"]
    except UserError:
        return None


def compute_leaf_digest(source: CheckpointSource, name: str) -> str:
    """Read one leaf of a checkpoint and return its digest."""
    leaf = source.leaves[name]
    if name in source.byte_ranges:
        unit = Unit(name, 0, leaf.elements)
        return leaf_digest(compute_segment_digests(leaf, source.byte_ranges[name], unit))
    hasher = SegmentHasher(ITEM_BYTES[leaf.dtype])
    hasher.update(read_leaf_bytes(source, name, 0, leaf.elements))
    return leaf_digest(hasher.finish())
