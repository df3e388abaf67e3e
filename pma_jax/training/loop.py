"""The training loop: one function, read top to bottom."""

import contextlib
import dataclasses
import importlib.metadata
import platform
import time
from typing import Any

import jax
from etils import epath

from pma_jax import config as configuration
from pma_jax.config import SNAPSHOT_KINDS, Config
from pma_jax.data import batches, shards
from pma_jax.evaluation.held_out import evaluation_digest, held_out_batches
from pma_jax.merging import preview
from pma_jax.model.decoder import graph_definition, parameter_count
from pma_jax.model.loss import evaluate
from pma_jax.runs import lock, snapshots, states
from pma_jax.runs.directory import Run, create_run, is_run, open_run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import check_mesh, local_rows, make_mesh, put_batch
from pma_jax.runtime.signals import StopRequest
from pma_jax.storage.paths import absolute_path, check_bucket
from pma_jax.training import averages, finite, preemption, recovery, resuming
from pma_jax.training.metrics import MetricsLog
from pma_jax.training.schedule import learning_rate
from pma_jax.training.starting import check_start, forked_state, starting_state
from pma_jax.training.state import TrainState, abstract_state, snapshot_params
from pma_jax.training.step import make_train_step


def train(config: Config, workdir: epath.PathLike) -> Run:
    """Train to the horizon; resumes from the newest state in `workdir`, and returns at once when it is the horizon's.

    Where `spikes.attempts` says so, goes back to before a spike that does not recover, by resuming from there. Raises
    ValueError when `workdir` holds a run of another configuration (naming the keys that differ), the data cannot be
    read, or a spike is still there after so many attempts.
    """
    check_bucket(workdir)  # before the hours that data may take
    recovery.check(config)
    # --- Data, prepared once and cached by digest; devices; the run, which no other process may train ---------------
    tokens = shards.prepare_tokens(config.data, progress=hosts.is_first())
    shards.check_tokens_match_model(tokens, config.model)
    mesh = make_mesh(config.mesh)
    check_mesh(config, mesh)
    check_start(config, workdir)
    with contextlib.ExitStack() as stack:
        notice = stack.enter_context(preemption.watched())
        taken_over = hosts.enter_on_first(stack, lambda: lock.hold(absolute_path(workdir)))
        run = hosts.run_on_first_then_rest(lambda: open_or_create(config, workdir, run_metadata(tokens, config)))
        told = [taken_over] if taken_over else []
        while not _train_on(config, run, tokens, mesh, notice, told):
            told = []
    return run


def _train_on(
    config: Config, run: Run, tokens: shards.TokenSet, mesh: jax.sharding.Mesh, notice: StopRequest, told: list[str]
) -> bool:
    """Train to the horizon (True), or to a spike from which the run goes back when it is resumed (False)."""
    newest = run.newest_state
    if newest and config.is_horizon(newest.tokens) and not recovery.is_due(run):
        resuming.finish_removing(run)
        return True
    spike = None
    with contextlib.ExitStack() as stack:
        # --- What a spike or damage left to do; the model, and the newest whole state, or a fresh one --------------
        stack.enter_context(jax.set_mesh(mesh))
        abstract = abstract_state(config, mesh)
        resuming.clear_away(run, told.append)
        went_back, restarts = recovery.finish(run, abstract, mesh), recovery.events(run)
        graph = graph_definition(config.model)
        resumed, state = resuming.newest_whole_state(run, abstract, told.append)
        state = forked_state(run, resumed, state, abstract) if resumed else starting_state(config, abstract)
        step, seen, position = (resumed.step, resumed.tokens, resumed.position) if resumed else (0, 0, 0)
        for kind in config.checkpoint.kinds:
            resuming.whole_snapshots(run, kind, seen, abstract.params, told.append)

        # --- Where things go --------------------------------------------------------------------------------------
        log = MetricsLog(run, seen, writes=hosts.is_first())
        stack.callback(log.close)
        for line in told:
            log.say(line)
        # Snapshots are closed first: the state before goes only once the last one's snapshots are published.
        state_writer = stack.enter_context(run.state_writer())
        snapshot_writers = {kind: stack.enter_context(run.snapshot_writer(kind)) for kind in config.checkpoint.kinds}
        stack.enter_context(hosts.exit_on_error())
        size, devices = parameter_count(state.params) / 1e6, f"{jax.device_count()} {jax.devices()[0].platform}"
        begins = f"resuming at {seen:,} of" if resumed else "training for"
        log.say(f"{size:.3f}M parameters on {devices}, {begins} {config.training.total_tokens:,} tokens")
        if went_back:
            log.say(recovery.described(went_back))

        # --- Evaluation and previews: the same held-out tokens each time, the newest snapshots in host memory ----
        held_out = held_out_batches(tokens, config, mesh)
        window = preview.Window(max(config.preview.windows, default=0))
        settled = [s for s in run.snapshots if config.preview.start_tokens <= s.tokens <= seen]
        newest_few = settled[max(len(settled) - window.size, 0) :]
        for at, params in resuming.newest_unbroken(run, newest_few, abstract.params, log.say):
            window.add(at, params)

        # --- The loop: a step is dispatched before the metrics of the last one are fetched ------------------------
        train_step = make_train_step(config, graph)
        stream = batches.train_batches(
            tokens,
            config.training,
            position=position,
            rows=local_rows(mesh, config.training.batch_size_sequences),
        )
        clock, began = Clock(seen), step
        pending: tuple[dict[str, Any], dict[str, Any]] | None = None
        while not config.is_horizon(seen):
            if preemption.asked(notice, step):
                if step > began:
                    spike, pending = _write_train_record(log, config, clock, pending, state), None
                    if spike:
                        break
                    log.sync()
                    states.save_state(state_writer, state, step, seen, position)
                raise preemption.stopped(notice, step, seen, is_saved=step > began)
            rate = learning_rate(config.schedule, config.training.total_tokens, seen + config.batch_tokens)
            rate *= recovery.warmup(config, restarts, seen + config.batch_tokens)
            state, metrics = train_step(state, put_batch(mesh, next(stream)), rate)
            step, seen, position = (
                step + 1,
                seen + config.batch_tokens,
                position + config.training.batch_size_sequences,
            )
            if state.block is not None and config.is_block_add(seen):
                state = dataclasses.replace(
                    state, block=averages.add_to_block_mean(state.block, snapshot_params(config, state))
                )
            last, pending = pending, ({"kind": "train", "tokens": seen, "step": step, "learning_rate": rate}, metrics)
            spike = _write_train_record(log, config, clock, last, state)
            if not spike and (config.is_snapshot(seen) or config.is_state(seen)):
                # A state vouches for every record up to it: resuming from it does not write them again. And nothing is
                # saved of a model that is known to be lost.
                spike, pending = _write_train_record(log, config, clock, pending, state), None
            if spike:
                break

            if config.is_snapshot(seen):
                with clock.paused():
                    model = snapshot_params(config, state)
                    weights = {"point": model}  # kind -> parameters; points are evaluated even if not saved
                    if state.block is not None:
                        block = averages.block_mean_at_mark(state.block, model)
                        weights["block_mean"] = block.mean
                        state = dataclasses.replace(state, block=averages.restart(block))
                    for kind, params in weights.items():
                        loss = evaluate(graph, params, held_out)
                        finite.check_loss(loss, kind, step, seen)
                        log.write({"kind": SNAPSHOT_KINDS[kind].record, "tokens": seen, "step": step, "loss": loss})
                        if kind in snapshot_writers:
                            snapshot = Snapshot(run.path, step, seen, loss, config, kind=kind)
                            snapshots.save_snapshot(snapshot_writers[kind], params, snapshot)
                    if seen >= config.preview.start_tokens:
                        window.add(seen, weights[config.checkpoint.kinds[0]])
                    for recipe, merged in window.merges(config.preview.recipe, config.preview.windows):
                        merged_loss = evaluate(graph, merged, held_out)
                        log.write(
                            {"kind": "preview", "tokens": seen, "step": step, "recipe": recipe, "loss": merged_loss}
                        )
            if config.is_state(seen):
                log.sync()
                with clock.paused():
                    states.save_state(state_writer, state, step, seen, position)
    if spike:  # here, where the writers are closed, so that every snapshot from before it is published
        recovery.decide(run, spike, state, step, position)
    return spike is None


def run_metadata(tokens: shards.TokenSet, config: Config) -> dict[str, Any]:
    """What run.json records: digests of the corpus and of the held-out tokens, and versions."""
    packages = ("pma-jax", "jax", "flax", "optax", "orbax-checkpoint", "grain")
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    return {"corpus": tokens.digest, "evaluation": evaluation_digest(tokens, config), "versions": versions}


def open_or_create(config: Config, workdir: epath.PathLike, metadata: dict[str, Any]) -> Run:
    """The run in `workdir`, made if there is none; raises ValueError when another one lives there."""
    if not is_run(workdir):
        return create_run(workdir, config, metadata)
    run = open_run(workdir)
    changed = configuration.differences(run.config, config)
    if changed:
        raise ValueError(
            f"{workdir} holds a run with another configuration ({'; '.join(changed)}): "
            "give its own configuration to resume it, another --workdir, or `pma fork` to change course"
        )
    if run.metadata["corpus"] != metadata["corpus"]:
        raise ValueError(
            f"the corpus has changed since {workdir} was started ({run.metadata['corpus']} -> {metadata['corpus']}): "
            "bring the old text back to resume, or choose another --workdir"
        )
    return run


class Clock:
    """Seconds spent training, pauses for evaluation and checkpoints left out."""

    def __init__(self, tokens: int):
        self._tokens, self._start = tokens, time.perf_counter()
        self._since = self._start

    @contextlib.contextmanager
    def paused(self):
        """Time inside does not count."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    def seconds(self) -> float:
        """Wall seconds since this process began to train, pauses included."""
        return time.perf_counter() - self._start

    def lap(self, tokens: int) -> float:
        """Tokens a second since the last lap."""
        now = time.perf_counter()
        rate = (tokens - self._tokens) / (now - self._since)
        self._tokens, self._since = tokens, now
        return rate


def _write_train_record(
    log: MetricsLog,
    config: Config,
    clock: Clock,
    pending: tuple[dict[str, Any], dict[str, Any]] | None,
    state: TrainState,
) -> dict[str, Any] | None:
    """Write the record of a step, and of a spike that ended with it; returns a spike from which the run goes back.

    Raises ValueError where the step measured something that is not finite, and the run neither left out its update nor
    goes back.
    """
    if pending is None:
        return None
    record, metrics = pending
    # Fetching waits for that step, and so keeps at most two in flight.
    metrics = jax.device_get(metrics)
    numbers = {name: value.item() for name, value in metrics.items() if name not in ("count", "spike")}
    spike = recovery.spike_record(config, record | numbers, metrics["spike"]) if config.spikes.detect else None
    goes_back = bool(spike and spike["verdict"] == "irrecoverable" and config.spikes.attempts)
    if not goes_back and not (config.spikes.skip_gradient_z and metrics["spike"].skipped):
        finite.check_record(record, numbers, state.params)
    if config.spikes.skip_gradient_z:
        numbers["skipped_updates"] = metrics["spike"].skips.item()
    if config.is_mark(record["tokens"], config.training.log_interval_tokens) or config.is_horizon(record["tokens"]):
        speed = clock.lap(record["tokens"])
        timing = {"tokens_per_second": speed, "seconds": clock.seconds()}
        log.write(record | numbers | timing)
    if spike:
        log.write(spike)
    return spike if goes_back else None
