"""Full training states: what resuming and forking need. Save, list, copy and restore them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from pma_jax.config import Config
from pma_jax.runs import integrity, restore, steps
from pma_jax.runs.steps import COMMIT_MARKER, StepWriter
from pma_jax.storage import atomic
from pma_jax.storage.paths import is_bucket

STATES = "states"  # subdirectory of a run directory


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has trained."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens consumed
    position: int = 0  # sequences of the data consumed, including those that a rollback skipped

    def after_step(self, config: Config) -> "Progress":
        """Return the progress after one more optimizer step."""
        sequences = config.training.batch_size_sequences
        return Progress(self.step + 1, self.tokens + config.batch_tokens, self.position + sequences)


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The metadata of a full state on disk."""

    path: epath.Path
    progress: Progress

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    @property
    def tokens(self) -> int:
        """Tokens consumed."""
        return self.progress.tokens


def read_state(path: epath.Path) -> SavedState:
    """Read a state's metadata, but no array. Raises ValueError when they are corrupt."""
    keys = ("step", "tokens", "position")
    metadata = steps.read_metadata(path, keys)
    return SavedState(path, Progress(*(metadata[key] for key in keys)))


def kept_states(config: Config, tokens: Sequence[int]) -> list[bool]:
    """Apply the retention rule: the newest `keep_states` and the configured ones (keep_states_at_tokens) are kept.

    A state that a preemption saved between the marks is kept while it is the newest, and does not count towards
    `keep_states`, so that a stopped run keeps the states that an uninterrupted one does.

    Args:
        config: the run's configuration.
        tokens: position of each state, ascending.

    Returns:
        Whether each state is kept.
    """
    regular = [at for at in tokens if config.is_state(at)]
    newest = {*regular[-config.checkpoint.keep_states :], *tokens[-1:]}
    return [at in newest or config.is_named_state(at) for at in tokens]


def save_state(writer: StepWriter, state: Any, progress: Progress) -> None:
    """Start writing a full state; return when the arrays may be donated. An existing step is kept.

    Fields of `state` (a dataclass with `params`) whose default is None are optional. Each is stored as an item of its
    own, so that a fork may ignore it, or add one that its parent did not have.

    Raises:
        ValueError: a leaf of the parameters is not finite, or the previous step could not be written.
    """
    integrity.refuse_non_finite(state.params, progress.step, progress.tokens)
    names = _optional_fields(state)
    parts = {name: part for name in names if (part := getattr(state, name)) is not None}
    items = {"state": dataclasses.replace(state, **dict.fromkeys(names))} | parts
    writer.save(progress.step, items, dataclasses.asdict(progress) | integrity.digest_metadata(items))


def restore_state(saved: SavedState, abstract: Any) -> Any:
    """Restore a full state with the shapes, dtypes and shardings of `abstract`.

    Optional parts (block mean, spike detector, moving average) are restored where `abstract` has them. A part that the
    stored state lacks (a fork of a run without it), or has in another shape (a detector with another window), starts
    at zero.

    Raises:
        ValueError: as `restore_params`.
    """
    names = _optional_fields(abstract)
    state = restore.restore_tree(saved.path, "state", dataclasses.replace(abstract, **dict.fromkeys(names)))
    stored, digests_of = restore.stored(saved.path), restore.recorded_digests(saved.path)
    for name in names:
        part = getattr(abstract, name)
        if part is None:
            continue
        if stored.get(name) is None and any(leaf.startswith(f"{name}.") for leaf in digests_of):
            raise ValueError(f"{saved.path} is corrupt or incomplete: its {name} is missing")
        if stored.get(name) is not None and not restore.shape_differences(stored[name], part):
            part = restore.restore_tree(saved.path, name, part)
        else:
            part = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), part)
        state = dataclasses.replace(state, **{name: part})
    return state


def copy_state(saved: SavedState, folder: epath.Path) -> None:
    """Copy a state's files into the run directory `folder` and publish the copy atomically; an existing copy is kept.

    Raises:
        ValueError: the state was removed while it was copied.
    """
    target = folder / STATES / saved.path.name
    if (target / COMMIT_MARKER if is_bucket(target) else target).exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_bucket(target):
        _copy_tree(saved.path, target, last=COMMIT_MARKER)
        return
    temporary = target.parent / f".{saved.path.name}.copying"
    if temporary.exists():
        temporary.rmtree()
    _copy_tree(saved.path, temporary)
    if not (saved.path / COMMIT_MARKER).exists():
        temporary.rmtree()
        raise ValueError(f"{saved.path} was removed while it was copied: fork from another state")
    atomic.publish_directory(temporary, target)


def _optional_fields(state: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(state) if field.default is None]


def _copy_tree(source: epath.Path, target: epath.Path, last: str = "") -> None:
    target.mkdir(exist_ok=bool(last))
    for item in sorted(source.iterdir(), key=lambda item: item.name == last):
        if item.is_dir():
            _copy_tree(item, target / item.name, last)
        else:
            item.copy(target / item.name, overwrite=bool(last))
