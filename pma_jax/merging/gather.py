"""Resolve addresses to the checkpoints of a merge, sorted by their position in training.

An address is a run directory, a checkpoint of any format, a directory of checkpoints, or a pattern of hub revisions.
Error messages are one line. Neither JAX nor Orbax is imported, so that a merge starts without delay.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.merging import selection
from pma_jax.storage.formats import hub
from pma_jax.storage.formats.open import describe_hub_revision, open_if_deferred, open_source
from pma_jax.storage.formats.orbax_read import has_file
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.json_files import read_json
from pma_jax.storage.paths import as_path

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class CheckpointSeries:
    """Checkpoints, sorted by position.

    Attributes:
        sources: K checkpoints.
        positions: int64 [K], sorted: tokens if all are known, else steps, else 0 … K-1.
        unit: What the positions count: "tokens", "steps" or "order".
        stages: For each checkpoint, the run, stage or directory that contains it; None if its own address was given.
        notes: Inferred settings and warnings for the user, one line each.
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


def open_checkpoints(
    addresses: Sequence[str | Path],
    *,
    subtree: str | None = None,
    snapshot_kind: str | None = None,
    tokens_per_step: int | None = None,
) -> CheckpointSeries:
    """Open the checkpoints at `addresses`, sorted by position.

    Only metadata are read. Hub revisions are listed but not downloaded.

    Args:
        addresses: Runs, checkpoints, directories of checkpoints, hf://org/repo@revision (or a pattern of revisions).
        subtree: Path of the parameters in an Orbax tree ("params"). If None, it is inferred and a note reports it.
        snapshot_kind: Which snapshots of a run to open, "point" or "block_mean"; if None, the first kind that the run
            saves.
        tokens_per_step: Tokens per training step, to compute the tokens of checkpoints that record only their step.

    Raises:
        UserError: There is no checkpoint at an address, or different kinds of snapshots are mixed.
    """
    notes: list[str] = []
    sources: list[CheckpointSource] = []
    stages: list[str | None] = []
    for address in addresses:
        paths, get_stage, path_notes = _expand(str(address), snapshot_kind)
        notes += path_notes
        for path in paths:
            open_checkpoint = describe_hub_revision if path.startswith(hub.PREFIX) else open_source
            sources.append(open_checkpoint(path, subtree))
            stages.append(get_stage(path))
    if tokens_per_step is not None:
        sources = [_fill_tokens(source, tokens_per_step) for source in sources]
    unit, positions = _compute_positions(sources)
    if unit == "order" and len(sources) > 1:
        notes.append("neither tokens nor steps are known for every checkpoint: they keep the order of the arguments")
    series = CheckpointSeries(tuple(sources), positions, unit, tuple(stages), tuple(notes))
    series = series.take(np.argsort(positions, kind="stable").tolist())
    check_same_snapshot_kind(series.sources)
    return series


def select_checkpoints(
    series: CheckpointSeries,
    *,
    last: int | None = None,
    between_tokens: tuple[int | None, int | None] | None = None,
    every_tokens: int | None = None,
    tolerance_tokens: int | None = None,
    across_stages: bool = False,
) -> CheckpointSeries:
    """Select checkpoints for a merge, and check that they are of one stage.

    Return `series` unchanged if no selection is requested and every checkpoint was given by its own address. Stage
    boundaries are not checked in that case.

    Args:
        series: The checkpoints to select from.
        last: Number of checkpoints to select, the newest ones.
        between_tokens: First and last position, both inclusive; None leaves that end open.
        every_tokens: Interval between the selected checkpoints, back from the newest.
        tolerance_tokens: Largest distance from a position of that grid; by default a tenth of the interval.
        across_stages: Allow checkpoints of several stages.

    Raises:
        UserError: Nothing is selected, a stage boundary would be crossed, or tokens are needed and not known.
    """
    if (between_tokens is not None or every_tokens is not None) and series.unit != "tokens":
        raise UserError(
            "cannot select by tokens, because the tokens of some checkpoints are unknown: "
            "give --tokens-per-step, or the addresses of the checkpoints to merge"
        )
    if set(series.stages) == {None} and last is None and between_tokens is None and every_tokens is None:
        return series
    selected = selection.select(
        series.positions,
        last=last,
        between_tokens=between_tokens,
        every_tokens=every_tokens,
        tolerance_tokens=tolerance_tokens,
        stages=series.stages,
        across_stages=across_stages,
    )
    notes = [note if series.unit == "tokens" else note.replace("tokens", series.unit) for note in selected.notes]
    return replace(series.take(selected.indices), notes=(*series.notes, *notes))


def load_used(series: CheckpointSeries, coefficients: np.ndarray) -> tuple[CheckpointSeries, np.ndarray]:
    """Drop the checkpoints that no recipe uses, and download the remaining hub revisions.

    Args:
        series: K checkpoints.
        coefficients: float64 [R, K]; a checkpoint is dropped if its coefficients are all zero.

    Returns:
        The remaining checkpoints and their coefficients.

    Raises:
        UserError: A revision cannot be downloaded.
    """
    columns = np.flatnonzero(coefficients.any(axis=0)).tolist()
    series = series.take(columns)
    return replace(series, sources=tuple(map(open_if_deferred, series.sources))), coefficients[:, columns]


def snapshot_metadata(source: CheckpointSource) -> dict[str, Any] | None:
    """Return the metadata of a snapshot that pma_jax wrote; None for any other checkpoint."""
    metadata = source.metadata.get("custom", {}) if source.format == "orbax" else {}
    return metadata if {"tokens", "step", "config", "kind"} <= metadata.keys() else None


def check_same_snapshot_kind(sources: Sequence[CheckpointSource]) -> None:
    """Check that the sources are all point snapshots, all block-mean snapshots, or all not snapshots of pma_jax.

    Raises:
        UserError: They are mixed.
    """
    metadata = [snapshot_metadata(source) for source in sources]
    path_to_kind = {source.origin: entry["kind"] for entry, source in zip(metadata, sources, strict=True) if entry}
    selection.check_one_snapshot_kind(path_to_kind)
    if path_to_kind and None in metadata:
        odd = sources[metadata.index(None)].origin
        raise UserError(
            f"{odd} has no metadata of pma_jax, but other inputs have: merge them apart, unless it is corrupt"
        )


def _expand(address: str, snapshot_kind: str | None) -> tuple[list[str], Callable[[str], str | None], list[str]]:
    """Return the addresses of the checkpoints at `address`, a function from such an address to its stage, and notes."""
    if address.startswith(hub.PREFIX):
        revisions, notes = hub.expand_revisions(address)
        return revisions, hub.repo_and_stage if len(revisions) > 1 else lambda _: None, notes
    path = as_path(address)
    if (path / "run.json").is_file() and (path / "config.json").is_file():
        return _list_snapshots(path, snapshot_kind), lambda _: str(path), []
    if snapshot_kind is not None:
        raise UserError(f"{address} is not a run, so it has no {snapshot_kind} snapshots: leave --kind out")
    children = _list_checkpoints(path)
    if not children:
        return [address], lambda _: None, []
    children.sort(key=lambda child: [int(number) for number in _NUMBERS.findall(child.name)] or [0])
    note = f"{address} is read as a directory of {len(children)} checkpoints"
    return [str(child) for child in children], lambda _: str(path), [note]


def _list_snapshots(run: Path, snapshot_kind: str | None) -> list[str]:
    """List the published snapshots of a run: those with a commit marker."""
    from pma_jax import config as configuration  # its imports take longer than a small merge

    path = run / "config.json"
    config = configuration.resolve_stored(read_json(path, dict[str, dict[str, Any]]), path)
    kind = snapshot_kind or config.checkpoint.kinds[0]
    steps = [step for step in (run / configuration.SNAPSHOT_KINDS[kind].folder).glob("*") if step.name.isdigit()]
    published = [str(step) for step in steps if (step / "commit_success.txt").is_file()]
    if not published:
        raise UserError(f"{run} has no {kind} snapshot: train until the first one is saved, or choose another --kind")
    return published


def _list_checkpoints(path: Path) -> list[Path]:
    """List the checkpoints in a directory; empty if the directory is itself a checkpoint."""
    files = ("*.safetensors", "*.safetensors.index.json", "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
    if not path.is_dir() or has_file(path, *files):
        return []
    return [child for child in path.iterdir() if child.is_dir() and _is_complete_checkpoint(child)]


def _is_complete_checkpoint(path: Path) -> bool:
    if ".orbax-checkpoint-tmp" in path.name or path.name.startswith("."):
        return False
    # The items of an Orbax checkpoint (params, state) also contain _METADATA; only steps have a number in their name.
    is_step = _NUMBERS.search(path.name) is not None
    orbax_files = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "*/_METADATA")
    return has_file(path, "*.safetensors") or (is_step and has_file(path, *orbax_files))


def _fill_tokens(source: CheckpointSource, tokens_per_step: int) -> CheckpointSource:
    if source.tokens is not None or source.step is None:
        return source
    return replace(source, tokens=source.step * tokens_per_step)


def _compute_positions(sources: Sequence[CheckpointSource]) -> tuple[str, np.ndarray]:
    known = {"tokens": [source.tokens for source in sources], "steps": [source.step for source in sources]}
    for unit, positions in known.items():
        if None not in positions:
            return unit, np.array(positions)
    return "order", np.arange(len(sources))
