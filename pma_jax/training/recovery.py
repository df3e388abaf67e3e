"""Going back: from a spike that does not recover, to the merge of the snapshots from before it (PMA-init).

After PMA (arXiv 2505.12082), Section 4.5 and Figure 7. What happens, in this order, each step whole or not at all:

    RUN/spikes/<k>/held/        the detector's window, and the optimizer where it is to be kept
    RUN/spikes/<k>/event.json   what was seen and what is to be done: from here on the run goes back, killed or not
    RUN/spikes/<k>/…            snapshots, states and records past the point to which the run goes back, set aside
    RUN/states/<step>/          the merged model as a full state, from which the run resumes
    RUN/spikes/<k>/event.json   with "done": true

The run then resumes as if it had been killed there. Its token counter and steps are those of the newest snapshot that
was merged. The data goes on from there too, or, with `spikes.skip_data`, behind the last batch of the spike.
"""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from pma_jax.config import Config
from pma_jax.merging.api import average
from pma_jax.merging.recipes import coefficients
from pma_jax.runs import integrity, restore, states
from pma_jax.runs.directory import STEP_FOLDERS, Run, read_records, record_lines
from pma_jax.runs.snapshots import read_snapshot
from pma_jax.runs.states import STATES
from pma_jax.runtime import hosts
from pma_jax.storage import atomic
from pma_jax.training import spikes
from pma_jax.training.spikes import IRRECOVERABLE, RECOVERED, Reading
from pma_jax.training.state import TrainState, make_state, with_params

FOLDER, EVENT, HELD = "spikes", "event.json", "held"
Event = dict[str, Any]


def check(config: Config) -> None:
    """Raise ValueError where `spikes.recipe` does not take `spikes.snapshots` snapshots."""
    if config.spikes.attempts:
        coefficients(config.spikes.recipe, range(1, config.spikes.snapshots + 1))


def spike_record(config: Config, record: dict[str, Any], reading: Reading) -> dict[str, Any] | None:
    """The record of a spike that ended, or was declared irrecoverable, with the step of `record`; else None."""
    code, step = int(reading.code), record["step"]
    # Declared earlier: a state was saved before anyone had looked, and resumed from; a run that goes back still has to.
    due = code == IRRECOVERABLE and (int(reading.declared) == step or config.spikes.attempts)
    if code != RECOVERED and not due:
        return None
    onset = int(reading.onset)
    return {
        "kind": "spike",
        "tokens": record["tokens"],
        "step": step,
        "verdict": "recovered" if code == RECOVERED else "irrecoverable",
        "onset_tokens": record["tokens"] - (step - onset) * config.batch_tokens,
        "onset_step": onset,
        "loss": _number(record["loss"]),
        "peak_loss": _number(reading.peak),
        "median_loss": _number(reading.median_loss),
        "spread_nats": _number(reading.spread),
        "loss_z": _number(reading.loss_z),
        "gradient_norm": _number(record["gradient_norm"]),
        "median_gradient_norm": _number(reading.median_norm),
        "gradient_z": _number(reading.gradient_z),
    }


def events(run: Run) -> list[Event]:
    """The times that the run went back, or is about to, oldest first."""
    folder = run.path / FOLDER
    numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.exists() else []
    paths = [folder / str(number) / EVENT for number in numbers]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def is_due(run: Run) -> bool:
    """Whether the run is to go back, and has not done so yet."""
    return any(not event["done"] for event in events(run)[-1:])


def decide(run: Run, spike: dict[str, Any], state: TrainState, step: int, position: int) -> Event:
    """Write down that the run goes back, and to what: from then on it does, whatever happens.

    Args:
      run: the run; its writers are closed, so that every snapshot from before the spike is published.
      spike: what `spike_record` gave.
      state: the state when that was seen; its detector, and its optimizer where that is kept, are held on disk.
      step: optimizer steps of that state.
      position: sequences of data that it consumed.

    Raises ValueError when the attempts are used up, or no snapshot from before the spike is there.
    """
    config, keys, past = run.config, run.config.spikes, events(run)
    seen = f"the loss left its course at {spike['onset_tokens']:,} tokens and did not come back"
    again = past and spike["onset_tokens"] <= past[-1]["spike"]["tokens"] + keys.patience_tokens
    attempt = past[-1]["attempt"] + 1 if again else 1
    if attempt > keys.attempts:
        raise ValueError(
            f"{seen}, after {keys.attempts} times of going back: `pma fork` from a state before it with a lower "
            "schedule.peak_rate, or raise spikes.attempts in a fork"
        )
    before = [s for s in run.snapshots if s.tokens < spike["onset_tokens"]]
    # A retry from the same snapshots would be the same run again.
    merged = before[: len(before) - (attempt - 1)][-keys.snapshots :]
    if not merged:
        raise ValueError(f"{seen}, and no snapshot from before it is left to go back to: `pma fork` from a state")
    newest = merged[-1]
    declared_position = position - (step - spike["step"]) * config.training.batch_size_sequences
    there = _position_at(config, past, newest.step, spike["step"], declared_position)
    held: dict[str, Any] = {"detector": state.detector}
    if keys.optimizer == "keep":
        held["optimizer"] = state.optimizer
    number = past[-1]["number"] + 1 if past else 1
    folder = run.path / FOLDER / str(number)
    if hosts.is_first():
        folder.mkdir(parents=True, exist_ok=True)
    hosts.barrier("recovery.folder")
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
        "position_there": there,
        "position": declared_position if keys.skip_data else there,
        "optimizer": keys.optimizer,
        "optimizer_step": _nearest_state(run, spike["onset_tokens"], newest.tokens),
        # Named, so that one who finishes what another began does not take that one's work for part of the spike.
        "aside": {name: _later(run, name, newest.step) for name in STEP_FOLDERS},
        "done": False,
    }
    _write_event(run, event)
    return event


def finish(run: Run, abstract: TrainState, mesh: jax.sharding.Mesh) -> Event | None:
    """Do what the newest event says, unless that is done already; it may be done in part, by a process that died.

    Returns the event that was finished here. Call under `jax.set_mesh`, before the newest state is looked for.
    """
    event = next(iter(events(run)[-1:]), None)
    if event is None or event["done"]:
        return None
    folder = run.path / FOLDER / str(event["number"])
    if hosts.is_first():
        _set_aside(run, event, folder)
    hosts.barrier("recovery.set_aside")
    state, optimizer = _restarted(run, event, folder, abstract, mesh)
    done = event | {"optimizer": optimizer, "done": True}
    if hosts.is_first():
        _rewrite_metrics(run, done)
    with run.state_writer() as writer:
        states.save_state(writer, state, event["step"], event["tokens"], event["position"])
    _write_event(run, done)
    return done


def described(event: Event) -> str:
    """What was done, in one line."""
    merged, spike = event["merged"], event["spike"]
    data = "on the same data" if event["position"] == event["position_there"] else "passing over its data"
    return (
        f"went back from {spike['tokens']:,} to {event['tokens']:,} tokens, to {event['recipe']} of {len(merged)} "
        f"snapshots, {data}; optimizer: {event['optimizer']} (attempt {event['attempt']})"
    )


def warmup(config: Config, restarts: list[Event], tokens: int) -> float:
    """Share in (0, 1] of the schedule's rate that the step ending at `tokens` takes, after `restarts`."""
    since = [tokens - event["tokens"] for event in restarts if event["tokens"] < tokens]
    if not since or not config.spikes.warmup_tokens:
        return 1.0
    return min(since[-1] / config.spikes.warmup_tokens, 1.0)


def _position_at(config: Config, past: list[Event], step: int, now: int, position: int) -> int:
    """Sequences of data consumed at `step`, from those at the step `now`: each event moved the position."""
    for event in reversed(past):
        if step > event["step"]:
            break
        now, position = event["step"], event["position_there"]
    return position - (now - step) * config.training.batch_size_sequences


def _set_aside(run: Run, event: Event, folder: epath.Path) -> None:
    """Move what came after the point to which the run goes back; what is moved already is left."""
    for name, steps in event["aside"].items():
        for path in [run.path / name / str(step) for step in _later(run, name, event["step"])]:
            target = folder / name / path.name
            if int(path.name) in steps and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
            else:
                path.rmtree()  # the merged state of one who died before the event was done
    for name in ("metrics.jsonl", "watch.jsonl"):
        records = read_records(run.path / name)
        later = [r for r in records if r["tokens"] > event["tokens"]]
        if later and not (folder / name).exists():
            atomic.write_text(folder / name, record_lines(later))
    # A watcher takes what it finds there for done.
    if (run.path / "watch.jsonl").exists():
        kept = [r for r in read_records(run.path / "watch.jsonl") if r["tokens"] <= event["tokens"]]
        atomic.write_text(run.path / "watch.jsonl", record_lines(kept))


def _rewrite_metrics(run: Run, event: Event) -> None:
    records = [r for r in read_records(run.path / "metrics.jsonl") if r["tokens"] <= event["tokens"]]
    records = [r for r in records if r["kind"] != "recovery" or r["number"] != event["number"]]
    atomic.write_text(run.path / "metrics.jsonl", record_lines([*records, {"kind": "recovery"} | event]))


def _restarted(
    run: Run, event: Event, folder: epath.Path, abstract: TrainState, mesh: jax.sharding.Mesh
) -> tuple[TrainState, str]:
    """The state from which the run goes on, and what became of the optimizer."""
    snapshots = [read_snapshot(run.path / m["path"]) for m in event["merged"]]
    fresh = with_params(run.config, make_state(run.config), average(snapshots, event["coefficients"], mesh))
    optimizer, said = fresh.optimizer, "reset"
    if event["optimizer"] == "keep":
        kept = restore.restore_tree(folder / HELD, "optimizer", abstract.optimizer)
        if not integrity.non_finite_leaves(kept):
            optimizer, said = kept, "keep"
    if event["optimizer"] == "restore" and event["optimizer_step"] is not None:
        aside = dataclasses.replace(run, path=folder)
        nearest = next(s for s in [*aside.states, *run.states] if s.step == event["optimizer_step"])
        optimizer, said = states.restore_state(nearest, abstract).optimizer, "restore"
    detector = restore.restore_tree(folder / HELD, "detector", abstract.detector)
    state = dataclasses.replace(
        fresh,
        step=jnp.full_like(fresh.step, event["step"]),
        optimizer=optimizer,
        detector=spikes.settled(detector),
    )
    return state, said


def _nearest_state(run: Run, onset_tokens: int, tokens: int) -> int | None:
    """Step of the state from before the spike that is nearest to `tokens`."""
    before = [s for s in run.states if s.tokens < onset_tokens]
    nearest = min(before, key=lambda s: abs(s.tokens - tokens), default=None)
    return nearest.step if nearest else None


def _later(run: Run, name: str, step: int) -> list[int]:
    """Steps of what lies in RUN/`name` past `step`; states at it too: the merged one takes its place."""
    root = run.path / name
    steps = sorted(int(p.name) for p in root.iterdir() if p.name.isdigit()) if root.exists() else []
    return [s for s in steps if s > step or (s == step and name == STATES)]


def _write_event(run: Run, event: Event) -> None:
    if hosts.is_first():
        path = run.path / FOLDER / str(event["number"]) / EVENT
        atomic.write_text(path, json.dumps(event, indent=2) + "\n")
    hosts.barrier("recovery.event")


def _number(value: Any) -> float | None:
    """A float, or None where it is not finite: JSON has no such number."""
    number = float(value)
    return number if math.isfinite(number) else None
