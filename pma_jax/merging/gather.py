"""Open the checkpoints of a merge, order them by their position in training, and select among them.

`listing` finds the checkpoints at an address, `ordering` orders them. Error messages are one line. Neither JAX nor
Orbax is imported, so that a merge starts without delay.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config import resolve_stored
from pma_jax.config.errors import UserError
from pma_jax.config.same_model import check_one_model
from pma_jax.merging import selection
from pma_jax.merging.listing import is_run_directory, list_checkpoints, resolve_address
from pma_jax.merging.ordering import Ordering, keep_given_order, order_checkpoints
from pma_jax.runtime.memory import resident_bytes
from pma_jax.storage.formats import hub
from pma_jax.storage.formats.names import MAX_POSITION
from pma_jax.storage.formats.open import describe_hub_revision, open_if_deferred, open_source
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.paths import as_path

ORDERS = ("position", "given")
# Memory that a checkpoint takes for each tensor while it is opened (measured with a million).
_OPENED_LEAF_BYTES = 500


@dataclass(frozen=True)
class CheckpointSeries:
    """Checkpoints, oldest first.

    Attributes:
        sources: K checkpoints.
        positions: int64 [K], not decreasing: tokens if all are known, else steps, else epochs, else 1 … K. The order of
            checkpoints with equal positions is not known; all are 0 if no order is known.
        unit: What the positions count: "tokens", "steps", "epochs" or "order".
        stages: For each checkpoint, the run or directory that contains it, with the stage in its name; None if the
            address of a checkpoint states neither.
        notes: Inferred settings and warnings for the user, one line each.
        doubt: Why the order is not known; None if it is.
        is_reordered: Whether the command named the checkpoints in another order.
        is_expanded: Whether an address stood for several checkpoints: a run, a directory or a pattern.
    """

    sources: tuple[CheckpointSource, ...]
    positions: np.ndarray
    unit: str
    stages: tuple[str | None, ...]
    notes: tuple[str, ...] = ()
    doubt: str | None = None
    is_reordered: bool = False
    is_expanded: bool = False

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
    subtrees: Sequence[str] = (),
    snapshot_kind: str | None = None,
    tokens_per_step: int | None = None,
    order: str = "position",
    memory_limit_bytes: int = sys.maxsize,
) -> CheckpointSeries:
    """Open the checkpoints at `addresses`, ordered by their position in training.

    Only metadata are read. Hub revisions are listed but not downloaded.

    Args:
        addresses: Runs, checkpoints, directories of checkpoints, hf://org/repo@revision (or a pattern of revisions).
        subtrees: Paths of the subtrees to read, such as "params". If there are none, the parameters are located, and a
            note reports where.
        snapshot_kind: Which snapshots of a run to open, "point" or "block_mean"; if None, the first kind that the run
            saves.
        tokens_per_step: Tokens per training step, to compute the tokens of checkpoints that record only their step.
        order: "position", or "given": keep the order of `addresses`; the checkpoints of one address that stands for
            several are still ordered by position.
        memory_limit_bytes: Maximum resident memory of this process.

    Raises:
        UserError: There is no checkpoint at an address, an address has several meanings, a checkpoint is given twice,
            different kinds of snapshots are mixed, or the names of their tensors exceed the memory limit.
    """
    listings = [list_checkpoints(str(address), snapshot_kind) for address in addresses]
    check_distinct([path for listing in listings for path in listing.paths])
    notes = [note for listing in listings for note in listing.notes]
    members: list[tuple[int, CheckpointSource, str | None]] = []  # number of the address, checkpoint, stage
    for number, listing in enumerate(listings):
        opened = []
        for path in listing.paths:
            if members or opened:
                _check_memory(len((opened or [members[-1][1]])[-1].leaves), memory_limit_bytes)
            opened.append(_open(path, subtrees, tokens_per_step, notes))
        indices = _order_within(addresses[number], opened, listing.stages) if order == "given" else range(len(opened))
        members += [(number, opened[i], listing.stages[i]) for i in indices]
    ordering = (keep_given_order if order == "given" else order_checkpoints)(
        [source for _, source, _ in members], [stage for _, _, stage in members]
    )
    members = [members[i] for i in ordering.indices]
    numbers = [number for number, _, _ in members]
    series = CheckpointSeries(
        sources=tuple(source for _, source, _ in members),
        positions=ordering.positions,
        unit=ordering.unit,
        stages=tuple(stage for _, _, stage in members),
        notes=(*notes, *_order_notes(ordering, numbers != sorted(numbers))),
        doubt=ordering.doubt,
        is_reordered=numbers != sorted(numbers),
        is_expanded=any(listing.is_expanded for listing in listings),
    )
    check_snapshots_match(series.sources)
    return series


def open_each(addresses: Sequence[str | Path]) -> list[tuple[CheckpointSource, str | None]]:
    """Open one checkpoint per address, in the order of the addresses, and return each with its stage.

    Raises:
        UserError: An address stands for several checkpoints, or one is given twice.
    """
    listings = [list_checkpoints(str(address)) for address in addresses]
    for address, listing in zip(addresses, listings, strict=True):
        if listing.is_expanded:
            raise UserError(f"{address} holds {len(listing.paths)} checkpoints: name those that you mean, one by one")
    check_distinct([str(address) for address in addresses])
    return [(open_source(address), listing.stages[0]) for address, listing in zip(addresses, listings, strict=True)]


def select_checkpoints(
    series: CheckpointSeries,
    *,
    last: int | None = None,
    between_tokens: tuple[int | None, int | None] | None = None,
    every_tokens: int | None = None,
    tolerance_tokens: int | None = None,
    across_stages: bool = False,
) -> CheckpointSeries:
    """Select checkpoints for a merge, and check that they are of one stage of one run.

    Args:
        series: The checkpoints to select from.
        last: Number of checkpoints to select, the newest ones.
        between_tokens: First and last position, both inclusive; None leaves that end open.
        every_tokens: Interval between the selected checkpoints, back from the newest.
        tolerance_tokens: Largest distance from a position of that grid; by default a tenth of the interval.
        across_stages: Allow checkpoints of several stages.

    Raises:
        UserError: Nothing is selected, a stage boundary would be crossed, the order is needed and not known, tokens are
            needed and not known, or the last snapshots of a run have a gap.
    """
    if last is not None and series.doubt is not None and last != len(series.sources):
        raise UserError(f"cannot select the last {last}: {order_advice(series.doubt)}")
    if between_tokens is not None and series.unit != "tokens":
        series, between_tokens = _take_range(series, between_tokens), None
    if (between_tokens is not None or every_tokens is not None) and series.unit != "tokens":
        raise UserError(f"cannot select by tokens, because {_why_no_tokens(series)}")
    selected = selection.select(
        series.positions,
        last=last,
        between_tokens=between_tokens,
        every_tokens=every_tokens,
        tolerance_tokens=tolerance_tokens,
        stages=series.stages,
        across_stages=across_stages,
        unit=series.unit,
        is_series=series.is_expanded,
    )
    chosen = replace(series.take(selected.indices), notes=(*series.notes, *selected.notes))
    if last is not None and every_tokens is None:
        _check_consecutive(chosen)
    return chosen


def _take_range(series: CheckpointSeries, between_tokens: tuple[int | None, int | None]) -> CheckpointSeries:
    """Return the checkpoints with tokens in a range, of a series whose positions are not its tokens.

    Tokens restart between stages, several checkpoints state the same rounded tokens, or the user gave another order.
    Where the order is known and tokens increase in the selection, they are its positions.

    Raises:
        UserError: The tokens of some checkpoints are unknown, or none is in the range.
    """
    tokens = [source.tokens for source in series.sources if source.tokens is not None]
    if len(tokens) < len(series.sources):
        raise UserError(f"cannot select by tokens, because {_why_no_tokens(series)}")
    selected = series.take(selection.select_range(tokens, between_tokens).tolist())
    positions = np.array([source.tokens for source in selected.sources])
    if selected.doubt is not None or (np.diff(positions) <= 0).any():
        return selected
    return replace(selected, positions=positions, unit="tokens")


def _check_consecutive(chosen: CheckpointSeries) -> None:
    """Raise UserError if the checkpoints are the last snapshots of one run, and one that it saved between is missing.

    Retention keeps the newest snapshots and some older ones, so that the last N of them may span a gap.
    """
    run, numbers = chosen.stages[-1], snapshot_numbers(chosen)
    if numbers is None:
        return
    for index in reversed(range(1, len(numbers))):
        if numbers[index] - numbers[index - 1] > 1:
            raise UserError(
                f"the last {len(numbers)} snapshots of {run} have a gap: {numbers[index] - numbers[index - 1] - 1} "
                f"between {chosen.positions[index - 1]:,} and {chosen.positions[index]:,} tokens are missing (removed "
                f"by retention?): use --last {len(numbers) - index}, or choose with --tokens or --every"
            )


def snapshot_numbers(chosen: CheckpointSeries) -> list[int] | None:
    """Return the numbers (`Config.snapshot_number`) of the snapshots of one run; None for other checkpoints."""
    metadata = [snapshot_metadata(source) for source in chosen.sources]
    run = chosen.stages[-1]
    if None in metadata or run is None or set(chosen.stages) != {run} or not is_run_directory(as_path(run)):
        return None
    from pma_jax import config as configuration  # its imports take longer than a small merge

    assert metadata[-1] is not None
    config = configuration.resolve(metadata[-1]["config"])
    return [config.snapshot_number(int(tokens)) for tokens in chosen.positions]


def order_advice(doubt: str) -> str:
    """Return why the order of checkpoints is not known, and what to do, for an error message."""
    return f"{doubt}, so their order is not known; name the checkpoints oldest first, with --order given"


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
    series = replace(series, sources=tuple(map(open_if_deferred, series.sources)))
    check_distinct([source.origin for source in series.sources])  # two revisions of a hub can be one commit
    return series, coefficients[:, columns]


def snapshot_metadata(source: CheckpointSource) -> dict[str, Any] | None:
    """Return the metadata of a snapshot that pma_jax wrote; None for any other checkpoint."""
    metadata = source.metadata.get("custom", {}) if source.format == "orbax" else {}
    return metadata if {"tokens", "step", "config", "kind"} <= metadata.keys() else None


def check_snapshots_match(sources: Sequence[CheckpointSource]) -> None:
    """Check that the sources are point snapshots or block-mean snapshots of one model, or no snapshots of pma_jax.

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
    configs = {source.origin: entry["config"] for entry, source in zip(metadata, sources, strict=True) if entry}
    if len({json.dumps(config, sort_keys=True) for config in configs.values()}) > 1:
        check_one_model({path: resolve_stored(config, path).model for path, config in configs.items()})


def _check_memory(leaves: int, limit_bytes: int) -> None:
    """Raise UserError if the names of a checkpoint with so many tensors would exceed the memory limit."""
    needed_bytes = (resident_bytes() or 0) + leaves * _OPENED_LEAF_BYTES
    if needed_bytes > limit_bytes:
        raise UserError(
            f"the names of {leaves:,} tensors per checkpoint need more than {needed_bytes // 2**20} MiB of memory; "
            "raise the memory limit, or name fewer checkpoints"
        )


def _open(path: str, subtrees: Sequence[str], tokens_per_step: int | None, notes: list[str]) -> CheckpointSource:
    """Open a checkpoint, or describe a hub revision; compute its tokens from its step if they are not known."""
    source = (describe_hub_revision if path.startswith(hub.PREFIX) else open_source)(path, subtrees)
    if tokens_per_step is None or source.step is None:
        return source
    tokens = source.step * tokens_per_step
    if source.tokens is None:
        if tokens > MAX_POSITION:
            raise UserError(f"{path}: {tokens_per_step:,} tokens per step at step {source.step:,} are too many")
        return replace(source, tokens=tokens)
    if source.tokens != tokens:
        notes.append(
            f"{source.origin} has {source.tokens:,} tokens, not {tokens:,} as --tokens-per-step says; its own are used"
        )
    return source


def _order_within(
    address: str | Path, sources: Sequence[CheckpointSource], stages: Sequence[str | None]
) -> tuple[int, ...]:
    """Return the indices of the checkpoints at one address, oldest first; raise UserError if their order is unknown."""
    within = order_checkpoints(sources, stages)
    if len(set(within.positions.tolist())) < len(sources):
        raise UserError(
            f"{address} stands for {len(sources)} checkpoints whose order is not known: name them one by one, in order"
        )
    return within.indices


def check_distinct(paths: Sequence[str]) -> None:
    """Raise UserError if two addresses are of the same checkpoint."""
    first_of: dict[str, str] = {}
    for path in paths:
        key = resolve_address(path)
        if key in first_of:
            also = "" if first_of[key] == path else f", also as {path}"
            raise UserError(f"{first_of[key]} is given twice{also}: name each checkpoint once")
        first_of[key] = path


def _order_notes(ordering: Ordering, is_reordered: bool) -> list[str]:
    notes = list(ordering.notes)
    if ordering.doubt is not None:
        notes.append(
            f"{ordering.doubt}: their order is not known, and the configuration and tokenizer are those of the last one"
        )
    elif (np.diff(ordering.positions) == 0).any():
        notes.append("several checkpoints have the same position: their order is not known")
    elif is_reordered:
        notes.append(f"the checkpoints are ordered by {ordering.unit}, not as the command names them")
    return notes


def _why_no_tokens(series: CheckpointSeries) -> str:
    """Return why the positions of a series are no tokens, and what to do, for an error message."""
    if all(source.tokens is not None for source in series.sources):
        return (
            "they do not increase in the order of the checkpoints: choose a range of one stage with --tokens, or name "
            "the checkpoints to merge"
        )
    return "the tokens of some checkpoints are unknown: give --tokens-per-step, or name the checkpoints to merge"
