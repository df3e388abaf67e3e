"""Previews of a run that another process is training: merges of its newest snapshots, evaluated as they are published.

The trainer alone writes RUN/metrics.jsonl (it rewrites the file when it resumes), so the previews go to
RUN/watch.jsonl, in records of the same form; `Run.metrics` reads both.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from pma_jax.config import SNAPSHOT_KINDS, Config
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.evaluation.sweep import Cell
from pma_jax.merging import recipes
from pma_jax.merging.preview import Window
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import snapshots
from pma_jax.runs.directory import Run, read_metric_records, record_lines
from pma_jax.runs.snapshots import Snapshot, is_snapshot, read_snapshot
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage import atomic
from pma_jax.storage.lines import LineFile


def watch(
    run: Run,
    recipe: str | None = None,
    windows: Sequence[int] | None = None,
    kind: str | None = None,
    *,
    poll_seconds: float = 5.0,
    once: bool = False,
) -> Iterator[str]:
    """Follow `run` until the snapshot at its horizon; append previews to RUN/watch.jsonl and yield one line for each.

    A preview is the trainer's: `recipe` over the newest N snapshots from `preview.start_tokens` on. Only published
    snapshots are read. A snapshot that cannot be read (removed by retention, or corrupt) is reported, and no merge
    spans it, nor one that was removed unseen. Previews in watch.jsonl are not computed again. Host memory holds the
    models of the largest window; devices hold them while they are averaged. Process 0 lists the directory and writes.

    Args:
        run: The run.
        recipe: The recipe's text, by default `preview.recipe`.
        windows: Numbers of snapshots, by default `preview.windows`, or `checkpoint.window` if there are none.
        kind: The kind of snapshots; by default the first that the run saves.
        poll_seconds: Interval between listings of the run's directory.
        once: Preview the snapshots that exist, and return.

    Raises:
        ValueError: The recipe is invalid or rejects a window, or the held-out text cannot be read.
    """
    config = run.config
    recipe, kind = recipe or config.preview.recipe, kind or config.checkpoint.kinds[0]
    windows = sorted(set(windows or config.preview.windows or (config.checkpoint.window,)))
    for n in windows:
        recipes.coefficients(recipe, np.arange(1, n + 1))  # validates the recipe
    names = {n: Cell(recipe, n, kind=kind).text for n in windows}
    log = run.path / "watch.jsonl"
    newest = _Newest(config, windows[-1])  # first: with several processes, what follows starts the devices
    done = hosts.run_on_first_then_rest(lambda: _done(log))
    published, evaluate, handled_tokens = _Published(run, kind), None, -1
    while True:
        yield from published.look()
        waiting = [s for s in published.snapshots if s.tokens > handled_tokens]
        for snapshot in waiting:
            earlier = [s for s in published.snapshots if s.tokens <= snapshot.tokens]
            reach = newest.reach(earlier)
            wanted = [n for n in windows if n <= reach and (names[n], snapshot.tokens) not in done]
            # Until the largest window is full, read each snapshot when it appears: retention may remove it later.
            fills = snapshot is waiting[-1] and reach < windows[-1] and not config.is_horizon(snapshot.tokens)
            failed = newest.read(earlier[-reach:]) if wanted or fills else None
            if failed:
                handled_tokens = max(handled_tokens, snapshot.tokens) if failed[0] is snapshot else handled_tokens
                yield published.drop(*failed)
                break
            evaluate = evaluate or (make_evaluator(config, newest.mesh) if wanted else None)
            for n, (_, merged) in zip(wanted, newest.window.merges(recipe, wanted), strict=True):
                assert evaluate is not None
                yield _record_preview(log, snapshot, names[n], evaluate(merged))
            handled_tokens = snapshot.tokens
        else:
            if once or config.is_horizon(handled_tokens):
                return
            time.sleep(poll_seconds)


def _record_preview(log: epath.Path, snapshot: Snapshot, name: str, loss: float) -> str:
    """Append a preview to watch.jsonl, and return it as a line of text."""
    record = {"kind": "preview", "by": "watch", "tokens": snapshot.tokens, "step": snapshot.step}
    if hosts.is_first():
        with contextlib.closing(LineFile(log)) as file:
            file.write_lines(record_lines([record | {"recipe": name, "loss": loss}]))
    return f"{snapshot.tokens / 1e6:.2f}M tokens  held-out loss of {name} {loss:.4f}"


class _Published:
    """A run's published snapshots of one kind from `preview.start_tokens` on; the metadata of each are read once.

    Process 0 reads them and broadcasts them to the others.
    """

    def __init__(self, run: Run, kind: str):
        self.snapshots: list[Snapshot] = []  # found by the last look, by tokens
        self._folder, self._kind, self._config = run.path / SNAPSHOT_KINDS[kind].folder, kind, run.config
        # Name -> (name, step, tokens, loss), in process 0; None if the snapshot cannot be read.
        self._known: dict[str, tuple[str, int, int, float | None] | None] = {}

    def look(self) -> list[str]:
        """List the snapshots that exist now; return one line for each that cannot be read."""
        found, lines = json.loads(hosts.broadcast_from_first(self._look))
        self.snapshots = [
            Snapshot(self._folder / name, step, tokens, loss, self._config, kind=self._kind)
            for name, step, tokens, loss in found
        ]
        return lines

    def _look(self) -> str:
        """Return, as JSON, what is known of each snapshot and the lines of those that cannot be read."""
        folders = self._folder.iterdir() if self._folder.exists() else ()
        present = {p.name: p for p in folders if p.name.isdigit() and is_snapshot(p)}
        self._known = {name: known for name, known in self._known.items() if name in present}
        lines = []
        for name in present.keys() - self._known.keys():
            self._known[name] = None
            try:
                found = read_snapshot(present[name])
                self._known[name] = (name, found.step, found.tokens, found.loss)
            except ValueError as error:
                lines.append(f"skipped: {error}")
        start_tokens = self._config.preview.start_tokens
        found = [known for known in self._known.values() if known and known[2] >= start_tokens]
        return json.dumps([sorted(found, key=lambda known: known[2]), lines])

    def drop(self, snapshot: Snapshot, error: ValueError) -> str:
        """Exclude a snapshot from later lists; return the line that reports it."""
        self._known[snapshot.path.name] = None
        return f"skipped: {error}"


class _Newest:
    """The newest snapshots in host memory."""

    def __init__(self, config: Config, size: int):
        self.window, self.mesh = Window(size), make_mesh(config.mesh)
        self._config = config
        self._abstract = abstract_params(config.model, self.mesh)

    def reach(self, listed: Sequence[Snapshot]) -> int:
        """How many snapshots, held or listed, end at the last listed with none missing between; at most the size."""
        tokens = sorted({*self.window.tokens, *(s.tokens for s in listed)})[-self.window.size :]
        reach = 1
        for newer, older in itertools.pairwise(reversed(tokens)):
            between = range(newer - self._config.batch_tokens, older, -self._config.batch_tokens)
            if any(map(self._config.is_snapshot, between)):
                break
            reach += 1
        return reach

    def read(self, snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ValueError] | None:
        """Bring those that are newer than what is held; returns the first that cannot be read, and why."""
        for snapshot in snapshots:
            if snapshot.tokens > max(self.window.tokens, default=-1):
                try:
                    params = _read_whole(snapshot, self._abstract)
                except ValueError as error:
                    return snapshot, error
                self.window.add(snapshot.tokens, params)
        return None


def _read_whole(snapshot: Snapshot, abstract: Any) -> Any:
    """Return the parameters. Raises ValueError if files were removed meanwhile: missing arrays may read as zeros."""
    params, problem = None, None
    try:
        before = _files(snapshot.path)
        params = jax.block_until_ready(snapshots.restore_params(snapshot, abstract))
        if not is_snapshot(snapshot.path) or _files(snapshot.path) != before:
            raise ValueError(f"{snapshot.path} was taken away while it was read")
    except ValueError as error:
        problem = error
    hosts.raise_if_any_failed(problem)
    return params


def _files(folder: epath.Path) -> set[str]:
    try:
        return {name for path in folder.iterdir() for name in (_files(path) if path.is_dir() else [str(path)])}
    except FileNotFoundError:
        return set()


def _done(log: epath.Path) -> set[tuple[str, int]]:
    """(recipe, tokens) of the previews that watch.jsonl has; drops its last line where that is unfinished."""
    # A watcher that was killed while it wrote: the next record would be glued to what it left.
    text = log.read_text() if log.exists() else ""
    if not text.endswith("\n") and text:
        atomic.write_text(log, text[: text.rfind("\n") + 1])
    return {(record["recipe"], record["tokens"]) for record in read_metric_records(log)}
