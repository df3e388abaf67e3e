"""Traces of JAX's profiler of a few training steps, for the Profile page of TensorBoard and for Perfetto."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from etils import epath

from pma_jax.config.errors import UserError
from pma_jax.runs.directory import Run
from pma_jax.runs.states import Progress
from pma_jax.runs.steps import report_write_errors
from pma_jax.runtime import hosts

PROFILED_STEPS = 3


class StepProfiler:
    """Records a trace of the steps that begin at each of `training.profile_at_tokens`, in process 0.

    The first step of a trace is the one that reaches the token count, or the second of the process, which compiles
    nothing. A trace is stored in RUN/tensorboard/plugins/profile/<tokens>/, where <tokens> is the count at which its
    first step ends.

    Args:
        run: The run whose directory gets the traces, and its configuration.
        tokens: Number of tokens already trained on.
        report: Called with one line for each trace.
    """

    def __init__(self, run: Run, tokens: int, report: Callable[[str], None]):
        config = run.config
        self._config, self._folder, self._report = config, run.path / "tensorboard" / "plugins" / "profile", report
        is_recording = hosts.is_first_process()
        self._due = sorted(t for t in config.training.profile_at_tokens if t > tokens) if is_recording else []
        self._compiled_from = tokens + 2 * config.batch_tokens
        self._last: int | None = None  # tokens after the last step of the trace in progress
        self._trace = contextlib.ExitStack()

    def before_step(self, progress: Progress, state: Any) -> None:
        """Start a trace if it is due at the step that ends at `progress`; `state` is that before the step."""
        if self._last is None and self._due and progress.tokens >= max(self._due[0], self._compiled_from):
            self._due = [tokens for tokens in self._due if tokens > progress.tokens]
            jax.block_until_ready(state)  # earlier steps are not part of the trace
            self._trace.enter_context(_record_trace(self._folder / str(progress.tokens)))
            self._last = progress.tokens + (PROFILED_STEPS - 1) * self._config.batch_tokens

    def after_step(self, progress: Progress, state: Any) -> None:
        """Store the trace if the step that ends at `progress` is its last."""
        if self._last is not None and (progress.tokens >= self._last or self._config.is_run_complete(progress.tokens)):
            jax.block_until_ready(state)
            self.close()
            self._report(f"profiled the steps up to {progress.tokens:,} tokens: see {self._folder}")

    def close(self) -> None:
        """Store a trace that is in progress."""
        self._last = None
        self._trace.close()


@contextlib.contextmanager
def _record_trace(folder: epath.Path) -> Iterator[None]:
    """Record a trace of the block and store it in `folder`, which may be in a bucket."""
    with tempfile.TemporaryDirectory() as temporary:  # the profiler writes local files only
        try:
            jax.profiler.start_trace(temporary)
        except RuntimeError as error:
            raise UserError(
                f"training.profile_at_tokens: {error}: stop the other trace, or leave the key out"
            ) from error
        try:
            yield
        finally:
            jax.profiler.stop_trace()
        with report_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in Path(temporary).glob("plugins/profile/*/*"):
                (folder / path.name).write_bytes(path.read_bytes())
