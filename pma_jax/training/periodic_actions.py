"""Evaluate, save snapshots and training states, and preview merges at fixed token intervals.

A mark is a multiple of an interval in tokens. It is reached by the first step that ends at or after it.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax

from pma_jax.config import SNAPSHOT_KINDS, WORKER_PREFIX, WORKER_SNAPSHOTS, snapshot_kind
from pma_jax.config.errors import DivergenceError
from pma_jax.data.sampling import HeldOutLoss
from pma_jax.evaluation.held_out import Evaluator
from pma_jax.evaluation.task_scorer import TaskScorer
from pma_jax.evaluation.task_scores import RAW_LABEL
from pma_jax.merging import preview
from pma_jax.model.decoder import Params
from pma_jax.replicas.method import last_update_tokens
from pma_jax.runs import snapshots, states
from pma_jax.runs.directory import Run
from pma_jax.runs.retention import Retention
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runs.states import STATES, Progress
from pma_jax.runtime.mesh import worker_count
from pma_jax.training import resume, spikes
from pma_jax.training.metrics import MetricsLog
from pma_jax.training.state import TrainState, block_mean, eval_params, params_of_worker, worker_dim


class PeriodicActions:
    """Evaluation, snapshots, training states and merge previews at marks. Call its methods under `jax.set_mesh`.

    Every evaluation uses the same sample of held-out text. The newest snapshots are kept in host memory for previews.
    """

    def __init__(
        self,
        run: Run,
        evaluator: Evaluator,
        log: MetricsLog,
        exit_stack: contextlib.ExitStack,
        task_scorer: TaskScorer | None = None,
    ):
        """Open the writers of snapshots and training states, and register them with `exit_stack`, which closes them."""
        self._run, self._config, self._log = run, run.config, log
        self._start_tokens = run.start_tokens
        self._states = exit_stack.enter_context(run.writer(STATES))
        folders = [SNAPSHOT_KINDS[kind].folder for kind in run.config.checkpoint.kinds if kind != WORKER_SNAPSHOTS]
        if WORKER_SNAPSHOTS in run.config.checkpoint.kinds:
            folders += (f"{WORKER_PREFIX}{k}" for k in range(worker_count(run.config, jax.sharding.get_mesh())))
        self._snapshots = {folder: exit_stack.enter_context(run.writer(folder)) for folder in folders}
        self._retention = Retention(run.config, self._snapshots | {STATES: self._states})
        self._evaluator, self._task_scorer = evaluator, task_scorer
        size = max(run.config.preview.windows, default=0)
        self._window = preview.Window(size, functools.partial(snapshots.are_consecutive, run.config))

    def load_preview_window(self, tokens: int, abstract_params: Params) -> None:
        """Restore the newest consecutive snapshots up to `tokens` into host memory.

        Stop at a missing or corrupt snapshot: with an older one, the window of a preview would have a gap. A line is
        printed if previews are left out until the window is full again.
        """
        config = self._config

        def choose() -> list[Snapshot]:
            candidates = [s for s in self._run.snapshots if config.preview.start_tokens <= s.tokens <= tokens]
            return snapshots.newest_consecutive(config, candidates, self._window.size)

        restored: list[tuple[int, Params]] = []
        for snapshot in resume.agree_on_snapshots(choose)[::-1]:
            params = resume.restore_or_set_aside(self._run, snapshot, abstract_params, self._log.print)
            if params is None:
                break
            restored.append((snapshot.tokens, params))
        for snapshot_tokens, params in restored[::-1]:
            self._window.add(snapshot_tokens, params)
        self._report_gap(tokens)

    def _report_gap(self, tokens: int) -> None:
        """Print a line if snapshots are missing that the previews after `tokens` would merge."""
        config = self._config
        step_ends = range(tokens, max(self._start_tokens, config.preview.start_tokens - 1), -config.batch_tokens)
        due = itertools.islice(filter(config.is_snapshot_due, step_ends), self._window.size)
        missing = sorted(set(due) - set(self._window.tokens))
        if missing and not config.is_run_complete(tokens):
            self._log.print(
                f"previews are left out until their windows are full again: the snapshot at {missing[-1]:,} tokens is "
                "missing"
            )

    def save_if_due(self, state: TrainState, progress: Progress, stopping: bool) -> TrainState:
        """Take a snapshot and save the training state, each if it is due, and remove what is no longer kept.

        If `stopping`, save the state in any case. Then, and at the horizon, wait until everything is published.
        """
        if self._config.is_snapshot_due(progress.tokens):
            state = self.take_snapshot(state, progress)
        if stopping or self._config.is_state_due(progress.tokens):
            self.save_state(state, progress)
        if stopping or self._config.is_run_complete(progress.tokens):
            for writer in (*self._snapshots.values(), self._states):
                writer.finish()
        onset_tokens = 0
        if state.detector is not None:
            onset_tokens = spikes.earliest_onset_tokens(self._config, state.detector, progress.step, progress.tokens)
        self._retention.apply(progress.tokens, onset_tokens)
        return state

    def take_snapshot(self, state: TrainState, progress: Progress) -> TrainState:
        """Evaluate and save a snapshot of each kind, and preview merges. Return the state with the block mean reset.

        The parameters after this step (kind `point`) are evaluated even if only block means are saved.
        """
        params = {"point": eval_params(self._config, state)}
        if state.block is not None:
            params["block_mean"], state = block_mean(self._config, state)
        for kind in params:
            self._evaluate_and_save(kind, params[kind], progress)
        if WORKER_SNAPSHOTS in self._config.checkpoint.kinds:
            for worker in range(worker_dim(state.params)):
                kind = f"{WORKER_PREFIX}{worker}"
                self._evaluate_and_save(kind, params_of_worker(state, worker), progress, worker=worker)
        self._preview_merges(params[self._config.checkpoint.kinds[0]], progress)
        return state

    def save_state(self, state: TrainState, progress: Progress) -> None:
        """Flush the metrics and the snapshots, then save the training state.

        In this order, because a run that resumes from the state does not write the records and snapshots from before it
        again.
        """
        self._log.sync()
        for writer in self._snapshots.values():
            writer.finish()
        states.save_state(self._states, state, progress)

    def _evaluate_and_save(self, name: str, params: Params, progress: Progress, **values: Any) -> None:
        """Evaluate the parameters of a snapshot, and save them if the run has a writer for its kind.

        Args:
            name: The kind of snapshot, as `config.snapshot_kind` takes it.
            params: The parameters.
            progress: The position of the run.
            **values: Further fields of the record.
        """
        kind = snapshot_kind(name)
        evaluated = self._evaluator(params)
        check_loss_is_finite(evaluated.loss, name, progress)
        self._write(kind.record_kind, progress, evaluated, **values)
        if kind.folder in self._snapshots:
            of_worker = name not in SNAPSHOT_KINDS
            stored_kind = "point" if of_worker else name
            place = self._run.path, progress.step, progress.tokens
            snapshot = Snapshot(*place, evaluated.loss, self._config, kind=stored_kind)
            averaged_at = last_update_tokens(self._config, progress.tokens, self._start_tokens, of_worker)
            snapshots.save_snapshot(self._snapshots[kind.folder], params, snapshot, averaged_at)
        if name == "point":
            self._score_tasks(params, progress, RAW_LABEL)

    def _preview_merges(self, params: Params, progress: Progress) -> None:
        preview_config = self._config.preview
        if progress.tokens >= preview_config.start_tokens:
            self._window.add(progress.tokens, params)
        for recipe, merged in self._window.merges(preview_config.recipe, preview_config.windows):
            self._write("preview", progress, self._evaluator(merged), recipe=recipe)
            self._score_tasks(merged, progress, recipe)

    def _score_tasks(self, params: Params, progress: Progress, model: str) -> None:
        if self._task_scorer is not None:
            place = {"tokens": progress.tokens, "step": progress.step, "model": model}
            for record in self._task_scorer(params, place):
                self._log.write(record)

    def _write(self, kind: str, progress: Progress, evaluated: HeldOutLoss, **values: Any) -> None:
        record = {"kind": kind, "tokens": progress.tokens, "step": progress.step} | values
        self._log.write(record | dataclasses.asdict(evaluated) | {"text": self._evaluator.sample.digest})


def check_loss_is_finite(loss: float, snapshot_kind: str, progress: Progress) -> None:
    """Raise DivergenceError if the held-out loss of a snapshot is not finite: merges with it would be useless."""
    if not math.isfinite(loss):
        raise DivergenceError(
            f"step {progress.step:,} ({progress.tokens:,} tokens): the held-out loss of the {snapshot_kind} snapshot "
            f"is {loss}; the snapshot was not saved"
        )
