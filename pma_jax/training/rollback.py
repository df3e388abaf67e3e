"""Roll back from an irrecoverable loss spike to the merge of the snapshots from before the spike (PMA-init).

Follows PMA (arXiv 2505.12082), Section 4.5 and Figure 7. These operations are done in this order; each is atomic or can
be repeated:

    RUN/spikes/<k>/held/        write the training state to continue from: the merged model, an optimizer, the detector
    RUN/spikes/<k>/event.json   write the spike and the decision; from now on the run rolls back, even if it is killed
    RUN/spikes/<k>/…            move the snapshots, states and records after the rollback point here
    RUN/states/<step>/          copy the held state here, as a fork copies its parent's
    RUN/spikes/<k>/event.json   set "done": true, and remove the held state

A rollback is a fork in the run's own directory: the run resumes from the copied state, at the tokens and steps of the
newest merged snapshot. The data also continue from there or, with `spikes.skip_data`, after the batch at which the
spike was declared irrecoverable.
"""

import dataclasses
import functools
import json
from typing import Any, Literal, NotRequired, TypedDict

import jax
import jax.numpy as jnp
from etils import epath

from pma_jax.config import Config
from pma_jax.config.errors import DivergenceError
from pma_jax.merging.api import average
from pma_jax.merging.recipes import coefficients
from pma_jax.runs import integrity, states, steps
from pma_jax.runs.directory import Run, lock_watch_records, read_metric_records, record_lines
from pma_jax.runs.snapshots import Snapshot, newest_consecutive, read_snapshot
from pma_jax.runs.states import STATES, Progress
from pma_jax.runtime import hosts
from pma_jax.storage import atomic
from pma_jax.storage.json_files import read_json
from pma_jax.storage.json_schema import Count, Loss
from pma_jax.storage.paths import as_path, exists, is_bucket
from pma_jax.training import spikes
from pma_jax.training.fork import state_at
from pma_jax.training.metrics import Record
from pma_jax.training.optimizer import init_opt_state
from pma_jax.training.state import TrainState, abstract_state, replace_params

FOLDER, EVENT, HELD = "spikes", "event.json", "held"
Event = dict[str, Any]  # the contents of an event.json, as EventSchema describes them


class _SpikeSchema(TypedDict):
    tokens: Count
    step: Count
    onset_tokens: Count
    verdict: str
    loss: Loss | None
    peak_loss: Loss | None
    median_loss: Loss | None
    spread_nats: Loss | None


class _MergedSchema(TypedDict):
    path: str
    step: Count
    tokens: Count


class EventSchema(TypedDict):
    """Contents of event.json."""

    number: Count
    attempt: Count
    spike: _SpikeSchema
    recipe: str
    merged: list[_MergedSchema]
    coefficients: list[float]
    tokens: Count
    step: Count
    position_there: Count
    position: Count
    optimizer: Literal["reset", "keep", "restore"]
    optimizer_step: NotRequired[Count | None]
    aside: dict[str, list[Count]]
    done: bool


def events(run: Run) -> list[Event]:
    """Read the events of the run's rollbacks, oldest first; the newest may be unfinished."""
    paths = [folder / EVENT for folder in steps.numbered(run.path / FOLDER)]
    return [read_json(as_path(path), EventSchema) for path in paths if exists(path)]


def is_pending(run: Run) -> bool:
    """Return whether the newest rollback has begun and is not finished."""
    return any(not event["done"] for event in events(run)[-1:])


def begin(run: Run, spike: Record, state: TrainState, progress: Progress, mesh: jax.sharding.Mesh) -> None:
    """Write the state to continue from, then event.json; from then on the run rolls back, even if it is killed.

    Args:
        run: The run. Its writers must be closed, so that every snapshot from before the spike is published.
        spike: The metrics record of the spike.
        state: The newest state. Its parameters are deleted, to free device memory for the merge.
        progress: The progress of `state`.
        mesh: The mesh of `state`.

    Raises:
        DivergenceError: `spikes.attempts` rollbacks were made, or there is no snapshot from before the spike.
    """
    config, keys, previous = run.config, run.config.spikes, events(run)
    attempt, merged = _choose_snapshots(run, spike, previous)
    newest = merged[-1]
    declared_position = progress.position - (progress.step - spike["step"]) * config.training.batch_size_sequences
    newest_position = _position_at(config, previous, newest.step, spike["step"], declared_position)
    before = [s for s in run.states if s.tokens < spike["onset_tokens"]]
    nearest = min(before, key=lambda s: abs(s.tokens - newest.tokens), default=None)
    is_kept = keys.optimizer == "keep" and not integrity.non_finite_leaves(state.optimizer)
    is_reset = not is_kept and (keys.optimizer != "restore" or nearest is None)
    number = previous[-1]["number"] + 1 if previous else 1
    event = {
        "number": number,
        "attempt": attempt,
        "spike": spike,
        "recipe": keys.recipe,
        "merged": [{"path": f"{s.path.parent.name}/{s.path.name}", "step": s.step, "tokens": s.tokens} for s in merged],
        "coefficients": coefficients(keys.recipe, [s.tokens for s in merged]).tolist(),
        "tokens": newest.tokens,
        "step": newest.step,
        "position_there": newest_position,
        "position": declared_position if keys.skip_data else newest_position,
        "optimizer": "reset" if is_reset else keys.optimizer,
        "optimizer_step": nearest.step if nearest else None,
        # Listed now, so that a process that finishes this rollback for a killed one does not move steps written later.
        "aside": {name: _steps_after(run, name, newest.step) for name in run.step_folders},
        "done": False,
    }
    with jax.set_mesh(mesh), _held_run(run, event).writer(STATES) as writer:
        merged_state = _merged_state(run, event, state, mesh)
        states.save_state(writer, merged_state, Progress(event["step"], event["tokens"], event["position"]))
    _write_event(run, event)


def finish(run: Run) -> list[Event]:
    """Finish the pending rollback, of which a killed process may have done a part. Call it before restoring a state.

    Returns:
        A list with the event of the rollback; empty if none was pending.
    """
    # Process 0 decides for all: file systems may show other processes other files.
    pending = hosts.broadcast_from_first(lambda: json.dumps(events(run)[-1]) if is_pending(run) else "")
    if not pending:
        return []
    event = json.loads(pending)
    done = event | {"done": True}

    def move_and_copy() -> None:
        _set_aside_steps(run, event)
        _set_aside_records(run, done)
        states.copy_state(state_at(_held_run(run, event), event["tokens"]), run.path)

    hosts.run_on_first(move_and_copy)
    _write_event(run, done)
    hosts.run_on_first(lambda: _held_run(run, event).path.rmtree())
    return [done]


def describe(event: Event) -> str:
    """Format a finished rollback as one line of text."""
    merged, spike = event["merged"], event["spike"]
    data = "on the same data" if event["position"] == event["position_there"] else "skipping its data"
    return (
        f"rolled back from {spike['tokens']:,} to {event['tokens']:,} tokens, to {event['recipe']} of {len(merged)} "
        f"snapshots, {data}; optimizer: {event['optimizer']} (attempt {event['attempt']})"
    )


def _choose_snapshots(run: Run, spike: Record, previous: list[Event]) -> tuple[int, list[Snapshot]]:
    """Return the number of this attempt, from 1, and the snapshots to merge, oldest first."""
    keys = run.config.spikes
    problem = f"the loss spike that began at {spike['onset_tokens']:,} tokens did not recover"
    recurs = previous and spike["onset_tokens"] <= previous[-1]["spike"]["tokens"] + keys.patience_tokens
    attempt = previous[-1]["attempt"] + 1 if recurs else 1
    if attempt > keys.attempts:
        raise DivergenceError(
            f"{problem} after {keys.attempts} rollbacks: use `pma fork` from a state before it with a lower "
            "schedule.peak_rate or more spikes.attempts"
        )
    before = [s for s in run.snapshots if s.tokens < spike["onset_tokens"]]
    # A retry from the same snapshots would repeat the run bit for bit, so each attempt omits one more snapshot.
    merged = newest_consecutive(run.config, before[: len(before) - (attempt - 1)], keys.snapshots)
    if not merged:
        raise DivergenceError(
            f"{problem}, and there is no snapshot from before it to roll back to: `pma fork` from a state"
        )
    return attempt, merged


def _position_at(config: Config, previous: list[Event], step: int, later_step: int, later_position: int) -> int:
    """Return the data position (in sequences) at `step`, given that of a later step and the previous rollbacks."""
    for event in reversed(previous):
        if step > event["step"]:
            break
        later_step, later_position = event["step"], event["position_there"]
    return later_position - (later_step - step) * config.training.batch_size_sequences


def _steps_after(run: Run, folder: str, step: int) -> list[int]:
    """List the published steps in RUN/`folder` after `step`; of states also `step`, which the merged state replaces."""
    last_kept = step - (folder == STATES)
    return [int(path.name) for path in steps.published_steps(run.path / folder) if int(path.name) > last_kept]


def _set_aside_steps(run: Run, event: Event) -> None:
    """Move the steps after the rollback point that are not moved yet to the event's folder."""
    for name, listed in event["aside"].items():
        for step in _steps_after(run, name, event["step"]):
            path, target = run.path / name / str(step), _folder(run, event) / name / str(step)
            if step in listed and not exists(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
            else:
                steps.remove(path)  # the merged state, copied by a process that was killed before it set "done"
        if listed and not is_bucket(run.path):
            # Durable before "done": after a power failure nobody would move them again.
            for folder in (run.path / name, _folder(run, event) / name):
                if exists(folder):
                    atomic.fsync_path(folder)


def _set_aside_records(run: Run, event: Event) -> None:
    """Move the records after the rollback point to the event's folder, and add the rollback to metrics.jsonl."""
    with lock_watch_records(run.path):
        _split_records(run, event)


def _split_records(run: Run, event: Event) -> None:
    for name in ("metrics.jsonl", "watch.jsonl"):
        path, target = run.path / name, _folder(run, event) / name
        records = read_metric_records(path)
        later = [r for r in records if r["tokens"] > event["tokens"]]
        kept = [r for r in records if r["tokens"] <= event["tokens"] and r.get("number") != event["number"]]
        if later and not exists(target):
            atomic.write_text(target, record_lines(later))
        if name == "metrics.jsonl":
            kept.append({"kind": "recovery"} | event)
        if kept or records:
            atomic.write_text(path, record_lines(kept))


def _merged_state(run: Run, event: Event, state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """Return `state` with the merge as its parameters, and the optimizer moments that the event specifies."""
    assert state.detector is not None
    jax.tree.map(lambda leaf: leaf.delete(), state.params)
    params = average([read_snapshot(run.path / m["path"]) for m in event["merged"]], event["coefficients"], mesh)
    optimizer = state.optimizer
    if event["optimizer"] == "reset":
        optimizer = jax.jit(functools.partial(init_opt_state, run.config.optimizer))(params)
    elif event["optimizer"] == "restore":
        nearest = next(s for s in run.states if s.step == event["optimizer_step"])
        optimizer = states.restore_state(nearest, abstract_state(run.config, mesh)).optimizer
    step, detector = jnp.full_like(state.step, event["step"]), spikes.close_spike(state.detector)
    return replace_params(run.config, state, params, step=step, optimizer=optimizer, detector=detector)


def _held_run(run: Run, event: Event) -> Run:
    """Return the directory of the held state as a `Run`, which has the same layout."""
    return dataclasses.replace(run, path=_folder(run, event) / HELD)


def _folder(run: Run, event: Event) -> epath.Path:
    return run.path / FOLDER / str(event["number"])


def _write_event(run: Run, event: Event) -> None:
    text = json.dumps(event, indent=2) + "\n"
    hosts.run_on_first(lambda: atomic.write_text(_folder(run, event) / EVENT, text))
