"""Import of Hugging Face directories as snapshots, and export of snapshots as Hugging Face directories.

    import_model("models/llama", "imported/llama")      export_snapshot("runs/demo/merged/sma-10", "models/demo")

Tensors are read, converted and written one at a time, so that a complete model is never in memory. The output is
written to a temporary directory next to its target, synced and renamed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.interop import hf_config, hf_tokenizer, levanter, maxtext, trainer_trees
from pma_jax.interop.hf_weights import (
    DTYPES,
    LeafMapping,
    check_leaves,
    drop_redundant_tensors,
    drop_zero_router_bias,
    map_leaves,
)
from pma_jax.interop.output_directory import Progress, TensorWrite, prefix_errors, write_directory
from pma_jax.merging.gather import open_checkpoints, select_checkpoints, snapshot_metadata
from pma_jax.storage.formats.open import open_source, read_leaf, read_leaf_bytes
from pma_jax.storage.formats.orbax_tree import NUMPY_ARRAY, OrbaxItem, nested_tree
from pma_jax.storage.formats.orbax_write import orbax_layout
from pma_jax.storage.formats.safetensors import safetensors_layout
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource, LeafInfo, numpy_dtype
from pma_jax.storage.json_files import read_json_object, serialize_json
from pma_jax.storage.paths import as_path

# Defaults for evaluating an imported model: the logits of one such batch fit into the memory of most devices.
_MAX_SEQUENCE_TOKENS, _BATCH_SEQUENCES = 1024, 8
_PACKED_NOTE = (
    "transformers lets packed documents attend to each other, despite model.separator_token: use one document per "
    "sequence"
)
# Fields of config.json that have no counterpart in ModelConfig: they are exported with their imported values.
_COPIED_FIELDS = (*hf_config.TOKEN_IDS, "router_aux_loss_coef")
_KEPT_FIELDS = (*_COPIED_FIELDS, "max_position_embeddings")
# Maximum bytes per read of a storage chunk that contains several slices of a leaf.
_MAX_READ_BYTES = 4 * 2**30


def import_model(address: str | Path, out: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Write a Hugging Face model as a float32 snapshot, with its tokenizer in the subdirectory `tokenizer/`.

    Args:
        address: A directory with config.json and safetensors (one file, or shards with their index), or
            hf://org/repo@revision.
        out: The snapshot to write; must not exist.
        progress: Called with (bytes read so far, bytes to read).

    Returns:
        A JSON-serialisable summary; "notes" lists one-line messages for the user.

    Raises:
        UserError: The architecture or a field of config.json is not supported; a tensor is missing, unexpected or of
            another shape; or `out` exists. The message is one line, and nothing is written.
    """
    source = open_source(address)
    fields = _read_json(source, "config.json")
    if source.format != "safetensors" or fields is None:
        raise UserError(
            f"{address}: has no config.json, or no safetensors files: specify the directory of a Hugging Face model"
        )
    with prefix_errors(f"{source.origin}: config.json"):
        model, notes = hf_config.parse_hf_config(fields)
    if model.layers * max(model.experts, 1) > len(source.leaves):
        experts = f" of {model.experts} experts" if model.experts else ""
        raise UserError(
            f"{address}: config.json specifies {model.layers} layers{experts}, but there are only "
            f"{len(source.leaves)} tensors"
        )
    leaves, redundancy_notes = drop_redundant_tensors(source, model)
    mappings = map_leaves(model)
    expected = {name: mapping.tensor_shape for mapping in mappings for name in mapping.tensor_names}
    check_leaves(source.origin, leaves, expected, hf_config.architecture_of(model))

    tokenizer_files = hf_tokenizer.select_tokenizer_files(source.other_files)
    target = as_path(out).absolute()
    if hf_tokenizer.FILE_NAME not in tokenizer_files:
        notes += (f"no {hf_tokenizer.FILE_NAME} in the directory: `pma evaluate` needs --config.data.tokenizer=FILE",)
    config = _imported_config(model, fields, target / hf_tokenizer.FOLDER / hf_tokenizer.FILE_NAME)
    metadata = _imported_metadata(source, fields, config)
    leaf_infos = {mapping.leaf_name: LeafInfo(mapping.leaf_shape, "float32") for mapping in mappings}
    copies = {f"{hf_tokenizer.FOLDER}/{path.name}": path for path in tokenizer_files.values()}
    layout = orbax_layout(leaf_infos, OrbaxItem("params", nested_tree(leaf_infos, NUMPY_ARRAY)), metadata)
    total_bytes = sum(leaf.nbytes for leaf in leaves.values())
    write_directory(replace(layout, copies=copies), target, _leaf_writes(source, mappings), total_bytes, progress)
    return {
        "out": str(target),
        "architecture": hf_config.architecture_of(model),
        "parameters": sum(leaf.elements for leaf in leaf_infos.values()),
        "bytes": sum(leaf.nbytes for leaf in leaf_infos.values()),
        "tokenizer": sorted(tokenizer_files),
        "notes": [*source.notes, *notes, *redundancy_notes],
    }


def export_snapshot(
    snapshot: str | Path,
    out: str | Path,
    *,
    dtype: str = "keep",
    shard_bytes: int = 5 * 10**9,
    tokenizer: str | Path | None = None,
    model_config: str | Path | None = None,
    maxtext_settings: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a snapshot as a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Args:
        snapshot: A snapshot of a run (of a single step, or the mean over a block of steps), a merge or an imported
            model; or a checkpoint or a merge of MaxText or levanter. For the directory of a run, its newest snapshot is
            exported.
        out: The directory to write; must not exist.
        dtype: Dtype of the tensors: "keep" (the dtype in the snapshot), "float32", "bfloat16" or "float16".
        shard_bytes: Maximum bytes of tensors in one file.
        tokenizer: A tokenizer.json to export instead of the tokenizer of the run.
        model_config: The config.json of the model, for a checkpoint of another trainer only.
        maxtext_settings: Keys of MaxText's configuration (`maxtext.SETTINGS`), for a checkpoint of MaxText only.
        progress: Called with (bytes read so far, bytes to read).

    Returns:
        A JSON-serialisable summary; "notes" lists one-line messages for the user.

    Raises:
        UserError: `snapshot` is not a snapshot of pma_jax, MaxText or levanter; transformers has no such model; a leaf
            is missing, unexpected or of another shape; a value overflows `dtype`; or `out` exists. The message is one
            line, and nothing is written.
    """
    source, opened = _open_model(snapshot, model_config, maxtext_settings or {})
    config, imported = opened.config, opened.imported
    tensors = _tensor_infos(opened.mappings, opened.dtypes, dtype)
    dtypes = sorted({tensor.dtype for tensor in tensors.values()})
    with prefix_errors(source.origin):
        files = hf_tokenizer.find_tokenizer_files(
            source, config, bool(imported), None if tokenizer is None else Path(tokenizer)
        )
        texts = _config_texts(config, imported, files, dtypes)
    layout = safetensors_layout(tensors, shard_bytes, {"format": "pt"})
    layout = replace(layout, texts={**layout.texts, **texts, **files.texts}, copies=files.copies)
    target = as_path(out).absolute()
    write_directory(layout, target, _tensor_writes(source, opened, tensors), opened.nbytes, progress)
    packed_notes = [_PACKED_NOTE] if config.model.separator_token >= 0 else []
    return {
        "out": str(target),
        "snapshot": source.origin,
        "architecture": hf_config.architecture_of(config.model),
        "parameters": sum(tensor.elements for tensor in tensors.values()),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "dtypes": dtypes,
        "files": sorted([*layout.sizes, *layout.texts, *layout.copies]),
        "tokenizer": sorted([*files.copies, *(name for name in files.texts if name.startswith("tokenizer"))]),
        "notes": [*source.notes, *files.notes, *opened.notes, *packed_notes],
    }


class _OpenedModel(NamedTuple):
    """A model to export, and how to read it."""

    config: Config
    imported: Mapping[str, Any]  # as in the metadata of an imported snapshot; empty for a run's
    mappings: list[LeafMapping]
    dtypes: Mapping[str, str]  # tensor -> dtype in which it is stored
    nbytes: int
    notes: list[str]
    slices: Iterable[tuple[LeafMapping, str, np.ndarray, int]]  # with the tensor's name, and the bytes read


def _open_model(
    address: str | Path, model_config: str | Path | None, maxtext_settings: Mapping[str, str]
) -> tuple[CheckpointSource, _OpenedModel]:
    """Open the checkpoint at an address, or the newest of several, of pma_jax or of another trainer."""
    (source,) = select_checkpoints(open_checkpoints([address]), last=1).sources
    metadata = snapshot_metadata(source)
    if metadata is None:
        return source, _open_trainers_model(source, model_config, maxtext_settings)
    if model_config is not None or maxtext_settings:
        raise UserError(f"{source.origin}: contains its configuration: leave out --model-config and --maxtext")
    return source, _open_own_model(source, metadata)


def _open_own_model(source: CheckpointSource, metadata: Mapping[str, Any]) -> _OpenedModel:
    """Open a snapshot of pma_jax, checking its leaves."""
    config = configuration.resolve(metadata["config"])
    with prefix_errors(source.origin):
        hf_config.check_exportable(config.model)
        leaves, notes = drop_zero_router_bias(source, config.model)
    mappings = map_leaves(config.model)
    check_leaves(source.origin, leaves, {mapping.leaf_name: mapping.leaf_shape for mapping in mappings}, "the model")
    slices = (
        (mapping, name, part, part.nbytes)
        for mapping in mappings
        for name, part in zip(mapping.tensor_names, _read_slices(source, mapping), strict=True)
    )
    return _OpenedModel(
        config=config,
        imported=metadata.get("imported") or {},
        mappings=mappings,
        dtypes={name: leaves[mapping.leaf_name].dtype for mapping in mappings for name in mapping.tensor_names},
        nbytes=sum(leaf.nbytes for leaf in leaves.values()),
        notes=notes,
        slices=slices,
    )


def _open_trainers_model(
    source: CheckpointSource, model_config: str | Path | None, maxtext_settings: Mapping[str, str]
) -> _OpenedModel:
    """Open a checkpoint of MaxText or levanter, checking its leaves."""
    is_maxtext = maxtext.is_maxtext(source.leaves)
    if not is_maxtext and not levanter.is_levanter(source.leaves):
        if any(path.name == "config.json" for path in source.other_files):
            raise UserError(f"{source.origin} is a Hugging Face model already: use it as it is, or `pma import` it")
        raise UserError(
            f"{source.origin} is not a snapshot of pma_jax, nor a decoder of MaxText or levanter: pass a run, one of "
            "its snapshots, or a merge"
        )
    if maxtext_settings and not is_maxtext:
        raise UserError(f"{source.origin}: is levanter's: leave out --maxtext")
    model, fields, notes = trainer_trees.read_model_config(model_config, "MaxText" if is_maxtext else "levanter")
    with prefix_errors(source.origin):
        hf_config.check_exportable(model)
        if is_maxtext:
            arrays, more_notes = maxtext.list_arrays(source.leaves, model, maxtext_settings)
        else:
            arrays, more_notes = levanter.list_arrays(source.leaves, model), []
    name = f"{hf_config.architecture_of(model)} of {model_config}"
    check_leaves(source.origin, source.leaves, {array.name: array.shape for array in arrays}, name)
    return _OpenedModel(
        config=_imported_config(model, fields, source.path / hf_tokenizer.FOLDER / hf_tokenizer.FILE_NAME),
        imported={"fields": {name: fields[name] for name in _KEPT_FIELDS if name in fields}},
        mappings=map_leaves(model),
        dtypes={name: source.leaves[array.name].dtype for array in arrays for name in array.tensor_names},
        nbytes=source.nbytes,
        notes=[*notes, *more_notes],
        slices=((array.mapping, *read) for array in arrays for read in trainer_trees.read_slices(source, array)),
    )


def _leaf_writes(source: CheckpointSource, mappings: list[LeafMapping]) -> Iterator[TensorWrite]:
    """Read and convert the tensors of `source`, each of which is one slice (a layer or expert) of a leaf."""
    float32 = numpy_dtype("float32")
    for mapping in mappings:
        start = 0
        for name in mapping.tensor_names:
            part = mapping.to_slice(read_leaf(source, name), float32)
            yield TensorWrite(mapping.leaf_name, start, part, source.leaves[name].nbytes)
            start += part.nbytes


def _tensor_writes(
    source: CheckpointSource, model: _OpenedModel, tensors: Mapping[str, LeafInfo]
) -> Iterator[TensorWrite]:
    """Read and convert the slices of each leaf of the model, each of which is exported as one tensor."""
    for mapping, name, part, bytes_read in model.slices:
        dtype = tensors[name].dtype
        with np.errstate(over="ignore"):
            tensor = mapping.to_tensor(part, numpy_dtype(dtype))
        if part.dtype != tensor.dtype and not np.isfinite(tensor).all():
            raise UserError(f"{source.origin}: {name} has values that overflow {dtype}: use --dtype keep or float32")
        yield TensorWrite(name, 0, tensor, bytes_read)


def _read_slices(source: CheckpointSource, mapping: LeafMapping) -> Iterator[np.ndarray]:
    """Yield the slices of a leaf, one per tensor of the mapping, in order.

    Slices are read one at a time if the storage supports arbitrary ranges. Snapshots that several devices wrote have
    chunks that span several layers: the slices of a chunk are read together, up to `_MAX_READ_BYTES`.
    """
    leaf, count = source.leaves[mapping.leaf_name], len(mapping.tensor_names)
    elements = leaf.elements // count
    slices_per_read = max(1, min(leaf.chunk_elements, _MAX_READ_BYTES // ITEM_BYTES[leaf.dtype]) // elements)
    for start in range(0, count, slices_per_read):
        stop = min(start + slices_per_read, count)
        data = read_leaf_bytes(source, mapping.leaf_name, start * elements, stop * elements)
        yield from data.view(numpy_dtype(leaf.dtype)).reshape(-1, *mapping.slice_shape)


def _tensor_infos(mappings: list[LeafMapping], stored: Mapping[str, str], dtype: str) -> dict[str, LeafInfo]:
    """Return the shape and dtype of each tensor to export; `dtype` is "keep" or the dtype of all of them.

    `stored` is the dtype in which each tensor is stored.
    """
    if dtype not in ("keep", *DTYPES):
        raise UserError(f"the dtype {dtype!r} is not one of keep, {', '.join(DTYPES)}")
    return _sort_by_layer(
        {
            name: LeafInfo(mapping.tensor_shape, stored[name] if dtype == "keep" else dtype)
            for mapping in mappings
            for name in mapping.tensor_names
        }
    )


def _sort_by_layer(tensors: Mapping[str, LeafInfo]) -> dict[str, LeafInfo]:
    """Sort tensors by layer, as transformers writes them, so that a shard holds consecutive layers."""

    def layer_index(name: str) -> int:
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            return int(parts[2])
        return -1 if name == "model.embed_tokens.weight" else hf_config.MAX_LAYERS

    return dict(sorted(tensors.items(), key=lambda pair: layer_index(pair[0])))


def _imported_config(model: configuration.ModelConfig, fields: Mapping[str, Any], tokenizer: Path) -> Config:
    """Build the configuration of an imported snapshot: its model, its tokenizer, and defaults for evaluating it."""
    max_positions = fields.get("max_position_embeddings")
    length = (
        max_positions if type(max_positions) is int and max_positions > 0 else Config().training.sequence_length_tokens
    )
    return configuration.resolve(
        {
            "model": asdict(model),
            "data": {"tokenizer": str(tokenizer)},
            "training": {"sequence_length_tokens": min(length, _MAX_SEQUENCE_TOKENS)},
            "evaluation": {"batch_size_sequences": _BATCH_SEQUENCES},
        }
    )


def _imported_metadata(source: CheckpointSource, fields: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Build the metadata of an imported snapshot: the usual fields, and `imported`, which a merge copies."""
    return {
        "step": source.step or 0,
        "tokens": source.tokens or 0,
        "loss": None,
        "kind": "point",  # the parameters of a single step, not a mean
        "config": asdict(config),
        "imported": {
            "source": source.origin,
            "architecture": hf_config.architecture_of(config.model),
            "fields": {name: fields[name] for name in _KEPT_FIELDS if name in fields},
            "generation_config": _read_json(source, "generation_config.json"),
        },
    }


def _config_texts(
    config: Config, imported: Mapping[str, Any], files: hf_tokenizer.TokenizerFiles, dtypes: list[str]
) -> dict[str, bytes]:
    """Build the contents of config.json and generation_config.json."""
    fields = imported.get("fields") or {}
    if imported:
        # Absent fields stay absent, so that transformers uses the same defaults as for the imported model.
        extra_fields = {name: fields[name] for name in _COPIED_FIELDS if name in fields}
    else:
        end = files.end_of_document
        extra_fields = {
            "bos_token_id": hf_tokenizer.bos_from_eos(config, end),
            "eos_token_id": end,
            "pad_token_id": None,
        }
    hf_fields = hf_config.make_hf_config(
        config.model,
        dtype=dtypes[0] if len(dtypes) == 1 else "float32",
        max_position_embeddings=fields.get("max_position_embeddings") or config.training.sequence_length_tokens,
        others=extra_fields,
    )
    generation = imported.get("generation_config")
    if generation is None:
        # Generating a batch needs a pad token: use the end-of-document token. Do not set it in config.json:
        # transformers would not train the embedding of that token.
        ids = extra_fields if imported else extra_fields | {"pad_token_id": extra_fields["eos_token_id"]}
        generation = {name: ids[name] for name in hf_config.TOKEN_IDS if ids.get(name) is not None}
    return {"config.json": serialize_json(hf_fields), "generation_config.json": serialize_json(generation)}


def _read_json(source: CheckpointSource, name: str) -> dict[str, Any] | None:
    path = next((file for file in source.other_files if file.name == name), None)
    return None if path is None else read_json_object(path)
