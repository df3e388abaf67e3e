"""Resolve what the user names to the checkpoints of a merge, oldest first, with their positions in training.

A name may be a run directory, a checkpoint of any format, a directory of checkpoints, or a pattern of hub revisions.
Neither JAX nor Orbax is imported, so that a merge starts without delay.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.merging import selection
from pma_jax.runtime.errors import error_line
from pma_jax.storage.formats import hub
from pma_jax.storage.formats.open import load_deferred, open_deferred, open_source
from pma_jax.storage.formats.orbax_read import has_any
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.paths import locate

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class CheckpointSeries:
    """Checkpoints, oldest first.

    Attributes:
        sources: K checkpoints.
        positions: float64 or int64 [K], increasing: tokens if all are known, else steps, else 0 … K-1.
        unit: What the positions count: "tokens", "steps" or "order".
        stages: For each, the run, stage or directory that contains it; None for a checkpoint that was named itself.
        notes: Guesses and irregularities that the user should know, one line each.
    """

    sources: tuple[CheckpointSource, ...]
    positions: np.ndarray
    unit: str
    stages: tuple[str | None, ...]
    notes: tuple[str, ...] = ()

    def take(self, indexes: Sequence[int]) -> "CheckpointSeries":
        """Return the series of the checkpoints at `indexes`, with the same notes."""
        return replace(
            self,
            sources=tuple(self.sources[i] for i in indexes),
            positions=self.positions[list(indexes)],
            stages=tuple(self.stages[i] for i in indexes),
        )


def gather(
    addresses: Sequence[str | Path],
    *,
    subtree: str | None = None,
    kind: str | None = None,
    tokens_per_step: int | None = None,
) -> CheckpointSeries:
    """Open every checkpoint that the addresses name: metadata only, and for hub revisions nothing but their names.

    Args:
        addresses: Runs, checkpoints, directories of checkpoints, hf://org/repo@revision (or a pattern of revisions).
        subtree: Where an Orbax tree holds the parameters; if None it is guessed, and the guess noted.
        kind: Which snapshots of a run, "point" or "block_mean"; if None, the first kind that the run saves.
        tokens_per_step: Gives tokens to checkpoints for which only the step is known.

    Raises:
        ValueError: An address names no checkpoint, or different kinds of snapshots are mixed; one line.
    """
    notes: list[str] = []
    sources: list[CheckpointSource] = []
    stages: list[str | None] = []
    for address in addresses:
        places, stage_of, place_notes = _expand(str(address), kind)
        notes += place_notes
        for place in places:
            open_place = open_deferred if place.startswith(hub.PREFIX) else open_source
            sources.append(open_place(place, subtree))
            stages.append(stage_of(place))
    if tokens_per_step is not None:
        sources = [_with_tokens(source, tokens_per_step) for source in sources]
    unit, positions = _positions(sources)
    if unit == "order" and len(sources) > 1:
        notes.append("neither tokens nor steps are known for every checkpoint: the order is that of the command")
    series = CheckpointSeries(tuple(sources), positions, unit, tuple(stages), tuple(notes))
    series = series.take(np.argsort(positions, kind="stable").tolist())
    check_same_kind(series.sources)
    return series


def select_checkpoints(
    series: CheckpointSeries,
    *,
    last: int | None = None,
    between: tuple[int | None, int | None] | None = None,
    every: int | None = None,
    **options: Any,
) -> CheckpointSeries:
    """Select checkpoints for a merge; arguments and `options` are those of `selection.select`, in tokens.

    If every checkpoint was named itself and nothing is to be selected, the series is returned as it is: stage
    boundaries are checked only for checkpoints that a run, a directory or a revision pattern contributed.

    Raises:
        ValueError: Nothing is selected, a stage boundary would be crossed, or tokens are needed and not known.
    """
    if (between is not None or every is not None) and series.unit != "tokens":
        raise ValueError(
            "the tokens of these checkpoints are not all known, so none can be selected by tokens: "
            "give --tokens-per-step, or name the checkpoints"
        )
    if set(series.stages) == {None} and last is None and between is None and every is None:
        return series
    selected = selection.select(
        series.positions, last=last, between=between, every=every, stages=series.stages, **options
    )
    notes = [note if series.unit == "tokens" else note.replace("tokens", series.unit) for note in selected.notes]
    return replace(series.take(selected.indexes), notes=(*series.notes, *notes))


def drop_unused(series: CheckpointSeries, coefficients: np.ndarray) -> tuple[CheckpointSeries, np.ndarray]:
    """Drop the checkpoints whose coefficients (float64 [R, K]) are all zero, and download the remaining hub revisions.

    Raises:
        ValueError: A revision cannot be downloaded; one line.
    """
    columns = np.flatnonzero(coefficients.any(axis=0)).tolist()
    series = series.take(columns)
    return replace(series, sources=tuple(map(load_deferred, series.sources))), coefficients[:, columns]


def snapshot_metadata(source: CheckpointSource) -> dict[str, Any] | None:
    """Return the metadata of a snapshot that pma_jax wrote; None for any other checkpoint."""
    metadata = source.metadata.get("custom", {}) if source.kind == "orbax" else {}
    return metadata if {"tokens", "step", "config", "kind"} <= metadata.keys() else None


def check_same_kind(sources: Sequence[CheckpointSource]) -> None:
    """Raise ValueError if points and block means, or pma_jax's snapshots and other checkpoints, are mixed."""
    metadata = [snapshot_metadata(source) for source in sources]
    kinds = {source.origin: entry["kind"] for entry, source in zip(metadata, sources, strict=True) if entry is not None}
    selection.check_one_kind(kinds)
    if kinds and None in metadata:
        odd = sources[metadata.index(None)].origin
        raise ValueError(f"{odd} has no metadata of pma_jax: it is corrupt, or from another version")


def _expand(address: str, kind: str | None) -> tuple[list[str], Callable[[str], str | None], list[str]]:
    """Return (the places of the checkpoints, a function from place to stage, notes)."""
    if address.startswith(hub.PREFIX):
        places, notes = hub.list_revisions(address)
        return places, hub.stage if len(places) > 1 else lambda _: None, notes
    path = locate(address)
    if (path / "run.json").is_file() and (path / "config.json").is_file():
        return _list_snapshots(path, kind), lambda _: str(path), []
    if kind is not None:
        raise ValueError(f"{address} is not a run, so it has no {kind} snapshots to choose from: leave --kind out")
    children = _list_checkpoints(path)
    if not children:
        return [address], lambda _: None, []
    children.sort(key=lambda child: [int(number) for number in _NUMBERS.findall(child.name)] or [0])
    note = f"{address} is read as a directory of {len(children)} checkpoints"
    return [str(child) for child in children], lambda _: str(path), [note]


def _list_snapshots(run: Path, kind: str | None) -> list[str]:
    """List a run's published snapshots: those with a commit marker."""
    from pma_jax import config as configuration  # its imports take longer than a small merge

    path = run / "config.json"
    try:
        kind = kind or configuration.from_json(path.read_text()).checkpoint.kinds[0]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error_line(error)}") from error
    steps = [step for step in (run / configuration.SNAPSHOT_KINDS[kind].folder).glob("*") if step.name.isdigit()]
    published = [str(step) for step in steps if (step / "commit_success.txt").is_file()]
    if not published:
        raise ValueError(f"{run} has no {kind} snapshot: train until the first snapshot is due")
    return published


def _list_checkpoints(path: Path) -> list[Path]:
    """List the checkpoints in a directory; empty if the directory is itself a checkpoint."""
    own = ("*.safetensors", "*.safetensors.index.json", "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
    if not path.is_dir() or has_any(path, *own):
        return []
    return [child for child in path.iterdir() if child.is_dir() and _is_complete_checkpoint(child)]


def _is_complete_checkpoint(path: Path) -> bool:
    if ".orbax-checkpoint-tmp" in path.name or path.name.startswith("."):
        return False
    # The items of one Orbax checkpoint (params, state) have trees of their own: only steps have a number in their name.
    is_step = _NUMBERS.search(path.name) is not None
    orbax_files = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "*/_METADATA")
    return has_any(path, "*.safetensors") or (is_step and has_any(path, *orbax_files))


def _with_tokens(source: CheckpointSource, tokens_per_step: int) -> CheckpointSource:
    if source.tokens is not None or source.step is None:
        return source
    return replace(source, tokens=source.step * tokens_per_step)


def _positions(sources: Sequence[CheckpointSource]) -> tuple[str, np.ndarray]:
    known = {"tokens": [source.tokens for source in sources], "steps": [source.step for source in sources]}
    for unit, positions in known.items():
        if None not in positions:
            return unit, np.array(positions)
    return "order", np.arange(len(sources))
