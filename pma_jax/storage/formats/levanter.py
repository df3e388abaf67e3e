"""Read and write checkpoints of levanter and marin.

`step-1000/` holds `metadata.json` (step, timestamp, is_temporary), which is written last, and the arrays of the
trainer's state, whose names have "/" between the keys: `model/…`, `opt_state/…`, `step`. Until 2025 each array was a
directory (zarr 2); since then all are in one OCDBT database (zarr 3), and since 2026 `manifest.json` lists them.
levanter's restore takes the database if the list says so or there is `manifest.ocdbt`, and else the directories
(marin-community/marin at 0173e9a, and marin-levanter 0.2.227: tensorstore_serialization.py), so that a merge is written
as directories without a list. A temporary checkpoint is complete: it is one that levanter later removes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pma_jax.config.errors import DamageError, UserError
from pma_jax.storage.formats.easydel import is_easydel
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.orbax_tree import TREE_FILE
from pma_jax.storage.formats.source import CheckpointSource, LeafInfo
from pma_jax.storage.formats.zarr_tree import ArrayIndex, open_zarr_tree, parse_index, zarr_tree_layout
from pma_jax.storage.formats.zarr_write import json_bytes
from pma_jax.storage.json_files import read_json_object

METADATA_FILE, _INDEX_FILE = "metadata.json", "manifest.json"
_INDEX_VERSION = 1
DATABASE_FILE = "manifest.ocdbt"
_MODEL_KEY = "model"


def is_levanter(path: Path) -> bool:
    """Return whether a directory holds the files of a levanter checkpoint, and no metadata of Orbax or EasyDeL."""
    if not (path / METADATA_FILE).is_file() or (path / TREE_FILE).exists() or is_easydel(path):
        return False
    return (path / DATABASE_FILE).is_file() or (path / _MODEL_KEY).is_dir() or (path / "step" / ".zarray").is_file()


def open_levanter(path: Path, subtrees: Sequence[str] = ()) -> CheckpointSource:
    """Open a checkpoint.

    Raises:
        DamageError: It is corrupt or not complete.
        UserError: It is not supported, or the parameters cannot be located.
    """
    metadata = read_json_object(path / METADATA_FILE)
    if type(metadata.get("step")) is not int:
        raise DamageError(f"{path / METADATA_FILE}: has no step; the checkpoint is not levanter's, or is corrupt")
    index = _read_index(path / _INDEX_FILE) if (path / _INDEX_FILE).is_file() else None
    return open_zarr_tree(path, "levanter", subtrees, index=index, step=metadata["step"], metadata=metadata)


def _read_index(file: Path) -> ArrayIndex:
    """Read levanter's list of the arrays.

    Raises:
        DamageError: It is corrupt.
        UserError: It is of a later version, which levanter raises where an older reader would not read rightly.
    """
    index = read_json_object(file)
    version, arrays = index.get("format_version"), index.get("arrays")
    if type(version) is not int or not isinstance(arrays, list):
        raise DamageError(f"{file}: is corrupt: it has no format_version or no list of arrays; fetch it again")
    if version > _INDEX_VERSION:
        raise UserError(f"{file}: has the format version {version}; up to {_INDEX_VERSION} is read, update pma_jax")
    return parse_index(file, arrays)


def levanter_layout(
    sources: Sequence[CheckpointSource], leaves: Mapping[str, LeafInfo], custom_metadata: Mapping[str, Any]
) -> OutputLayout:
    """Plan the files of a merged checkpoint. Its metadata are those of the newest source, not temporary.

    Raises:
        UserError: No source is levanter's, or the newest has no step.
    """
    newest = next((source for source in reversed(sources) if source.format == "levanter"), None)
    step = sources[-1].step if sources[-1].step is not None else newest and newest.step
    if newest is None or step is None:
        raise UserError("the output is levanter's only if an input is, and states its step")
    metadata = dict(newest.metadata) | {"step": step, "is_temporary": False}
    return zarr_tree_layout(leaves, texts={METADATA_FILE: json_bytes(metadata)})
