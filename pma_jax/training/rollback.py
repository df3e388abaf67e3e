"""Rolling back from an irrecoverable loss spike to the merge of the snapshots from before it (PMA-init).

After PMA (arXiv 2505.12082), Section 4.5 and Figure 7. The steps, in this order; each is atomic or can be repeated:

    RUN/spikes/<k>/held/        write the detector's window, and the optimizer if it is to be kept
    RUN/spikes/<k>/event.json   write the evidence and the decision: from here on the run rolls back, killed or not
    RUN/spikes/<k>/…            move the snapshots, states and records past the rollback point here
    RUN/states/<step>/          write the merged model as a full state, from which the run resumes
    RUN/spikes/<k>/event.json   set "done": true

The run then resumes as if it had been killed at the rollback point: the tokens and steps of the newest merged snapshot.
The data continues from there too, or, with `spikes.skip_data`, after the last batch of the spike.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from pma_jax.config import Config
from pma_jax.merging.api import average
from pma_jax.merging.recipes import coefficients
from pma_jax.runs import integrity, restore, states, steps
from pma_jax.runs.directory import STEP_FOLDERS, Run, read_records, record_lines
from pma_jax.runs.snapshots import Snapshot, read_snapshot
from pma_jax.runs.states import STATES, Progress
from pma_jax.runtime import hosts
from pma_jax.storage import atomic
from pma_jax.training import spikes
from pma_jax.training.metrics import Record
from pma_jax.training.state import TrainState, make_state, with_params

FOLDER, EVENT, HELD = "spikes", "event.json", "held"
Event = dict[str, Any]  # the contents of an event.json


def check_recipe(config: Config) -> None:
    """Raise ValueError if `spikes.recipe` cannot merge `spikes.snapshots` snapshots."""
    if config.spikes.attempts:
        coefficients(config.spikes.recipe, range(1, config.spikes.snapshots + 1))


def events(run: Run) -> list[Event]:
    """Return the run's rollbacks, oldest first; the newest may be unfinished."""
    folder = run.path / FOLDER
    numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.exists() else []
    paths = [folder / str(number) / EVENT for number in numbers]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def is_pending(run: Run) -> bool:
    """Return whether a rollback was begun and is not finished."""
    return any(not event["done"] for event in events(run)[-1:])


def begin(run: Run, spike: Record, state: TrainState, progress: Progress) -> Event:
    """Decide how the run rolls back and write the event: from then on it does, even if it is killed.

    Args:
        run: the run; its writers must be closed, so that every snapshot from before the spike is published.
        spike: the spike's record.
        state: the newest state; its detector is saved with the event, and its optimizer if that is kept.
        progress: of that state.

    Raises:
        ValueError: the attempts are used up, or no snapshot from before the spike is left.
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
    folder = run.path / FOLDER / str(number)
    if hosts.is_first():
        folder.mkdir(parents=True, exist_ok=True)
    hosts.barrier("rollback.folder")
    held = {"detector": state.detector} | ({"optimizer": state.optimizer} if is_kept else {})
    states.write_parts(folder / HELD, held)
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
    _write_event(run, event)
    return event


def finish(run: Run, abstract: TrainState, mesh: jax.sharding.Mesh) -> list[Event]:
    """Carry out the rollback that is pending, if one is; return its event in a list, which is empty otherwise.

    A process that died may have done a part of it. Call under `jax.set_mesh`, before the newest state is chosen.
    """
    if not is_pending(run):
        return []
    event = events(run)[-1]
    done = event | {"done": True}
    if hosts.is_first():
        _set_aside_steps(run, event)
        _set_aside_records(run, done)
    hosts.barrier("rollback.set_aside")
    state = _merged_state(run, event, abstract, mesh)
    with run.state_writer() as writer:
        states.save_state(writer, state, Progress(event["step"], event["tokens"], event["position"]))
    _write_event(run, done)
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
    return [int(path.name) for path in steps.published(run.path / folder) if int(path.name) > past]


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
        records = read_records(path)
        later = [r for r in records if r["tokens"] > event["tokens"]]
        kept = [r for r in records if r["tokens"] <= event["tokens"] and r.get("number") != event["number"]]
        if later and not target.exists():
            atomic.write_text(target, record_lines(later))
        if name == "metrics.jsonl":
            kept.append({"kind": "recovery"} | event)
        if kept or records:
            atomic.write_text(path, record_lines(kept))


def _merged_state(run: Run, event: Event, abstract: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """Merge the event's snapshots into a full state, with the optimizer and detector that the event names."""
    held = _folder(run, event) / HELD
    snapshots = [read_snapshot(run.path / m["path"]) for m in event["merged"]]
    state = make_state(run.config)
    if event["optimizer"] == "keep":
        state = dataclasses.replace(state, optimizer=restore.restore_tree(held, "optimizer", abstract.optimizer))
    elif event["optimizer"] == "restore":
        aside = dataclasses.replace(run, path=held.parent)
        nearest = next(s for s in [*aside.states, *run.states] if s.step == event["optimizer_step"])
        state = dataclasses.replace(state, optimizer=states.restore_state(nearest, abstract).optimizer)
    detector = restore.restore_tree(held, "detector", abstract.detector)
    state = dataclasses.replace(
        state, step=jnp.full_like(state.step, event["step"]), detector=spikes.close_spike(detector)
    )
    return with_params(run.config, state, average(snapshots, event["coefficients"], mesh))


def _folder(run: Run, event: Event) -> epath.Path:
    return run.path / FOLDER / str(event["number"])


def _write_event(run: Run, event: Event) -> None:
    if hosts.is_first():
        atomic.write_text(_folder(run, event) / EVENT, json.dumps(event, indent=2) + "\n")
    hosts.barrier("rollback.event")
