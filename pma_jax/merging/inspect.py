"""Describe what a path holds (`pma inspect`): a run, a snapshot, or all that can be merged."""

from collections.abc import Sequence
from typing import Any

from etils import epath

from pma_jax.config import snapshot_kind
from pma_jax.config.errors import UserError
from pma_jax.merging import gather
from pma_jax.merging.listing import list_checkpoints
from pma_jax.runs import restore
from pma_jax.runs.directory import Run, is_run, open_run
from pma_jax.runs.snapshots import is_snapshot, read_snapshot
from pma_jax.storage.formats.open import open_source


def inspect(path: epath.PathLike, subtrees: Sequence[str] = ()) -> dict[str, Any]:
    """Return the contents of a run, a snapshot or all that can be merged as JSON values; read no array.

    Args:
        path: A run, a checkpoint (a directory or file, or hf://org/repo@revision), a directory of checkpoints, or a
            pattern of revisions.
        subtrees: The parts of another trainer's checkpoint to read, such as "params"; if none, the parameters.

    Raises:
        UserError: `path` holds no readable run or checkpoint, or several that cannot be told apart.
    """
    if is_run(path):
        if subtrees:
            raise UserError(f"--subtree {subtrees[0]}: {path} is a run of pma_jax, whose parameters are known; omit it")
        run = open_run(path)
        return {
            "kind": "run",
            "path": str(run.path),
            "snapshots": _list_snapshots(run, "point"),
            "block_means": _list_snapshots(run, "block_mean"),
            "workers": {kind: _list_snapshots(run, kind) for kind in run.worker_kinds},
            "states": [{"step": s.step, "tokens": s.tokens} for s in run.states],
            "facts": run.metadata,
        }
    if not is_snapshot(path) and list_checkpoints(str(path)).is_expanded:
        return _describe_series(str(path), subtrees)
    if not is_snapshot(path):
        source = open_source(str(path), subtrees)
        return {
            "kind": source.format,
            "path": source.origin,
            "tokens": source.tokens,
            "step": source.step,
            "epoch": source.epoch,
            "nbytes": source.nbytes,
            "leaves": {name: {"shape": list(leaf.shape), "dtype": leaf.dtype} for name, leaf in source.leaves.items()},
            "notes": list(source.notes),
            "parameters": sum(leaf.elements for leaf in source.leaves.values()),
        }
    snapshot = read_snapshot(path)
    leaves = restore.read_params_metadata(snapshot.path)
    return {
        "kind": ("merged " if snapshot.merge else "") + ("snapshot" if snapshot.kind == "point" else "block mean"),
        "path": str(snapshot.path),
        "step": snapshot.step,
        "tokens": snapshot.tokens,
        "loss": snapshot.loss,
        "merge": snapshot.merge,
        "parameters": sum(leaf["size"] for leaf in leaves.values()),
        "leaves": leaves,
    }


def format_description(description: dict[str, Any]) -> str:
    """Format the result of `inspect` as lines of text."""
    lines = [f"{description['path']}: {description['kind']}"]
    if description["kind"] == "run":
        return "\n".join(lines + _run_lines(description))
    if "checkpoints" in description:
        return "\n".join(lines + _series_lines(description))
    if "merge" not in description:
        known = [f"{unit} {description[unit]:,}" for unit in ("step", "epoch") if description[unit] is not None]
        known += [f"{description['tokens']:,} tokens"] if description["tokens"] is not None else []
        size = f"{description['parameters']:,} parameters, {description['nbytes']:,} bytes"
        lines.append(", ".join([*known, size]))
        lines += [f"note: {note}" for note in description["notes"]]
    else:
        step, tokens, parameters = (description[key] for key in ("step", "tokens", "parameters"))
        lines.append(f"step {step:,}, {tokens:,} tokens, {parameters:,} parameters")
        if merge := description["merge"]:
            count, dtype = len(merge["sources"]), merge["accumulation_dtype"]
            lines.append(f"{merge['recipe']} of {count} snapshots, summed in {dtype}:")
            for source, coefficient in zip(merge["sources"], merge["coefficients"], strict=True):
                lines.append(f"  {coefficient:+.6f}  {source['tokens']:,} tokens  {source['path']}")
    for name, leaf in description["leaves"].items():
        lines.append(f"  {name}  {leaf['dtype']} {tuple(leaf['shape'])}")
    return "\n".join(lines)


def _describe_series(address: str, subtrees: Sequence[str]) -> dict[str, Any]:
    """Describe a directory of checkpoints or a pattern of revisions: its checkpoints, oldest first."""
    series = gather.open_checkpoints([address], subtrees=subtrees)
    checkpoints = [
        {
            "path": source.origin,
            "step": source.step,
            "tokens": source.tokens,
            "epoch": source.epoch,
            "stage": stage,
            "nbytes": source.nbytes if source.leaves else None,
        }
        for source, stage in zip(series.sources, series.stages, strict=True)
    ]
    return {
        "kind": f"{len(checkpoints)} checkpoints",
        "path": address,
        "ordered_by": None if series.doubt else series.unit,
        "checkpoints": checkpoints,
        "left_out": list_checkpoints(address).left_out,
        "notes": [*series.notes, *(note for source in series.sources for note in source.notes)],
    }


def _series_lines(description: dict[str, Any]) -> list[str]:
    order = description["ordered_by"]
    lines = [f"oldest first, by {order}:" if order else "in an order that is not known:"]
    has_stages = len({checkpoint["stage"] for checkpoint in description["checkpoints"]}) > 1
    for checkpoint in description["checkpoints"]:
        known = [f"{unit} {checkpoint[unit]:,}" for unit in ("step", "epoch") if checkpoint[unit] is not None]
        known += [f"{checkpoint['tokens']:,} tokens"] if checkpoint["tokens"] is not None else []
        known += [f"{checkpoint['nbytes']:,} bytes"] if checkpoint["nbytes"] is not None else []
        known += [f"stage {checkpoint['stage']}"] if has_stages else []
        lines.append(f"  {checkpoint['path']}  {', '.join(known)}")
    lines += [f"left out: {name} ({reason})" for name, reason in description["left_out"].items()]
    return lines + [f"note: {note}" for note in dict.fromkeys(description["notes"]) if "left out of" not in note]


def _run_lines(description: dict[str, Any]) -> list[str]:
    lines = []
    workers = {f"snapshots of {folder}": steps for folder, steps in description["workers"].items()}
    listed = {kind: description[kind] for kind in ("snapshots", "block_means", "states")}
    for kind, steps in (listed | workers).items():
        if not steps and kind == "block_means":
            continue
        span = f", {steps[0]['tokens']:,} to {steps[-1]['tokens']:,} tokens" if steps else ""
        newest = steps[-1].get("loss") if steps else None
        loss = "" if newest is None else f", newest held-out loss {newest:.4f}"
        lines.append(f"{len(steps)} {kind.replace('block_', 'block ')}{span}{loss}")
    return lines + [f"{key}: {value}" for key, value in description["facts"].items()]


def _list_snapshots(run: Run, kind: str) -> list[dict[str, Any]]:
    """List the snapshots of one kind, with their losses and the digests of the text of these (None: not recorded)."""
    record_kind = snapshot_kind(kind).record_kind
    texts = {record["tokens"]: record.get("text") for record in run.metrics if record["kind"] == record_kind}
    return [
        {"step": s.step, "tokens": s.tokens, "loss": s.loss, "text": texts.get(s.tokens)} for s in run.of_kind(kind)
    ]
