"""Evaluate merges of a run's newest snapshots ("previews") while another process trains the run.

Preview records are appended to RUN/watch.jsonl, because only the training process writes RUN/metrics.jsonl (it rewrites
the file when it resumes). The records of both files have the same format, and `Run.metrics` reads both. Several
watchers may write at once: each holds a lock while it reads what the others wrote and appends its row. In a bucket,
which has no locks, only one may.
"""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from pma_jax.config import Config, snapshot_kind
from pma_jax.config.errors import DamageError
from pma_jax.data.sampling import SELECT, HeldOutLoss
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.evaluation.sweep import Cell
from pma_jax.merging import recipes
from pma_jax.merging.preview import Window
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import snapshots, steps
from pma_jax.runs.directory import Run, append_watch_records, lock_watch_records, read_metric_records
from pma_jax.runs.snapshots import Snapshot, is_snapshot, read_snapshot
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import make_mesh


def watch(
    run: Run,
    recipe: str | None = None,
    windows: Sequence[int] | None = None,
    kind: str | None = None,
    *,
    poll_seconds: float = 5.0,
    once: bool = False,
) -> Iterator[str]:
    """Evaluate previews as snapshots are published, until the end of `run`; yield one line of text per preview.

    A preview merges the newest N published snapshots from `preview.start_tokens` on with `recipe`, as during training.
    Previews in watch.jsonl are not evaluated again, unless they are of other held-out text. A snapshot that cannot be
    read (corrupt, or removed by retention) is skipped and reported in a line; merges that would then have a gap are not
    made. Host memory holds the parameters of the largest window; devices hold them while averaging. Process 0 lists the
    snapshots and writes watch.jsonl.

    Args:
        run: The run to watch.
        recipe: Text of the merging recipe; `preview.recipe` by default.
        windows: Numbers of snapshots to merge; `preview.windows` by default, or `checkpoint.window` if that is empty.
        kind: The kind of snapshots, such as "point" or "worker_0"; by default the first of `checkpoint.kinds`.
        poll_seconds: Seconds between listings of the published snapshots.
        once: Return after the snapshots that exist now.

    Raises:
        UserError: The recipe is invalid or rejects a window, or the held-out text cannot be read.
    """
    config = run.config
    recipe, kind = recipe or config.preview.recipe, kind or config.checkpoint.kinds[0]
    windows = sorted(set(windows or config.preview.windows or (config.checkpoint.window,)))
    for n in windows:
        recipes.coefficients(recipe, np.arange(1, n + 1))  # validates the recipe
    names = {n: Cell(recipe, n, kind=kind).text for n in windows}
    log = run.path / "watch.jsonl"
    buffer = _SnapshotBuffer(config, windows[-1])  # makes the mesh, before a collective can initialise the backend
    evaluate = make_evaluator(config, buffer.mesh, SELECT)
    published, text, handled_tokens = _PublishedSnapshots(run, kind), evaluate.sample.digest, -1
    while True:
        yield from published.refresh()
        new = [s for s in published.snapshots if s.tokens > handled_tokens]
        recorded = _broadcast_recorded_previews(log, text) if new else set()
        for snapshot in new:
            candidates = [s for s in published.snapshots if s.tokens <= snapshot.tokens]
            available = buffer.count_without_gap(candidates)
            missing = [n for n in windows if n <= available and (names[n], snapshot.tokens) not in recorded]
            # Load the newest snapshot even if no preview needs it yet: retention may remove it before one does.
            preloads = snapshot is new[-1] and available < windows[-1] and not config.is_run_complete(snapshot.tokens)
            failed = buffer.load_newer(candidates[-available:]) if missing or preloads else None
            if failed:
                handled_tokens = max(handled_tokens, snapshot.tokens) if failed[0] is snapshot else handled_tokens
                yield published.exclude(*failed)
                break
            for n, (_, merged) in zip(missing, buffer.window.merges(recipe, missing), strict=True):
                yield from _record_preview(log, snapshot, names[n], evaluate(merged), text)
            handled_tokens = snapshot.tokens
        else:
            if once or config.is_run_complete(handled_tokens):
                return
            time.sleep(poll_seconds)


def _record_preview(
    log: epath.Path, snapshot: Snapshot, name: str, evaluated: HeldOutLoss, text_digest: str
) -> list[str]:
    """Append a preview to watch.jsonl, and return the line that reports it; none if another wrote it."""
    record = {"kind": "preview", "by": "watch", "tokens": snapshot.tokens, "step": snapshot.step, "recipe": name}
    record |= dataclasses.asdict(evaluated) | {"text": text_digest}
    if hosts.is_first_process():
        with lock_watch_records(log.parent):
            if (name, snapshot.tokens) in _read_recorded_previews(log, text_digest):
                return []
            append_watch_records(log.parent, [record])
    return [f"{snapshot.tokens / 1e6:.2f}M tokens  held-out loss of {name} {evaluated.loss:.4f}"]


class _PublishedSnapshots:
    """The published snapshots of one kind from `preview.start_tokens` on. The metadata of each are read only once.

    Process 0 reads the directory and the metadata, and broadcasts them.
    """

    def __init__(self, run: Run, kind: str):
        self.snapshots: list[Snapshot] = []  # as of the last refresh, sorted by tokens
        self._folder, self._kind, self._config = run.path / snapshot_kind(kind).folder, kind, run.config
        # In process 0: folder name -> (folder name, step, tokens, loss), or None if the snapshot cannot be read.
        self._metadata: dict[str, tuple[str, int, int, float | None] | None] = {}

    def refresh(self) -> list[str]:
        """Update `snapshots`; return one line of text for each new snapshot that cannot be read."""
        listed, lines = json.loads(hosts.broadcast_from_first(self._list_as_json))
        self.snapshots = [
            Snapshot(self._folder / name, step, tokens, loss, self._config, kind=self._kind)
            for name, step, tokens, loss in listed
        ]
        return lines

    def _list_as_json(self) -> str:
        """Return a JSON list: the metadata of each readable snapshot, and a line for each new unreadable one."""
        paths = {path.name: path for path in steps.numbered(self._folder) if is_snapshot(path)}
        self._metadata = {name: metadata for name, metadata in self._metadata.items() if name in paths}
        lines = []
        for name in paths.keys() - self._metadata.keys():
            self._metadata[name] = None
            try:
                snapshot = read_snapshot(paths[name])
                self._metadata[name] = (name, snapshot.step, snapshot.tokens, snapshot.loss)
            except DamageError as error:
                lines.append(f"skipped: {error}")
        readable = [m for m in self._metadata.values() if m and m[2] >= self._config.preview.start_tokens]
        return json.dumps([sorted(readable, key=lambda metadata: metadata[2]), lines])

    def exclude(self, snapshot: Snapshot, error: DamageError) -> str:
        """Omit a snapshot from all later refreshes; return the line of text that reports it."""
        self._metadata[snapshot.path.name] = None
        return f"skipped: {error}"


class _SnapshotBuffer:
    """The parameters of the newest snapshots, in host memory."""

    def __init__(self, config: Config, size: int):
        self.window = Window(size, functools.partial(snapshots.are_consecutive, config))
        self.mesh = make_mesh(config.mesh)
        self._config = config
        self._abstract = abstract_params(config.model, self.mesh)

    def count_without_gap(self, candidates: Sequence[Snapshot]) -> int:
        """Count the snapshots that end with the last candidate and have none missing between them.

        Counts snapshots in the buffer (whose files may be gone) and candidates, up to the size of the buffer.
        """
        tokens = sorted({*self.window.tokens, *(s.tokens for s in candidates)})[-self.window.size :]
        pairs = zip(tokens[-2::-1], tokens[:0:-1], strict=True)  # (older, newer), from the newest pair
        is_next = (snapshots.are_consecutive(self._config, older, newer) for older, newer in pairs)
        return 1 + sum(1 for _ in itertools.takewhile(bool, is_next))

    def load_newer(self, snapshots: Sequence[Snapshot]) -> tuple[Snapshot, DamageError] | None:
        """Restore the snapshots newer than those in the buffer; return the first that fails, with its error."""
        for snapshot in snapshots:
            if snapshot.tokens > max(self.window.tokens, default=-1):
                try:
                    params = _restore_params(snapshot, self._abstract)
                except DamageError as error:
                    return snapshot, error
                self.window.add(snapshot.tokens, params)
        return None


def _restore_params(snapshot: Snapshot, abstract: Any) -> Any:
    """Restore the parameters.

    Raises:
        DamageError: In all processes, if it is corrupt or was removed meanwhile.
        StorageError: In all processes, if one of them cannot read it.
    """
    params = jax.block_until_ready(snapshots.restore_params(snapshot, abstract))

    def check_present() -> None:
        # For snapshots of earlier versions, which have no digests: removed arrays may read as zeros. Retention removes
        # the commit marker before the arrays.
        if not is_snapshot(snapshot.path):
            raise DamageError(f"{snapshot.path} was removed while it was being read")

    hosts.run_in_all(check_present)
    return params


def _broadcast_recorded_previews(log: epath.Path, text_digest: str) -> set[tuple[str, int]]:
    """Return the (recipe, tokens) of the previews on a text in watch.jsonl, the same in all processes of a command."""

    def read() -> str:
        with lock_watch_records(log.parent):
            return json.dumps(sorted(_read_recorded_previews(log, text_digest)))

    return {(recipe, tokens) for recipe, tokens in json.loads(hosts.broadcast_from_first(read))}


def _read_recorded_previews(log: epath.Path, text_digest: str) -> set[tuple[str, int]]:
    """Read the (recipe, tokens) of the previews on a text in watch.jsonl."""
    previews = [r for r in read_metric_records(log) if r["kind"] == "preview" and r.get("text") == text_digest]
    return {(r["recipe"], r["tokens"]) for r in previews}
