"""Read and write checkpoints of EasyDeL.

`run-500/` holds `tensorstore_index.json` (format "tensorstore", version 2.0), which lists for each prefix (`model`, and
`tx` for the optimizer) the directory, shape and dtype of its zarr arrays: `model/…`. Beside it are `metadata.json` with
the step, `model_structure.json` with the tree, `checkpoint_metadata.json` with checksums of the arrays if they were
enabled, `config.json` and the tokenizer. `AsyncCheckpointManager.load_pytree` restores one prefix by its structure and
the index (eformer 0.0.99, serialization/async_manager.py; EasyDeL 0.3).
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pma_jax.config.errors import DamageError, UserError
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.names import parse_name
from pma_jax.storage.formats.source import CheckpointSource, LeafInfo
from pma_jax.storage.formats.zarr_tree import ArrayIndex, open_zarr_tree, parse_index, zarr_tree_layout
from pma_jax.storage.json_files import read_json_object

_INDEX_FILE, _METADATA_FILE = "tensorstore_index.json", "metadata.json"
_CHECKSUMS_FILE = "checkpoint_metadata.json"
_RUN_NAME = re.compile(r"run-(\d+)")
_STRUCTURE_SUFFIX = "_structure.json"
_MAX_COPIED_BYTES = 2**28


def is_easydel(path: Path) -> bool:
    """Return whether a directory holds EasyDeL's index of arrays."""
    return (path / _INDEX_FILE).is_file()


def name_with_step(path: Path) -> str:
    """Return the name of a directory, of EasyDeL's `run-500` as `step-500`: elsewhere the number is that of a run."""
    match = _RUN_NAME.fullmatch(path.name)
    return f"step-{match[1]}" if match and is_easydel(path) else path.name


def open_easydel(path: Path, subtrees: Sequence[str] = ()) -> CheckpointSource:
    """Open a checkpoint. The files beside the arrays are in `other_files`.

    Raises:
        DamageError: It is corrupt or not complete, or an array is not as the index says.
        UserError: It is not supported, or the parameters cannot be located.
    """
    index = read_json_object(path / _INDEX_FILE)
    metadata = read_json_object(path / _METADATA_FILE) if (path / _METADATA_FILE).is_file() else {}
    others = [file for file in sorted(path.iterdir()) if file.is_file() and not file.is_symlink()]
    others = [file for file in others if file.name not in (_INDEX_FILE, _METADATA_FILE, "provenance.json")]
    return open_zarr_tree(
        path,
        "easydel",
        subtrees,
        index=_read_index(path / _INDEX_FILE, index),
        step=metadata.get("step", parse_name(name_with_step(path)).step),
        metadata={"index": index, "metadata": metadata},
        other_files=tuple(file for file in others if file.stat().st_size <= _MAX_COPIED_BYTES),
    )


def easydel_layout(
    sources: Sequence[CheckpointSource], leaves: Mapping[str, LeafInfo], custom_metadata: Mapping[str, Any]
) -> OutputLayout:
    """Plan the files of a merged checkpoint: its arrays, an index of them, and copies of the newest source's files.

    The checksums of the newest source's arrays are left out, as is the structure of a prefix that is written in part.

    Raises:
        UserError: No source is EasyDeL's.
    """
    newest = next((source for source in reversed(sources) if source.format == "easydel"), None)
    if newest is None:
        raise UserError("the output is EasyDeL's only if an input is")
    index = dict(newest.metadata["index"])
    entry_of = {name: {"path": name, "shape": list(leaf.shape), "dtype": leaf.dtype} for name, leaf in leaves.items()}
    all_prefixes = index.get("prefixes", {})
    merged = {key: _keep(arrays, entry_of) for key, arrays in all_prefixes.items()}
    prefixes = {key: arrays for key, arrays in merged.items() if arrays}
    for key, value in (("prefixes", prefixes), ("arrays", _keep(index.get("arrays", []), entry_of))):
        index.pop(key, None)
        index |= {key: value} if value else {}
    partial = {key: len(arrays) for key, arrays in prefixes.items() if len(arrays) < len(all_prefixes[key])}
    metadata = newest.metadata["metadata"] | {"is_temporary": False, "has_resume_model": False}
    metadata |= {"has_optimizer_state": "tx" in prefixes.keys() - partial.keys()}
    if sources[-1].step is not None:
        metadata["step"] = sources[-1].step
    texts = {_INDEX_FILE: json.dumps(index, indent=2).encode(), _METADATA_FILE: json.dumps(metadata).encode()}
    checksums = next((file for file in newest.other_files if file.name == _CHECKSUMS_FILE), None)
    if checksums is not None:
        without = read_json_object(checksums) | {"checksum": {}, "array_metadata": {}}
        texts[_CHECKSUMS_FILE] = json.dumps(without).encode()
    structures = {f"{prefix}{_STRUCTURE_SUFFIX}" for prefix in prefixes.keys() - partial.keys()}
    copies = {
        file.name: file
        for file in newest.other_files
        if file.name not in texts and (not file.name.endswith(_STRUCTURE_SUFFIX) or file.name in structures)
    }
    notes = tuple(
        f"{count} of the {len(all_prefixes[key])} arrays of {key} are written, without {key}{_STRUCTURE_SUFFIX}, which "
        "lists all; EasyDeL restores them by their index"
        for key, count in partial.items()
    )
    return replace(zarr_tree_layout(leaves, texts=texts, copies=copies), notes=notes)


def _keep(arrays: Sequence[Mapping[str, Any]], entry_of: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the new entries of those arrays of a list in the index that are written, in its order."""
    return [entry_of[array["path"]] for array in arrays if array["path"] in entry_of]


def _read_index(file: Path, index: Mapping[str, Any]) -> ArrayIndex:
    """Return the arrays of all prefixes of an index.

    Raises:
        DamageError: The index is corrupt.
        UserError: It is of another format.
    """
    if index.get("format") != "tensorstore":
        raise UserError(f"{file}: is an index of the format {str(index.get('format'))[:40]!r}, not tensorstore")
    prefixes = index.get("prefixes", {})
    lists: list[Any] = [*(prefixes.values() if isinstance(prefixes, dict) else [None]), index.get("arrays", [])]
    if not all(isinstance(arrays, list) for arrays in lists):
        raise DamageError(f"{file}: is corrupt: its prefixes are not lists of arrays")
    return parse_index(file, itertools.chain(*lists))
