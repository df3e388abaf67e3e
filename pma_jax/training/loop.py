"""The training loop: open or resume a run, train to the horizon, save at token marks, roll back from loss spikes."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from pma_jax.config import Config
from pma_jax.data import batches, shards
from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.held_out import describe_text_of_marks, make_evaluator
from pma_jax.evaluation.task_scorer import make_task_scorer
from pma_jax.model.decoder import abstract_params, graph_definition, parameter_count
from pma_jax.runs import lock
from pma_jax.runs.directory import Run, is_run
from pma_jax.runs.states import Progress
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import check_mesh, local_rows, make_mesh, put_batch, worker_count
from pma_jax.runtime.signals import Stopped, StopRequest
from pma_jax.storage.compile_cache import compile_cache
from pma_jax.storage.paths import absolute_path, check_supported
from pma_jax.training import initial_state, resume, rollback
from pma_jax.training.metrics import MetricsLog
from pma_jax.training.periodic_actions import PeriodicActions
from pma_jax.training.profiling import StepProfiler
from pma_jax.training.resume import open_or_create
from pma_jax.training.schedule import learning_rate_with_rewarmup
from pma_jax.training.state import TrainState, abstract_state, synchronize, update_bema, update_block_mean
from pma_jax.training.step import Metrics, make_train_step
from pma_jax.training.step_records import StepRecords
from pma_jax.training.tracking import check_installed


def train(config: Config, workdir: epath.PathLike) -> Run:
    """Train a run to its horizon (`training.total_tokens`), from the newest state in `workdir` if there is one.

    Returns immediately if the run has reached its horizon. With `spikes.attempts`, training rolls back to before a loss
    spike that does not recover, and resumes from there.

    Args:
        config: The run's configuration.
        workdir: The run directory; it is created if it does not exist.

    Raises:
        UserError: `workdir` contains a run with another configuration (the message names the keys that differ), the
            data cannot be read, or a spike recurs after `spikes.attempts` rollbacks.
        Stopped: SIGTERM or SIGINT was received after the first step had started, and a state was saved.
    """
    check_supported(workdir)  # now, because preparing the data may take hours
    check_installed(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compile_cache(config.runtime.compile_cache_dir))
        tokens, metadata = resume.prepare_inputs(config, is_new=not is_run(workdir))
        mesh = make_mesh(config.mesh)
        check_mesh(config, mesh)
        if config.training.start_from and not is_run(workdir):
            initial_state.find_compatible_snapshot(config, config.training.start_from, "training.start_from")
        request = stack.enter_context(hosts.record_stop_signals())
        lock_message = hosts.broadcast_from_first(lambda: stack.enter_context(lock.hold(absolute_path(workdir))) or "")
        run = hosts.run_on_first_then_rest(lambda: open_or_create(config, workdir, metadata))
        messages = [lock_message] if lock_message else []
        while not _train_to_horizon_or_spike(run, tokens, mesh, request, messages):
            messages = []
    return run


class _Session(NamedTuple):
    """The objects that the loop uses until the run ends or rolls back."""

    batches: Iterator[np.ndarray]  # this process's rows of each global batch
    learning_rate: Callable[[int], float]  # maps the tokens at the end of a step to its learning rate
    train_step: Callable[[TrainState, jax.Array, float], tuple[TrainState, Metrics]]
    records: StepRecords
    periodic: PeriodicActions
    profiler: StepProfiler


def _train_to_horizon_or_spike(
    run: Run, tokens: shards.TokenSet, mesh: jax.sharding.Mesh, request: StopRequest, messages: list[str]
) -> bool:
    """Train; return True at the horizon, or False after an irrecoverable spike, from which the next call rolls back."""
    config, newest, spike = run.config, next(iter(resume.agree_on_states(run)), None), None
    if newest and config.is_run_complete(newest.tokens) and not rollback.is_pending(run):
        resume.apply_retention(run)
        return True
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        state, progress, session = _start_session(run, tokens, mesh, messages, stack)
        if hosts.is_stop_requested(request, progress.step):
            raise _make_stopped(request, None)
        # Each step is dispatched before the metrics of the previous step are fetched.
        while not config.is_run_complete(progress.tokens):
            progress = progress.after_step(config)
            rate = session.learning_rate(progress.tokens)
            session.profiler.before_step(progress, state)
            state, metrics = session.train_step(state, put_batch(mesh, next(session.batches)), rate)
            request.start()  # only now, when the step is compiled and there is something to save
            state = synchronize(config, state, progress.tokens)
            state = update_bema(config, state, progress.tokens)
            state = update_block_mean(config, state, progress.tokens)
            session.profiler.after_step(progress, state)
            spike = session.records.add(progress, rate, metrics, state.params)
            stopping = not config.is_run_complete(progress.tokens) and hosts.is_stop_requested(request, progress.step)
            if stopping or config.is_snapshot_due(progress.tokens) or config.is_state_due(progress.tokens):
                # Detect a spike before saving, so that no diverged model is saved.
                spike = spike or session.records.flush(state.params)
            if spike:
                break
            with session.records.paused():
                state = session.periodic.save_if_due(state, progress, stopping)
            if stopping:
                raise _make_stopped(request, progress)
    if spike:  # The writers are closed now, so every snapshot from before the spike is published.
        rollback.begin(run, spike, state, progress, mesh)
    return spike is None


def _start_session(
    run: Run, tokens: shards.TokenSet, mesh: jax.sharding.Mesh, messages: list[str], stack: contextlib.ExitStack
) -> tuple[TrainState, Progress, _Session]:
    """Restore the newest intact state, or initialise one, and open the log, the writers and the data."""
    config, abstract, graph = run.config, abstract_state(run.config, mesh), graph_definition(run.config.model)
    resume.clean_up(run, messages.append)
    rollbacks = rollback.finish(run)
    state, progress = initial_state.restore_or_initialize(run, abstract, messages.append)

    log = stack.enter_context(MetricsLog(run, progress.tokens, is_writer=hosts.is_first_process()))
    evaluator = make_evaluator(config, mesh, SELECT, tokens)
    periodic = PeriodicActions(run, evaluator, log, stack, make_task_scorer(config, mesh, tokens))
    stack.enter_context(hosts.exit_on_error())
    messages += describe_text_of_marks(run, tokens, evaluator.sample)
    for message in [*messages, _describe_start(config, mesh, progress), *map(rollback.describe, rollbacks)]:
        log.print(message)
    periodic.load_preview_window(progress.tokens, abstract_params(config.model, mesh))
    profiler = StepProfiler(run, progress.tokens, log.print)
    stack.callback(profiler.close)
    rows = local_rows(mesh, config.training.batch_size_sequences)
    session = _Session(
        batches.train_batches(tokens, config.training, consumed_sequences=progress.position, rows=rows),
        functools.partial(learning_rate_with_rewarmup, config, [event["tokens"] for event in rollback.events(run)]),
        make_train_step(config, graph),
        StepRecords(config, log, progress.tokens),
        periodic,
        profiler,
    )
    return state, progress, session


def _describe_start(config: Config, mesh: jax.sharding.Mesh, progress: Progress) -> str:
    size = parameter_count(abstract_params(config.model, mesh)) / 1e6
    devices = f"{jax.device_count()} {jax.devices()[0].platform}"
    workers = f" in {worker_count(config, mesh)} workers" if config.replicas.method != "none" else ""
    verb = f"resuming at {progress.tokens:,} of" if progress.step else "training for"
    return f"{size:.3f}M parameters on {devices}{workers}, {verb} {config.training.total_tokens:,} tokens"


def _make_stopped(request: StopRequest, progress: Progress | None) -> Stopped:
    """Create the exception for a stop; `progress` is that of the saved state, or None if no step was done."""
    cause = request.name or "a preemption"
    saved = (
        f"the state at step {progress.step:,} ({progress.tokens:,} tokens) is saved" if progress else "no step was done"
    )
    return Stopped(request.signal or 15, f"stopped by {cause}: {saved}; repeat the command to continue from there")
