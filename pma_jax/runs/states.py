"""Save, read, copy and restore full training states, which resuming and forking need."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.runs import integrity, restore, steps
from pma_jax.runs.steps import COMMIT_MARKER, StepWriter
from pma_jax.runtime import hosts
from pma_jax.storage import atomic
from pma_jax.storage.paths import exists, is_bucket, name_file

STATES = "states"  # subdirectory of a run directory


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has trained."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens consumed
    position: int = 0  # sequences read from the data set, including those that were skipped after a rollback

    def after_step(self, config: Config) -> "Progress":
        """Return the progress after one more optimizer step."""
        sequences = config.training.batch_size_sequences
        return Progress(self.step + 1, self.tokens + config.batch_tokens, self.position + sequences)


@dataclasses.dataclass(frozen=True)
class SavedState:
    """A training state on disk: its path and its progress. Holds no arrays."""

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
    """Read the metadata of a saved state, without its arrays.

    Raises:
        DamageError: The metadata file is missing or corrupt.
    """
    keys = ("step", "tokens", "position")
    metadata = steps.read_metadata(path, keys)
    return SavedState(path, Progress(*(metadata[key] for key in keys)))


def save_state(writer: StepWriter, state: Any, progress: Progress) -> None:
    """Save a training state asynchronously. Do nothing if an equal state of the step is already saved.

    The arrays may be donated when this function returns. Fields of `state` (a dataclass with `params`) whose default is
    None are optional. Each is stored as a separate item, so that a fork can leave it out, or add one that the parent
    run did not have.

    Raises:
        UserError: A parameter is not finite, the previous asynchronous write failed, or this one cannot be started. If
            it fails later, the next call or `writer.finish` raises.
    """
    integrity.check_finite(state.params, progress.step, progress.tokens)
    names = _optional_fields(state)
    parts = {name: part for name in names if (part := getattr(state, name)) is not None}
    items = {"state": dataclasses.replace(state, **dict.fromkeys(names))} | parts
    writer.save(progress.step, items, dataclasses.asdict(progress) | integrity.digests_as_metadata(items))


def check_fits(saved: SavedState, abstract: Any) -> None:
    """Check that a state has the leaves of `abstract` outside the optional fields, without reading its arrays.

    Raises:
        UserError: Leaves are missing, unexpected or of another shape.
        DamageError: The metadata are missing or cannot be parsed.
        StorageError: The metadata cannot be read.
    """
    required = dataclasses.replace(abstract, **dict.fromkeys(_optional_fields(abstract)))
    differences = restore.shape_differences(restore.read_array_metadata(saved.path).items.get("state", {}), required)
    if differences:
        listed = "; ".join(differences[:10])
        raise UserError(f"{saved.path} does not fit the configuration: {len(differences)} leaves differ: {listed}")


def restore_state(saved: SavedState, abstract: Any) -> Any:
    """Restore a training state with the shapes, dtypes and shardings of `abstract`.

    Optional fields (block mean, spike detector, moving average) that are not None in `abstract` are restored. Those
    that the checkpoint lacks (the parent run did not use them) or stores with another shape (such as a detector with
    another window) are initialised with zeros.

    Raises:
        DamageError: A leaf outside the optional fields is missing, unexpected or of another shape; a restored leaf does
            not match its digest; an optional field has digests but no arrays; or a file cannot be parsed.
        StorageError: The state cannot be read.
    """
    names = _optional_fields(abstract)
    parts = {name: part for name in names if (part := getattr(abstract, name)) is not None}
    metadata = hosts.run_in_all(lambda: restore.read_array_metadata(saved.path))
    stored = metadata.items
    restorable = {
        name for name in parts if stored.get(name) and not restore.shape_differences(stored[name], parts[name])
    }
    items = {name: parts[name] for name in sorted(restorable)}
    items["state"] = dataclasses.replace(abstract, **dict.fromkeys(names))
    restored = restore.restore_trees(saved.path, items, metadata)
    for name in parts.keys() - restorable:
        restored[name] = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), parts[name])
    return dataclasses.replace(restored["state"], **{name: restored[name] for name in parts})


def copy_state(saved: SavedState, run_dir: epath.Path) -> None:
    """Copy a state's files into the run directory `run_dir`, and publish the copy atomically. Keep an existing copy.

    Raises:
        UserError: The state was deleted while it was being copied.
    """
    target = run_dir / STATES / saved.path.name
    # In a bucket the directory of an incomplete copy exists, so only the marker, which is copied last, counts.
    if exists(target / COMMIT_MARKER if is_bucket(target) else target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_bucket(target):
        _copy_tree(saved.path, target, copy_last=COMMIT_MARKER, overwrite=True)
        return
    temporary = target.parent / f".{saved.path.name}.copying"
    temporary.rmtree(missing_ok=True)
    _copy_tree(saved.path, temporary)
    if not exists(saved.path / COMMIT_MARKER):
        temporary.rmtree()
        raise UserError(f"{saved.path} was deleted while it was being copied: use another state")
    atomic.publish_directory(temporary, target)


def _optional_fields(state: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(state) if field.default is None]


def _copy_tree(source: epath.Path, target: epath.Path, copy_last: str = "", overwrite: bool = False) -> None:
    target.mkdir(exist_ok=overwrite)
    for item in sorted(source.iterdir(), key=lambda item: item.name == copy_last):
        if item.is_dir():
            _copy_tree(item, target / item.name, copy_last, overwrite)
        else:
            with name_file(target / item.name):
                item.copy(target / item.name, overwrite=overwrite)
