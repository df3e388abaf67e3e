"""Work at token marks: evaluate the model, save snapshots and states, preview merges.

The token marks of an interval are its multiples; a mark is reached by the first step that ends at or after it.
"""

import contextlib
import dataclasses
import math
from typing import Any

import jax
from flax import nnx

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.merging import preview
from pma_jax.model.decoder import Params
from pma_jax.model.loss import evaluate
from pma_jax.runs import snapshots, states
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runs.states import STATES, Progress
from pma_jax.training import averages, resume
from pma_jax.training.metrics import MetricsLog
from pma_jax.training.state import TrainState, snapshot_params


class Marks:
    """Evaluates on fixed held-out tokens and saves at token marks; call its methods under `jax.set_mesh`.

    The newest snapshots are kept in host memory for previews.
    """

    def __init__(
        self,
        run: Run,
        graph: nnx.GraphDef,
        held_out: list[jax.Array],
        log: MetricsLog,
        stack: contextlib.ExitStack,
    ):
        """Open the writers of snapshots and states, which close with `stack`."""
        self._run, self._config, self._log = run, run.config, log
        # Snapshots are closed first: the state before is removed only when the newest state's snapshots are published.
        self._states = stack.enter_context(run.writer(STATES))
        kinds = run.config.checkpoint.kinds
        self._snapshots = {kind: stack.enter_context(run.writer(SNAPSHOT_KINDS[kind].folder)) for kind in kinds}
        self._graph, self._held_out = graph, held_out
        self._window = preview.Window(max(run.config.preview.windows, default=0))

    def load_preview_window(self, tokens: int, abstract: Params) -> None:
        """Read the newest snapshots up to `tokens` into host memory; older than a corrupt one are skipped.

        Otherwise a preview would have a gap in its window.
        """
        size, start = self._window.size, self._config.preview.start_tokens
        newest = [s for s in self._run.snapshots if start <= s.tokens <= tokens]
        restored: list[tuple[int, Params]] = []
        for snapshot in newest[::-1][:size]:
            params = resume.restore_or_set_aside(self._run, snapshot, abstract, self._log.print)
            if params is None:
                break
            restored.append((snapshot.tokens, params))
        for at, params in restored[::-1]:
            self._window.add(at, params)

    def save_due(self, state: TrainState, progress: Progress, stops: bool) -> TrainState:
        """Take a snapshot and save the training state, each if its mark was reached; the state also if `stops`."""
        if self._config.is_snapshot(progress.tokens):
            state = self.take_snapshot(state, progress)
        if stops or self._config.is_state(progress.tokens):
            self.save_state(state, progress)
        return state

    def take_snapshot(self, state: TrainState, progress: Progress) -> TrainState:
        """Evaluate and save the model in each kind, and preview merges; return the state with a restarted block mean.

        Points are evaluated even if they are not saved.
        """
        model = snapshot_params(self._config, state)
        params = {"point": model}
        if state.block is not None:
            block = averages.block_mean_or_params(state.block, model)
            params["block_mean"] = block.mean
            state = dataclasses.replace(state, block=averages.restart(block))
        for kind in params:
            self._evaluate_and_save(kind, params[kind], progress)
        self._preview_merges(params[self._config.checkpoint.kinds[0]], progress)
        return state

    def save_state(self, state: TrainState, progress: Progress) -> None:
        """Flush the metric records, then save the training state: resuming does not write earlier records again."""
        self._log.sync()
        states.save_state(self._states, state, progress)

    def _evaluate_and_save(self, kind: str, params: Params, progress: Progress) -> None:
        loss = evaluate(self._graph, params, self._held_out)
        check_loss(loss, kind, progress)
        self._write(SNAPSHOT_KINDS[kind].record, progress, loss=loss)
        if kind in self._snapshots:
            snapshot = Snapshot(self._run.path, progress.step, progress.tokens, loss, self._config, kind=kind)
            snapshots.save_snapshot(self._snapshots[kind], params, snapshot)

    def _preview_merges(self, params: Params, progress: Progress) -> None:
        keys = self._config.preview
        if progress.tokens >= keys.start_tokens:
            self._window.add(progress.tokens, params)
        for recipe, merged in self._window.merges(keys.recipe, keys.windows):
            self._write("preview", progress, recipe=recipe, loss=evaluate(self._graph, merged, self._held_out))

    def _write(self, kind: str, progress: Progress, **values: Any) -> None:
        self._log.write({"kind": kind, "tokens": progress.tokens, "step": progress.step} | values)


def check_loss(loss: float, kind: str, progress: Progress) -> None:
    """Raise ValueError if the held-out loss of a snapshot is not finite: every merge with it would be useless."""
    if not math.isfinite(loss):
        raise ValueError(
            f"step {progress.step:,} ({progress.tokens:,} tokens): the held-out loss of the {kind} is {loss}; it is "
            "not saved"
        )
