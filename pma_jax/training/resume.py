"""Opening a run for training and resuming it: corrupt steps are set aside and reported before anything is trained.

    RUN/damaged/<folder>-<step>.<n>      what was set aside; nothing reads it, delete it once you have looked at it

A step is intact if its metadata match their digest, and every leaf the digest with which it was saved. Steps without a
commit marker (the process was killed while it wrote or removed them) never existed, and are removed.
"""

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any, TypeVar

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.data.shards import TokenSet
from pma_jax.evaluation.held_out import held_out_digest
from pma_jax.runs import snapshots, states, steps
from pma_jax.runs.directory import STEP_FOLDERS, Run, create_run, is_run, open_run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runs.states import STATES, SavedState
from pma_jax.runtime import hosts

T = TypeVar("T")

DAMAGED = "damaged"
Warn = Callable[[str], None]


def run_metadata(tokens: TokenSet, config: Config) -> dict[str, Any]:
    """Return the contents of run.json: digests of the corpus and of the held-out tokens, and versions."""
    packages = ("pma-jax", "jax", "flax", "optax", "orbax-checkpoint", "grain")
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    return {"corpus": tokens.digest, "evaluation": held_out_digest(tokens, config), "versions": versions}


def open_or_create(config: Config, workdir: epath.PathLike, metadata: dict[str, Any]) -> Run:
    """Open the run in `workdir`, or create it.

    Raises:
        ValueError: It holds a run with another configuration (naming the keys that differ) or another corpus.
    """
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


def clean_up(run: Run, warn: Warn) -> None:
    """Remove steps without a commit marker, and set aside those with corrupt metadata; process 0 does both."""
    if hosts.is_first_process():
        for name, (read, _) in STEP_FOLDERS.items():
            _remove_unpublished(run.path / name)
            for path in steps.published_steps(run.path / name):
                try:
                    read(path)
                except ValueError as error:
                    _set_aside(run, path, str(error), warn)
    hosts.barrier("resume.clean_up")


def apply_retention(run: Run) -> None:
    """Remove what a run that was killed at its horizon had still to remove; corrupt steps stay. Process 0 does it."""
    if hosts.is_first_process():
        for name, (_, retention) in STEP_FOLDERS.items():
            saved = run.read_steps(name, skip_corrupt=True)
            for step, is_kept in zip(saved, retention(run.config, [s.tokens for s in saved]), strict=True):
                if not is_kept:
                    steps.remove(step.path)
            _remove_unpublished(run.path / name)
    hosts.barrier("resume.apply_retention")


def restore_newest_intact_state(run: Run, abstract: Any, warn: Warn) -> tuple[SavedState | None, Any]:
    """Restore the newest intact state; all processes choose the same.

    Args:
        run: The run to resume.
        abstract: Shapes, dtypes and shardings of the state.
        warn: Takes a line about each corrupt state, which is set aside.

    Returns:
        The state's metadata and its arrays; (None, None) if the run has no state yet.

    Raises:
        ValueError: The run has states, and all are corrupt: the user decides whether to start over.
    """
    corrupt: list[tuple[SavedState, str]] = []
    for saved in run.resumable_states:
        state, error = _restore(lambda saved=saved: states.restore_state(saved, abstract))
        if error:
            corrupt.append((saved, error))
            continue
        for other, why in corrupt:
            _set_aside(run, other.path, why, warn)
        return saved, state
    lost = [p.name for p in (run.path / DAMAGED).iterdir()] if (run.path / DAMAGED).exists() else []
    if corrupt or "forked_from" in run.metadata or any(name.startswith(STATES) for name in lost):
        why = f" ({corrupt[0][1]})" if corrupt else ""
        raise ValueError(
            f"no state of {run.path} is intact{why}: bring one back to {run.path / STATES}, or remove the "
            "run to start over"
        )
    return None, None


def restore_or_set_aside(run: Run, snapshot: Snapshot, abstract: Any, warn: Warn) -> Any:
    """Restore a snapshot's parameters; return None, in all processes, and set it aside where it is corrupt."""
    params, error = _restore(lambda: snapshots.restore_params(snapshot, abstract))
    if error:
        _set_aside(run, snapshot.path, error, warn)
    return params


def _restore(restore: Callable[[], T]) -> tuple[T | None, str]:
    """Return (what `restore` returns, ""), or (None, the first process's error) if it fails in any process."""
    restored, error = None, ""
    try:
        restored = restore()
    except ValueError as raised:
        error = str(raised)
    errors = [
        line for line in hosts.all_gather_text(error) if line
    ]  # and after this no process reads what may be moved
    return (None, errors[0]) if errors else (restored, "")


def _remove_unpublished(folder: epath.Path) -> None:
    for path in steps.unpublished_steps(folder):
        path.rmtree()


def _set_aside(run: Run, path: epath.Path, why: str, warn: Warn) -> None:
    """Report a corrupt step and move it to RUN/damaged, so that it is written anew; process 0 does."""
    warn(f"passed over: {why}")
    if not hosts.is_first_process():
        return
    folder = run.path / DAMAGED
    folder.mkdir(exist_ok=True)
    name = f"{path.parent.name}-{path.name}"
    taken = {p.name for p in folder.iterdir()}
    number = next(n for n in range(len(taken) + 1) if f"{name}.{n}" not in taken)
    path.rename(folder / f"{name}.{number}")
