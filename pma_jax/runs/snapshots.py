"""Snapshots: parameters of one point of a run, their mean over an interval, or a merge of several snapshots."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.config.errors import DamageError, UserError
from pma_jax.runs import integrity, restore, steps
from pma_jax.runs.steps import COMMIT_MARKER, StepWriter
from pma_jax.storage.paths import absolute_path, exists


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The metadata of one snapshot; its arrays stay on disk until `restore_params`."""

    path: epath.Path
    step: int  # optimizer steps done
    tokens: int  # tokens consumed
    loss: float | None  # held-out nats per token; None if not evaluated
    config: Config
    merge: dict[str, Any] | None = None  # recipe, sources and coefficients of a merged snapshot; None for others
    kind: str = "point"  # a key of SNAPSHOT_KINDS


def is_snapshot(path: epath.PathLike) -> bool:
    """Return whether `path` is a published snapshot: it has a commit marker and parameters."""
    folder = absolute_path(path)
    return exists(folder / COMMIT_MARKER) and exists(folder / "params")


def read_snapshot(path: epath.PathLike) -> Snapshot:
    """Read the metadata of a snapshot, without its arrays.

    Raises:
        DamageError: `path` is not a snapshot, or its metadata file is corrupt.
        UserError: This version does not know its configuration.
    """
    folder = absolute_path(path)
    if not is_snapshot(folder):
        raise DamageError(f"{path} is neither a run nor a snapshot: give RUN, RUN/snapshots/STEP or a merge's --out")
    metadata = steps.read_metadata(folder, ("step", "tokens", "loss", "config", "kind"))
    config = configuration.resolve_stored(metadata["config"], folder / steps.METADATA_FILE)
    merge = _read_merge(folder)
    return Snapshot(folder, metadata["step"], metadata["tokens"], metadata["loss"], config, merge, metadata["kind"])


def newest_consecutive(config: Config, snapshots: Sequence[Snapshot], count: int) -> list[Snapshot]:
    """Return up to `count` of the newest of a run's snapshots, oldest first, up to the first gap.

    There is a gap where a snapshot that the run saved is missing, because it was removed or set aside.
    """
    newest = list(snapshots[-1:])
    for snapshot in snapshots[-2::-1]:
        if len(newest) == count or not are_consecutive(config, snapshot.tokens, newest[0].tokens):
            break
        newest.insert(0, snapshot)
    return newest


def are_consecutive(config: Config, older_tokens: int, newer_tokens: int) -> bool:
    """Return whether the run saves no snapshot between these two, given by their tokens."""
    return config.snapshot_number(newer_tokens) == config.snapshot_number(older_tokens) + 1


def save_snapshot(writer: StepWriter, params: Any, snapshot: Snapshot, averaged_at_tokens: int | None = None) -> None:
    """Save `params` with the metadata of `snapshot` asynchronously. Do nothing if an equal one is already saved.

    `params` can be donated after this function returns. `averaged_at_tokens` are the tokens of the newest average of
    the workers that they contain; None if there is none.

    Raises:
        UserError: A leaf is not finite (the message names it), or this or the previous, asynchronous write failed.
    """
    writer.save(snapshot.step, {"params": params}, _metadata(snapshot, params, averaged_at_tokens))


def restore_params(snapshot: Snapshot, abstract: Any) -> Any:
    """Restore a snapshot's parameters with the shapes, dtypes and shardings of `abstract`.

    Raises:
        UserError: Leaves are missing, unknown, of another shape, corrupt (by their digest) or not finite. The message
            names the first ten of them.
    """
    params = restore.restore_tree(snapshot.path, "params", abstract)
    bad = integrity.non_finite_leaves(params)
    if bad:
        raise UserError(f"{snapshot.path} has parameters that are not finite, do not use it: {', '.join(bad[:10])}")
    return params


def _metadata(snapshot: Snapshot, params: Any, averaged_at_tokens: int | None = None) -> dict[str, Any]:
    integrity.check_finite(params, snapshot.step, snapshot.tokens)
    averaged = {} if averaged_at_tokens is None else {"averaged_at_tokens": averaged_at_tokens}
    return (
        averaged
        | {
            "step": snapshot.step,
            "tokens": snapshot.tokens,
            "loss": snapshot.loss,
            "kind": snapshot.kind,
            "config": json.loads(configuration.to_json(snapshot.config)),
        }
        | integrity.digests_as_metadata(params)
    )


def _read_merge(folder: epath.Path) -> dict[str, Any] | None:
    """Summarise the provenance of a merged snapshot; return None if the snapshot was not made by a merge."""
    provenance = restore.read_provenance(folder)
    if not provenance:
        return None
    with restore.report_read_errors(folder / "provenance.json"):
        return {
            "recipe": provenance["recipe"],
            "coefficients": provenance["coefficients"],
            "sources": [{"path": s["source"], "step": s["step"], "tokens": s["tokens"]} for s in provenance["sources"]],
            "accumulation_dtype": ", ".join(provenance["accumulation_dtypes"]),
        }
