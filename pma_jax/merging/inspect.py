"""What a directory holds: kind, leaves, shapes, dtypes, tokens, provenance. Any format that can be merged."""

from typing import Any

from etils import epath

from pma_jax.runs import restore
from pma_jax.runs.directory import Run, is_run, open_run
from pma_jax.runs.snapshots import is_snapshot, read_snapshot
from pma_jax.storage.formats.open import describe_source, open_source


def inspect(path: epath.PathLike, subtree: str | None = None) -> dict[str, Any]:
    """Facts of a run, a snapshot or any checkpoint that can be merged; reads no array.

    Raises ValueError for anything else.
    """
    if is_run(path):
        run = open_run(path)
        return {
            "kind": "run",
            "path": str(run.path),
            "snapshots": _marks(run, "point"),
            "block_means": _marks(run, "block_mean"),
            "states": [{"step": s.step, "tokens": s.tokens} for s in run.states],
            "facts": run.metadata,
        }
    if not is_snapshot(path):
        source = open_source(str(path), subtree)
        return describe_source(source) | {"parameters": sum(leaf.elements for leaf in source.leaves.values())}
    snapshot = read_snapshot(path)
    leaves = restore.stored_leaves(snapshot.path)
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


def as_text(facts: dict[str, Any]) -> str:
    """The facts for a person."""
    lines = [f"{facts['path']}: {facts['kind']}"]
    if facts["kind"] == "run":
        for kind in ("snapshots", "block_means", "states"):
            marks, what = facts[kind], kind.replace("_", " ")
            if not marks and kind == "block_means":
                continue
            span = f", {marks[0]['tokens']:,} to {marks[-1]['tokens']:,} tokens" if marks else ""
            loss = f", newest held-out loss {marks[-1]['loss']:.4f}" if marks and kind != "states" else ""
            lines.append(f"{len(marks)} {what}{span}{loss}")
        lines += [f"{key}: {value}" for key, value in facts["facts"].items()]
        return "\n".join(lines)
    if "merge" not in facts:
        known = [f"{facts[key]:,} {key}" for key in ("step", "tokens") if facts[key] is not None]
        lines.append(", ".join([*known, f"{facts['parameters']:,} parameters, {facts['nbytes']:,} bytes"]))
        lines += [f"note: {note}" for note in facts["notes"]]
        return "\n".join(lines + _leaf_lines(facts))
    lines.append(f"step {facts['step']:,}, {facts['tokens']:,} tokens, {facts['parameters']:,} parameters")
    if merge := facts["merge"]:
        lines.append(
            f"{merge['recipe']} of {len(merge['sources'])} snapshots, summed in {merge['accumulation_dtype']}:"
        )
        for source, c in zip(merge["sources"], merge["coefficients"], strict=True):
            lines.append(f"  {c:+.6f}  {source['tokens']:,} tokens  {source['path']}")
    return "\n".join(lines + _leaf_lines(facts))


def _leaf_lines(facts: dict[str, Any]) -> list[str]:
    return [f"  {name}  {leaf['dtype']} {tuple(leaf['shape'])}" for name, leaf in facts["leaves"].items()]


def _marks(run: Run, kind: str) -> list[dict[str, Any]]:
    return [{"step": s.step, "tokens": s.tokens, "loss": s.loss} for s in run.of_kind(kind)]
