"""Open and resume a run for training.

A saved step is the directory of one snapshot or state. It is intact if its metadata and all its leaves match the
digests that were saved with them, and corrupt otherwise. A corrupt saved step is reported and set aside, that is, moved
to:

    RUN/damaged/<folder>-<step>.<n>      pma_jax never reads it, so delete it after inspection

An unpublished step has no commit marker, because the process was killed while it wrote or removed the step. It is
removed.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import platform
from collections.abc import Callable
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.config.errors import DamageError, UserError
from pma_jax.data import batches, shards, shared_tokens
from pma_jax.data.sampling import SELECT
from pma_jax.data.shards import TokenSet
from pma_jax.evaluation.held_out import check_part_sizes, read_sample
from pma_jax.merging.recipes import coefficients
from pma_jax.runs import snapshots, steps
from pma_jax.runs.directory import Run, create_run, is_run, open_run
from pma_jax.runs.retention import tokens_to_keep
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runs.states import STATES, Progress, SavedState
from pma_jax.runtime import hosts
from pma_jax.storage.paths import exists
from pma_jax.training.worker_count import restore_state

DAMAGED = "damaged"
Warn = Callable[[str], None]  # reports one line to the user


def prepare_inputs(config: Config, is_new: bool) -> tuple[TokenSet, dict[str, Any]]:
    """Prepare the tokens of a run, and check what needs them, before its directory is created.

    Args:
        config: The run's configuration.
        is_new: Whether the configuration is new. A run that exists, and its forks, may have the configuration of an
            early version, which evaluated on more text than a part has.

    Returns:
        The tokens, and the contents of run.json (see `run_metadata`).

    Raises:
        UserError: A recipe is invalid, the data cannot be read, do not fit the model, or are too few.
    """
    for window in config.preview.windows:
        coefficients(config.preview.recipe, range(1, window + 1))
    if config.spikes.attempts:
        coefficients(config.spikes.recipe, range(1, config.spikes.snapshots + 1))
    tokens = shared_tokens.prepare_tokens_in_all(config.data)
    shards.check_tokens_match_model(tokens, config.model)
    batches.train_windows_per_epoch(tokens, config.training.sequence_length_tokens)
    if is_new:
        check_part_sizes(tokens, config, SELECT)
    return tokens, run_metadata(tokens, config)


def run_metadata(tokens: TokenSet, config: Config) -> dict[str, Any]:
    """Return the contents of run.json: digests of the corpus and of the text of evaluations, and package versions."""
    packages = ("pma-jax", "jax", "flax", "optax", "orbax-checkpoint", "grain")
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    sample = read_sample(tokens, config, SELECT).describe()
    return {"corpus": tokens.digest, "evaluation": sample["digest"], "held_out": sample, "versions": versions}


def open_or_create(config: Config, workdir: epath.PathLike, metadata: dict[str, Any]) -> Run:
    """Open the run in `workdir`, or create it. Keys that do not affect results, such as `mesh`, are those of `config`.

    Raises:
        UserError: `workdir` contains a run with another configuration (the message names the keys that differ) or
            another corpus.
    """
    if not is_run(workdir):
        return create_run(workdir, config, metadata)
    run = open_run(workdir)
    # The number of workers may change: see training/worker_count.py.
    replicas = dataclasses.replace(config.replicas, count=run.config.replicas.count)
    changed = configuration.differences_affecting_results(run.config, dataclasses.replace(config, replicas=replicas))
    if changed:
        raise UserError(
            f"{workdir} holds a run with another configuration ({'; '.join(changed)}): "
            "use its configuration to resume it, choose another --workdir, or change keys with `pma fork`"
        )
    if run.metadata["corpus"] != metadata["corpus"]:
        raise UserError(
            f"the corpus has changed since {workdir} was started ({run.metadata['corpus']} -> {metadata['corpus']}): "
            "restore the old text to resume, or choose another --workdir"
        )
    return dataclasses.replace(run, config=config)


def clean_up(run: Run, warn: Warn) -> None:
    """In process 0, remove unpublished steps and set aside saved steps with corrupt metadata."""

    def remove_and_set_aside() -> None:
        for name in run.step_folders:
            _remove_unpublished(run.path / name)
            for path in steps.published_steps(run.path / name):
                try:
                    run.read_step(path)
                except DamageError as error:
                    _set_aside(run, path, str(error), warn)

    hosts.run_on_first(remove_and_set_aside)


def apply_retention(run: Run) -> None:
    """In process 0, remove the saved steps that the configured retention does not keep, and unpublished steps.

    A complete run needs this if it was killed after its last step but before these were removed. Saved steps with
    corrupt metadata are kept.
    """

    def remove() -> None:
        horizon_tokens = run.config.training.total_tokens + run.config.batch_tokens
        for name in run.step_folders:
            saved = run.read_steps(name, skip_corrupt=True)
            kept = tokens_to_keep(run.config, name, [s.tokens for s in saved], horizon_tokens, [])
            for step in saved:
                if step.tokens not in kept:
                    steps.remove(step.path)
            _remove_unpublished(run.path / name)

    hosts.run_on_first(remove)


def agree_on_states(run: Run) -> list[SavedState]:
    """Return `Run.resumable_states` as process 0 sees them: file systems may show other processes other directories."""

    def describe() -> str:
        return json.dumps([[s.path.name, *dataclasses.astuple(s.progress)] for s in run.resumable_states])

    return [
        SavedState(run.path / STATES / name, Progress(*progress))
        for name, *progress in json.loads(hosts.broadcast_from_first(describe))
    ]


def agree_on_snapshots(choose: Callable[[], list[Snapshot]]) -> list[Snapshot]:
    """Call `choose` in process 0, and return in all processes the snapshots that it returned."""
    chosen: list[Snapshot] = []

    def describe() -> str:
        chosen.extend(choose())
        return json.dumps([str(snapshot.path) for snapshot in chosen])

    paths = json.loads(hosts.broadcast_from_first(describe))
    # Process 0 has read their metadata already.
    return hosts.run_in_all(lambda: chosen or [snapshots.read_snapshot(path) for path in paths])


def restore_newest_intact_state(run: Run, abstract_state: Any, warn: Warn) -> tuple[SavedState | None, Any]:
    """Restore the newest state that is intact in all processes.

    Args:
        run: The run to resume.
        abstract_state: Shapes, dtypes and shardings of the state.
        warn: Called with one line for each newer, corrupt state. These states are set aside.

    Returns:
        The state's metadata and its arrays; (None, None) if the run has no state yet, or only a corrupt first one,
        as after a power failure before that was flushed. The run then starts from its first step.

    Raises:
        UserError: No state is intact, although the run had several: all are corrupt or were set aside earlier, or the
            run is a fork, which is created with a state. The user must decide whether to start over.
    """
    corrupt: list[tuple[SavedState, str]] = []  # with error messages
    for saved in agree_on_states(run):
        try:
            state = restore_state(run.config, saved, abstract_state)
        except DamageError as error:  # in all processes
            corrupt.append((saved, str(error)))
            continue
        for other, message in corrupt:
            hosts.run_on_first(functools.partial(_set_aside, run, other.path, message, warn))
        return saved, state
    set_aside = hosts.broadcast_from_first(lambda: ",".join(steps_set_aside(run, STATES)))
    set_aside_steps = [int(name.removeprefix(f"{STATES}-").split(".")[0]) for name in set_aside.split(",") if name]
    lost_steps = [saved.progress.step for saved, _ in corrupt] + set_aside_steps
    if "forked_from" in run.metadata or any(_was_state_due_before(step, run.config) for step in lost_steps):
        reason = f" ({corrupt[0][1]})" if corrupt else ""
        raise UserError(
            f"no state of {run.path} is intact{reason}: copy one from a backup to {run.path / STATES}, or remove "
            "the run to start over"
        )
    for saved, message in corrupt:
        hosts.run_on_first(functools.partial(_set_aside, run, saved.path, message, warn))
    return None, None


def _was_state_due_before(step: int, config: Config) -> bool:
    """Return whether a run saves a state before `step`, so that the one of `step` is not its first."""
    step_ends = range(config.batch_tokens, step * config.batch_tokens, config.batch_tokens)
    return any(config.is_state_due(tokens) for tokens in step_ends)


def restore_or_set_aside(run: Run, snapshot: Snapshot, abstract_params: Any, warn: Warn) -> Any:
    """Restore a snapshot's parameters. If it is corrupt, set it aside and return None in all processes."""
    try:
        return snapshots.restore_params(snapshot, abstract_params)
    except DamageError as error:  # in all processes, none of which is still reading
        hosts.run_on_first(functools.partial(_set_aside, run, snapshot.path, str(error), warn))
        return None


def steps_set_aside(run: Run, folder: str) -> list[str]:
    """List the entries of RUN/damaged that came from `folder`."""
    damaged = run.path / DAMAGED
    return [path.name for path in damaged.iterdir() if path.name.startswith(folder)] if exists(damaged) else []


def _remove_unpublished(folder: epath.Path) -> None:
    for path in steps.unpublished_steps(folder):
        path.rmtree()


def _set_aside(run: Run, path: epath.Path, error: str, warn: Warn) -> None:
    """Report a corrupt saved step, and move it to RUN/damaged, so that training writes it again; in process 0."""
    warn(f"skipped: {error}")
    (run.path / DAMAGED).mkdir(exist_ok=True)
    targets = (run.path / DAMAGED / f"{path.parent.name}-{path.name}.{n}" for n in itertools.count())
    path.rename(next(target for target in targets if not exists(target)))
