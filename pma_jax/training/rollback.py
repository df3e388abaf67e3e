"""Rolling back from an irrecoverable loss spike to the merge of the snapshots from before it (PMA-init).

After PMA (arXiv 2505.12082), Section 4.5 and Figure 7. The steps, in this order; each is atomic or can be repeated:

    RUN/spikes/<k>/held/        write the training state to continue from: the merged model, an optimizer, the detector
    RUN/spikes/<k>/event.json   write the evidence and the decision: from here on the run rolls back, killed or not
    RUN/spikes/<k>/…            move the snapshots, states and records past the rollback point here
    RUN/states/<step>/          copy the held state, as a fork copies its parent's
    RUN/spikes/<k>/event.json   set "done": true, and remove the held state

A rollback is a fork in the run's own directory: the run resumes from the copied state, at the tokens and steps of the
newest merged snapshot. The data continues from there too, or, with `spikes.skip_data`, after the last batch of the
spike.
"""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from pma_jax.config import Config
from pma_jax.merging.api import average
from pma_jax.merging.recipes import coefficients
from pma_jax.runs import integrity, states, steps
from pma_jax.runs.directory import STEP_FOLDERS, Run, read_metric_records, record_lines
from pma_jax.runs.snapshots import Snapshot, read_snapshot
from pma_jax.runs.states import STATES, Progress
from pma_jax.runtime import hosts
from pma_jax.storage import atomic
from pma_jax.training import spikes
from pma_jax.training.fork import state_at
from pma_jax.training.metrics import Record
from pma_jax.training.optimizer import init_opt_state
from pma_jax.training.state import TrainState, abstract_state, branch_state

FOLDER, EVENT, HELD = "spikes", "event.json", "held"
Event = dict[str, Any]  # the contents of an event.json


def check_recipe(config: Config) -> None:
    """Raise ValueError if `spikes.recipe` cannot merge `spikes.snapshots` snapshots."""
    if config.spikes.attempts:
        coefficients(config.spikes.recipe, range(1, config.spikes.snapshots + 1))


def events(run: Run) -> list[Event]:
    """Return the run's rollbacks, oldest first; the newest may be unfinished."""
    paths = [folder / EVENT for folder in steps.numbered(run.path / FOLDER)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def is_pending(run: Run) -> bool:
    """Return whether a rollback was begun and is not finished."""
    return any(not event["done"] for event in events(run)[-1:])


def begin(run: Run, spike: Record, state: TrainState, progress: Progress, mesh: jax.sharding.Mesh) -> None:
    """Write the state to continue from, then the event: from then on the run rolls back, even if it is killed.

    Args:
        run: The run; its writers must be closed, so that every snapshot from before the spike is published.
        spike: The spike's record.
        state: The newest state; its parameters are deleted, to make room for the merge.
        progress: Of that state.
        mesh: Of the state.

    Raises:
        ValueError: The attempts are used up, or there is no snapshot from before the spike.
    """
    config, keys, past = run.config, run.config.spikes, events(run)
    attempt, merged = _choose_snapshots(run, spike, past)
    newest = merged[-1]
    declared_position = progress.position - (progress.step - spike["step"]) * config.training.batch_size_sequences
    same_data = _position_at(config, past, newest.step, spike["step"], declared_position)
    before = [s for s in run.states if s.tokens < spike["onset_tokens"]]
    nearest = min(before, key=lambda s: abs(s.tokens - newest.tokens), default=None)
    is_kept = keys.optimizer == "keep" and not integrity.non_finite_leaves(state.optimizer)
    is_reset = not is_kept and (keys.optimizer != "restore" or nearest is None)
    number = past[-1]["number"] + 1 if past else 1
    event = {
        "number": number,
        "attempt": attempt,
        "spike": spike,
        "recipe": keys.recipe,
        "merged": [{"path": f"{s.path.parent.name}/{s.path.name}", "step": s.step, "tokens": s.tokens} for s in merged],
        "coefficients": coefficients(keys.recipe, [s.tokens for s in merged]).tolist(),
        "tokens": newest.tokens,
        "step": newest.step,
        "position_there": same_data,
        "position": declared_position if keys.skip_data else same_data,
        "optimizer": "reset" if is_reset else keys.optimizer,
        "optimizer_step": nearest.step if nearest else None,
        # By name: a process that finishes another's rollback must tell these from what the other wrote afterwards.
        "aside": {name: _steps_past(run, name, newest.step) for name in STEP_FOLDERS},
        "done": False,
    }
    with jax.set_mesh(mesh), _held(run, event).writer(STATES) as writer:
        merged_state = _merged_state(run, event, state, mesh)
        states.save_state(writer, merged_state, Progress(event["step"], event["tokens"], event["position"]))
    _write_event(run, event)


def finish(run: Run) -> list[Event]:
    """Carry out the rollback that is pending, if one is; return its event in a list, which is empty otherwise.

    A process that died may have done a part of it. Call it before the newest state is chosen.
    """
    if not is_pending(run):
        return []
    event = events(run)[-1]
    done = event | {"done": True}
    if hosts.is_first_process():
        _set_aside_steps(run, event)
        _set_aside_records(run, done)
        states.copy_state(state_at(_held(run, event), event["tokens"]), run.path)
    _write_event(run, done)
    if hosts.is_first_process():
        _held(run, event).path.rmtree()
    return [done]


def describe(event: Event) -> str:
    """Return one line about a finished rollback."""
    merged, spike = event["merged"], event["spike"]
    data = "on the same data" if event["position"] == event["position_there"] else "skipping its data"
    return (
        f"rolled back from {spike['tokens']:,} to {event['tokens']:,} tokens, to {event['recipe']} of {len(merged)} "
        f"snapshots, {data}; optimizer: {event['optimizer']} (attempt {event['attempt']})"
    )


def _choose_snapshots(run: Run, spike: Record, past: list[Event]) -> tuple[int, list[Snapshot]]:
    """Return the number of this attempt and the snapshots to merge, oldest first."""
    keys = run.config.spikes
    seen = f"the loss spike that began at {spike['onset_tokens']:,} tokens did not recover"
    again = past and spike["onset_tokens"] <= past[-1]["spike"]["tokens"] + keys.patience_tokens
    attempt = past[-1]["attempt"] + 1 if again else 1
    if attempt > keys.attempts:
        raise ValueError(
            f"{seen}, after {keys.attempts} rollbacks: `pma fork` from a state before it with a lower "
            "schedule.peak_rate, or raise spikes.attempts in a fork"
        )
    before = [s for s in run.snapshots if s.tokens < spike["onset_tokens"]]
    # A retry from the same snapshots would repeat the run bit for bit: each leaves out one more.
    merged = before[: len(before) - (attempt - 1)][-keys.snapshots :]
    if not merged:
        raise ValueError(f"{seen}, and no snapshot from before it is left to roll back to: `pma fork` from a state")
    return attempt, merged


def _position_at(config: Config, past: list[Event], step: int, now: int, position: int) -> int:
    """Return the sequences of data consumed at `step`, from the `position` at step `now`: each rollback moved it."""
    for event in reversed(past):
        if step > event["step"]:
            break
        now, position = event["step"], event["position_there"]
    return position - (now - step) * config.training.batch_size_sequences


def _steps_past(run: Run, folder: str, step: int) -> list[int]:
    """Return the published steps in RUN/`folder` past `step`; for states also `step`, where the merged state goes."""
    past = step - (folder == STATES)
    return [int(path.name) for path in steps.published_steps(run.path / folder) if int(path.name) > past]


def _set_aside_steps(run: Run, event: Event) -> None:
    """Move the steps past the rollback point to the event's folder, except those that were moved already."""
    for name, doomed in event["aside"].items():
        for step in _steps_past(run, name, event["step"]):
            path, target = run.path / name / str(step), _folder(run, event) / name / str(step)
            if step in doomed and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
            else:
                path.rmtree()  # the merged state, written by a process that died before the event was done


def _set_aside_records(run: Run, event: Event) -> None:
    """Move the records past the rollback point to the event's folder, and add the rollback's to the metrics."""
    for name in ("metrics.jsonl", "watch.jsonl"):
        path, target = run.path / name, _folder(run, event) / name
        records = read_metric_records(path)
        later = [r for r in records if r["tokens"] > event["tokens"]]
        kept = [r for r in records if r["tokens"] <= event["tokens"] and r.get("number") != event["number"]]
        if later and not target.exists():
            atomic.write_text(target, record_lines(later))
        if name == "metrics.jsonl":
            kept.append({"kind": "recovery"} | event)
        if kept or records:
            atomic.write_text(path, record_lines(kept))


def _merged_state(run: Run, event: Event, state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """Return `state` with the merge as its parameters, and with the optimizer that the event names."""
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
    return branch_state(run.config, state, params, step=step, optimizer=optimizer, detector=detector)


def _held(run: Run, event: Event) -> Run:
    """Return the place of the held state, laid out as a run of its own."""
    return dataclasses.replace(run, path=_folder(run, event) / HELD)


def _folder(run: Run, event: Event) -> epath.Path:
    return run.path / FOLDER / str(event["number"])


def _write_event(run: Run, event: Event) -> None:
    if hosts.is_first_process():
        atomic.write_text(_folder(run, event) / EVENT, json.dumps(event, indent=2) + "\n")
    hosts.barrier("rollback.event")
