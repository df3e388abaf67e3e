"""From what a user names to the checkpoints of a merge, oldest first, with their positions on the way of training.

A name may be a run of ours, a checkpoint of any format, a directory of checkpoints, or a pattern of hub revisions.
Nothing here imports JAX or Orbax: a merge should start at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.merging import selection
from pma_jax.runtime.errors import error_line
from pma_jax.storage.formats import hub
from pma_jax.storage.formats.open import load_deferred, open_deferred, open_source
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.paths import locate

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class CheckpointSeries:
    """Checkpoints, oldest first.

    Attributes:
        sources: the checkpoints.
        positions: float64 or int64 [K], increasing: tokens where all are known, else steps, else 0 … K-1.
        unit: "tokens", "steps" or "order": what the positions count.
        stages: the run, stage or directory that each was found in; None for one that was named itself.
        notes: what was guessed or is odd, one line each.
    """

    sources: tuple[CheckpointSource, ...]
    positions: np.ndarray
    unit: str
    stages: tuple[str | None, ...]
    notes: tuple[str, ...] = ()


def gather(
    addresses: Sequence[str | Path],
    *,
    subtree: str | None = None,
    kind: str | None = None,
    tokens_per_step: int | None = None,
) -> CheckpointSeries:
    """Opens every checkpoint that the addresses stand for: metadata only, and of the hub's nothing but their names.

    Args:
        addresses: runs, checkpoints, directories of checkpoints, hf://org/repo@revision (or a pattern of revisions).
        subtree: where an Orbax tree holds the parameters; guessed, and told, if None.
        kind: which snapshots of a run: "point" or "block_mean"; the first that the run saves, if None.
        tokens_per_step: gives tokens to checkpoints of which only the step is known.

    Raises:
        ValueError: an address is nothing that can be merged, or different kinds of snapshots are mixed; one line.
    """
    notes: list[str] = []
    found: list[tuple[str, str | None]] = []
    for address in addresses:
        named, said = _expand(str(address), kind)
        found += named
        notes += said
    sources = [
        open_deferred(place, subtree) if place.startswith("hf://") else open_source(place, subtree)
        for place, _ in found
    ]
    if tokens_per_step is not None:
        sources = [_with_tokens(source, tokens_per_step) for source in sources]
    stages = [stage for _, stage in found]
    unit, positions = _positions(sources)
    order = np.argsort(positions, kind="stable")
    if unit == "order" and len(sources) > 1:
        notes.append("neither tokens nor steps are known of every checkpoint: the order is that of the command")
    chosen = [sources[i] for i in order]
    check_same_kind(chosen)
    return CheckpointSeries(tuple(chosen), positions[order], unit, tuple(stages[i] for i in order), tuple(notes))


def select_checkpoints(
    gathered: CheckpointSeries,
    *,
    last: int | None = None,
    between: tuple[int | None, int | None] | None = None,
    every: int | None = None,
    tolerance: int | None = None,
    across_stages: bool = False,
) -> CheckpointSeries:
    """Those that take part; the arguments are those of `selection.select`, in tokens.

    Checkpoints that were named one by one are merged as named: only what was found in a run, a directory or a suite
    is checked for crossing from one stage or run to another.

    Raises:
        ValueError: nothing is left, a boundary would be crossed, or tokens are needed and not known; one line.
    """
    if (between is not None or every is not None) and gathered.unit != "tokens":
        raise ValueError(
            "the tokens of these checkpoints are not all known, so none can be chosen by tokens: "
            "give --tokens-per-step, or name the checkpoints"
        )
    if set(gathered.stages) == {None} and last is None and between is None and every is None:
        return gathered
    chosen = selection.select(
        gathered.positions,
        last=last,
        between=between,
        every=every,
        tolerance=tolerance,
        stages=gathered.stages,
        across_stages=across_stages,
    )
    notes = [note if gathered.unit == "tokens" else note.replace("tokens", gathered.unit) for note in chosen.notes]
    return _at(gathered, list(chosen.indexes), (*gathered.notes, *notes))


def drop_unused(gathered: CheckpointSeries, coefficients: np.ndarray) -> tuple[CheckpointSeries, np.ndarray]:
    """Without the checkpoints that every row of `coefficients` (float64 [R, K]) leaves out; the hub's are fetched now.

    Raises:
        ValueError: a revision cannot be fetched; one line.
    """
    columns = np.flatnonzero(coefficients.any(axis=0)).tolist()
    kept = _at(gathered, columns, gathered.notes)
    return replace(kept, sources=tuple(load_deferred(source) for source in kept.sources)), coefficients[:, columns]


def snapshot_metadata(source: CheckpointSource) -> dict[str, Any] | None:
    """What a snapshot of ours says of itself; None for any other checkpoint."""
    facts = source.metadata.get("custom", {}) if source.kind == "orbax" else {}
    return facts if {"tokens", "step", "config", "kind"} <= facts.keys() else None


def check_same_kind(sources: Sequence[CheckpointSource]) -> None:
    """Raises ValueError when points and block means, or snapshots of ours and other checkpoints, are mixed."""
    facts = [snapshot_metadata(source) for source in sources]
    kinds = {fact["kind"]: source.origin for fact, source in zip(facts, sources, strict=True) if fact is not None}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise ValueError(f"{first} is a {one} and {second} a {other}: points and block means do not mix")
    if kinds and None in facts:
        odd = sources[facts.index(None)].origin
        raise ValueError(f"{odd} has none of pma_jax's metadata: it is damaged, or not of this version")


def _at(gathered: CheckpointSeries, indexes: list[int], notes: tuple[str, ...]) -> CheckpointSeries:
    return replace(
        gathered,
        sources=tuple(gathered.sources[i] for i in indexes),
        positions=gathered.positions[indexes],
        stages=tuple(gathered.stages[i] for i in indexes),
        notes=notes,
    )


def _expand(address: str, kind: str | None) -> tuple[list[tuple[str, str | None]], list[str]]:
    """((place, stage) of each checkpoint, notes)."""
    if address.startswith("hf://"):
        places, notes = hub.list_revisions(address)
        return [(place, hub.stage(place) if len(places) > 1 else None) for place in places], notes
    path = locate(address)
    if (path / "run.json").is_file() and (path / "config.json").is_file():
        return _of_run(path, kind), []
    if kind is not None:
        raise ValueError(f"{address} is not a run, so it has no {kind} snapshots to choose from: leave --kind out")
    inside = _inside(path)
    if not inside:
        return [(address, None)], []
    inside.sort(key=lambda child: [int(number) for number in _NUMBERS.findall(child.name)] or [0])
    return [(str(child), str(path)) for child in inside], [
        f"{address} is read as a directory of {len(inside)} checkpoints"
    ]


def _of_run(run: Path, kind: str | None) -> list[tuple[str, str | None]]:
    """A run's published snapshots: those that have their commit mark."""
    from pma_jax import config as configuration  # the dictionaries of its files cost more to import than a small merge

    path = run / "config.json"
    try:
        kind = kind or configuration.from_json(path.read_text()).checkpoint.kinds[0]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error_line(error)}") from error
    steps = [step for step in (run / configuration.SNAPSHOT_KINDS[kind].folder).glob("*") if step.name.isdigit()]
    published = [step for step in steps if (step / "commit_success.txt").is_file()]
    if not published:
        raise ValueError(f"{run} has no {kind} snapshot: train until the first token mark")
    return [(str(step), str(run)) for step in published]


def _inside(path: Path) -> list[Path]:
    """The checkpoints in a directory that is none itself."""
    own = ("*.safetensors", "*.safetensors.index.json", "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
    if not path.is_dir() or any(next(path.glob(mark), None) is not None for mark in own):
        return []
    return [child for child in path.iterdir() if child.is_dir() and _is_whole(child)]


def _is_whole(path: Path) -> bool:
    if ".orbax-checkpoint-tmp" in path.name or path.name.startswith("."):
        return False
    if next(path.glob("*.safetensors"), None) is not None:
        return True
    # The items of one Orbax checkpoint (params, state) have trees of their own: steps are told by their numbers.
    marks = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "*/_METADATA")
    return bool(_NUMBERS.search(path.name)) and any(next(path.glob(mark), None) is not None for mark in marks)


def _with_tokens(source: CheckpointSource, tokens_per_step: int) -> CheckpointSource:
    if source.tokens is not None or source.step is None:
        return source
    return replace(source, tokens=source.step * tokens_per_step)


def _positions(sources: Sequence[CheckpointSource]) -> tuple[str, np.ndarray]:
    tokens = [source.tokens for source in sources if source.tokens is not None]
    if len(tokens) == len(sources):
        return "tokens", np.array(tokens)
    steps = [source.step for source in sources if source.step is not None]
    if len(steps) == len(sources):
        return "steps", np.array(steps)
    return "order", np.arange(len(sources))
