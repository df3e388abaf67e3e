"""Hugging Face directories into snapshots of ours, and snapshots into such directories, from storage to storage.

    import_model("models/llama", "imported/llama")      export_snapshot("runs/demo/merged/sma-10", "models/demo")

One tensor is held at a time, never a model. The result is written beside its place, synced, and renamed.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.interop import hf_config, hf_tokenizer
from pma_jax.interop.hf_weights import ROUTER_BIAS_LEAF, LeafMapping, check_leaves, map_leaves
from pma_jax.merging.engine import journal
from pma_jax.merging.gather import gather, snapshot_metadata
from pma_jax.storage.formats import publish
from pma_jax.storage.formats.byte_ranges import open_files, write_range
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.open import open_source, read_leaf, read_leaf_bytes
from pma_jax.storage.formats.orbax_write import orbax_layout
from pma_jax.storage.formats.safetensors import safetensors_layout
from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, CheckpointSource, LeafInfo, numpy_dtype
from pma_jax.storage.json_files import json_bytes, read_object
from pma_jax.storage.paths import locate

Progress = Callable[[int, int], None]
# How an imported model is evaluated unless the user says otherwise: the logits of such a batch fit into most memories.
_LONGEST_SEQUENCE_TOKENS, _BATCH_SEQUENCES = 1024, 8
# What an interrupted import or export left in a bucket is not whole, of whatever model: any other goes over it.
_DIGEST = "model"
_PACKED = "transformers lets packed documents see each other (model.separator_token): give it one a sequence"
# Of config.json, besides what the decoder's own configuration says: those that leave again as they came.
_KEPT_FIELDS = (*hf_config.TOKEN_IDS, "router_aux_loss_coef")
# What storage decodes together is read once, up to so much of it.
_TOGETHER_BYTES = 4 * 2**30


def import_model(address: str | Path, out: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Writes a Hugging Face model as a float32 snapshot of ours, its tokenizer beside it in `tokenizer/`.

    Args:
        address: a directory with config.json and safetensors (one file, or shards with their index), or
            hf://org/repo@revision.
        out: the snapshot to write; must not exist.
        progress: called with (bytes read so far, bytes to read).

    Returns:
        What was done, ready for JSON; its "notes" are for the user, one line each.

    Raises:
        ValueError: an architecture or field that the decoder does not have, a leaf that is missing, unknown or of
            another shape, or an output that exists; one line, and nothing is written.
    """
    source = open_source(address)
    fields = _read_json(source, "config.json")
    if source.kind != "safetensors" or fields is None:
        raise ValueError(f"{address}: holds no config.json with safetensors: give a Hugging Face model's directory")
    with _about(f"{source.origin}: config.json"):
        model, notes = hf_config.parse_hf_config(fields)
    if model.layers * max(model.experts, 1) > len(source.leaves):
        experts = f" of {model.experts} experts" if model.experts else ""
        raise ValueError(
            f"{address}: config.json says {model.layers} layers{experts}, and {len(source.leaves)} tensors are here"
        )
    leaves, surplus = _without_surplus(source, model)
    found = map_leaves(model)
    wanted = {name: mapping.tensor_shape for mapping in found for name in mapping.tensors}
    check_leaves(source.origin, leaves, wanted, hf_config.architecture_of(model))

    carried = hf_tokenizer.select_tokenizer_files(source.files)
    target = locate(out).absolute()
    if hf_tokenizer.FILE_NAME not in carried:
        notes += (f"no {hf_tokenizer.FILE_NAME} came along: `pma evaluate` needs --config.data.tokenizer=FILE",)
    config = _imported_config(model, fields, target / hf_tokenizer.FOLDER / hf_tokenizer.FILE_NAME)
    facts = _imported_metadata(source, fields, config)
    ours = {mapping.leaf: LeafInfo(mapping.leaf_shape, "float32") for mapping in found}
    copies = {f"{hf_tokenizer.FOLDER}/{path.name}": path for path in carried.values()}
    layout = orbax_layout(ours, _as_ours(source, ours), facts)
    with _published(replace(layout, copies=copies), target) as placed:
        _import_leaves(source, found, placed, progress)
    return {
        "out": str(target),
        "architecture": hf_config.architecture_of(model),
        "parameters": sum(leaf.elements for leaf in ours.values()),
        "bytes": sum(leaf.nbytes for leaf in ours.values()),
        "tokenizer": sorted(carried),
        "notes": [*source.notes, *notes, *surplus],
    }


def export_snapshot(
    snapshot: str | Path,
    out: str | Path,
    *,
    dtype: str = "keep",
    shard_bytes: int = 5 * 10**9,
    tokenizer: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes a snapshot of ours as a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Args:
        snapshot: a point, a block mean, a merge of them, an imported model, or a run (its newest snapshot).
        out: the directory to write; must not exist.
        dtype: "keep", "float32" or "bfloat16".
        shard_bytes: the most bytes of tensors in one file.
        tokenizer: a tokenizer.json to go along, instead of the run's own.
        progress: called with (bytes read so far, bytes to read).

    Returns:
        What was done, ready for JSON; its "notes" are for the user, one line each.

    Raises:
        ValueError: it is no snapshot of ours, transformers has no such model, a leaf is missing, unknown or of another
            shape, or the output exists; one line, and nothing is written.
    """
    source = gather([snapshot]).sources[-1]
    facts = snapshot_metadata(source)
    if facts is None:
        raise ValueError(f"{snapshot} is not a snapshot of pma_jax: give RUN, RUN/snapshots/STEP or a merge's --out")
    config = configuration.resolve(facts["config"])
    with _about(source.origin):
        hf_config.check_exportable(config.model)
        leaves, without = _without_bias(source, config.model)
    found = map_leaves(config.model)
    check_leaves(source.origin, leaves, {mapping.leaf: mapping.leaf_shape for mapping in found}, "the model")
    if dtype not in ("keep", "float32", "bfloat16"):
        raise ValueError(f"the dtype {dtype!r} is not one of keep, float32, bfloat16")
    kept = {mapping.leaf: source.leaves[mapping.leaf].dtype if dtype == "keep" else dtype for mapping in found}
    theirs = _in_their_order(
        {name: LeafInfo(mapping.tensor_shape, kept[mapping.leaf]) for mapping in found for name in mapping.tensors}
    )
    layout = safetensors_layout(theirs, shard_bytes, {"format": "pt"})
    with _about(source.origin):
        imported = facts.get("imported") or {}
        files = hf_tokenizer.find_tokenizer_files(
            source, config, bool(imported), None if tokenizer is None else Path(tokenizer)
        )
        texts = _config_texts(config, imported, files, sorted(set(kept.values())))
    layout = replace(layout, texts={**layout.texts, **texts, **files.texts}, copies=files.copies)
    target = locate(out).absolute()
    with _published(layout, target) as placed:
        _export_leaves(source, found, theirs, placed, progress)
    return {
        "out": str(target),
        "snapshot": source.origin,
        "architecture": hf_config.architecture_of(config.model),
        "parameters": sum(leaf.elements for leaf in theirs.values()),
        "bytes": sum(leaf.nbytes for leaf in theirs.values()),
        "dtypes": sorted(set(kept.values())),
        "files": sorted([*layout.sizes, *layout.texts, *layout.copies]),
        "tokenizer": sorted([*files.copies, *(name for name in files.texts if name.startswith("tokenizer"))]),
        "notes": [*source.notes, *files.notes, *without, *([_PACKED] if config.model.separator_token >= 0 else [])],
    }


def _import_leaves(
    source: CheckpointSource,
    found: list[LeafMapping],
    placed: Mapping[str, tuple[ByteRange, ...]],
    progress: Progress | None,
) -> None:
    float32 = numpy_dtype("float32")
    total, done = sum(source.leaves[name].nbytes for mapping in found for name in mapping.tensors), 0
    for mapping in found:
        byte_ranges = placed[mapping.leaf]
        with open_files([byte_range.path for byte_range in byte_ranges], os.O_WRONLY) as descriptors:
            start = 0
            for name in mapping.tensors:
                item = mapping.to_item(read_leaf(source, name), float32)
                write_range(descriptors, byte_ranges, start, item.reshape(-1).view("uint8"))
                start += item.nbytes
                done += source.leaves[name].nbytes
                if progress is not None:
                    progress(done, total)


def _export_leaves(
    source: CheckpointSource,
    found: list[LeafMapping],
    theirs: Mapping[str, LeafInfo],
    placed: Mapping[str, tuple[ByteRange, ...]],
    progress: Progress | None,
) -> None:
    done = 0
    total = sum(source.leaves[mapping.leaf].nbytes for mapping in found)
    for mapping in found:
        for name, item in zip(mapping.tensors, _items(source, mapping), strict=True):
            tensor = mapping.to_tensor(item, numpy_dtype(theirs[name].dtype))
            with open_files([byte_range.path for byte_range in placed[name]], os.O_WRONLY) as descriptors:
                write_range(descriptors, placed[name], 0, tensor.reshape(-1).view("uint8"))
            done += item.nbytes
            if progress is not None:
                progress(done, total)


def _items(source: CheckpointSource, mapping: LeafMapping) -> Iterator[np.ndarray]:
    """The items of one of our leaves, in order.

    One is read at a time where any range can be. A snapshot that several devices wrote is cut across the layers: all of
    a leaf, or as much as is read together, is held then.
    """
    leaf, count = source.leaves[mapping.leaf], len(mapping.tensors)
    elements = leaf.elements // count
    together = max(1, min(leaf.chunk_elements, _TOGETHER_BYTES // ITEM_BYTES[leaf.dtype]) // elements)
    for start in range(0, count, together):
        data = read_leaf_bytes(source, mapping.leaf, start * elements, min(start + together, count) * elements)
        yield from data.view(numpy_dtype(leaf.dtype)).reshape(-1, *mapping.shape)


def _without_bias(source: CheckpointSource, model: configuration.ModelConfig) -> tuple[dict[str, LeafInfo], list[str]]:
    """The leaves without a router's bias, which Qwen3-MoE has not, and a note that says so.

    Raises:
        ValueError: the bias is not zero: without it other experts would be chosen.
    """
    leaves = dict(source.leaves)
    if not (model.experts and model.router_bias) or ROUTER_BIAS_LEAF not in leaves:
        return leaves, []
    largest = np.abs(read_leaf(source, ROUTER_BIAS_LEAF).astype("float32")).max()
    if largest != 0:  # or is not a number
        raise ValueError(
            f"{ROUTER_BIAS_LEAF} is up to {largest:.2g}, and {hf_config.QWEN3_MOE} has none: without it other experts "
            "would be chosen; train what is to go out with --config.model.router_bias=False"
        )
    del leaves[ROUTER_BIAS_LEAF]
    return leaves, ["the router's bias, which Qwen3-MoE does not have, is zero: nothing is lost"]


def _in_their_order(leaves: Mapping[str, LeafInfo]) -> dict[str, LeafInfo]:
    """A layer's tensors together, layers in order: a shard then holds whole layers, and loads like any other model."""

    def layer(name: str) -> int:
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            return int(parts[2])
        return -1 if name == "model.embed_tokens.weight" else hf_config.MOST_LAYERS

    return dict(sorted(leaves.items(), key=lambda item: layer(item[0])))


def _without_surplus(
    source: CheckpointSource, model: configuration.ModelConfig
) -> tuple[dict[str, LeafInfo], list[str]]:
    """The leaves without copies of what the configuration already says, and a note a kind; a copy that differs stays.

    Old Llama checkpoints store the rotary frequencies, and some tied ones the output projection too.
    """
    leaves, notes = dict(source.leaves), []
    if model.tie_embeddings and _is_tied(source):
        del leaves["lm_head.weight"]
        notes.append("lm_head.weight is the embedding, to which it is tied: one of them was read")
    frequencies = [name for name in leaves if name.endswith(".rotary_emb.inv_freq")]
    same = [name for name in frequencies if _are_frequencies(source, name, model)]
    for name in same:
        del leaves[name]
    if same:
        notes.append(f"{len(same)} tensors of rotary frequencies were not read: rope_theta says the same")
    return leaves, notes


def _is_tied(source: CheckpointSource) -> bool:
    head, embedding = (source.leaves.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if head is None or embedding is None or head != embedding:
        return False
    step = 2**22
    return all(
        read_leaf_bytes(source, "lm_head.weight", start, min(start + step, head.elements)).tobytes()
        == read_leaf_bytes(source, "model.embed_tokens.weight", start, min(start + step, head.elements)).tobytes()
        for start in range(0, head.elements, step)
    )


def _are_frequencies(source: CheckpointSource, name: str, model: configuration.ModelConfig) -> bool:
    half = model.head_dim // 2
    if source.leaves[name].shape != (half,) or not source.leaves[name].is_summed:
        return False
    stored = read_leaf(source, name).astype("float64")
    # Half a unit in the last place of bfloat16: some were stored so.
    return all(
        abs(value - model.rope_theta ** (-i / half)) <= 2**-8 * model.rope_theta ** (-i / half)
        for i, value in enumerate(stored.tolist())
    )


def _imported_config(model: configuration.ModelConfig, fields: Mapping[str, Any], tokenizer: Path) -> Config:
    """The configuration that an imported snapshot carries: its model and tokenizer; the rest is for evaluating it."""
    longest = fields.get("max_position_embeddings")
    length = longest if type(longest) is int and longest > 0 else Config().training.sequence_length_tokens
    return configuration.resolve(
        {
            "model": asdict(model),
            "data": {"tokenizer": str(tokenizer)},
            "training": {"sequence_length_tokens": min(length, _LONGEST_SEQUENCE_TOKENS)},
            "evaluation": {"batch_size_sequences": _BATCH_SEQUENCES},
        }
    )


def _imported_metadata(source: CheckpointSource, fields: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """What the snapshot says of itself: what each of ours does, and `imported`, which merges of it keep."""
    return {
        "step": source.step or 0,
        "tokens": source.tokens or 0,
        "loss": None,
        "kind": "point",
        "config": asdict(config),
        "imported": {
            "source": source.origin,
            "architecture": hf_config.architecture_of(config.model),
            "fields": {name: fields[name] for name in (*_KEPT_FIELDS, "max_position_embeddings") if name in fields},
            "generation_config": _read_json(source, "generation_config.json"),
        },
    }


def _config_texts(
    config: Config, imported: Mapping[str, Any], files: hf_tokenizer.TokenizerFiles, dtypes: list[str]
) -> dict[str, bytes]:
    """config.json and generation_config.json."""
    fields = imported.get("fields") or {}
    if imported:
        # What was absent stays so: transformers then takes its own default, as it did before.
        others = {name: fields[name] for name in _KEPT_FIELDS if name in fields}
    else:
        end = files.end_of_document
        others = {
            "bos_token_id": hf_tokenizer.beginning_of_document(config, end),
            "eos_token_id": end,
            "pad_token_id": None,
        }
    described = hf_config.make_hf_config(
        config.model,
        dtype=dtypes[0] if len(dtypes) == 1 else "float32",
        max_position_embeddings=fields.get("max_position_embeddings") or config.training.sequence_length_tokens,
        others=others,
    )
    generation = imported.get("generation_config")
    if generation is None:
        # Batches are padded with what ends a document; in config.json that would keep its embedding from being trained.
        ids = others if imported else others | {"pad_token_id": others["eos_token_id"]}
        generation = {name: ids[name] for name in hf_config.TOKEN_IDS if ids.get(name) is not None}
    return {"config.json": json_bytes(described), "generation_config.json": json_bytes(generation)}


def _as_ours(source: CheckpointSource, leaves: Mapping[str, LeafInfo]) -> CheckpointSource:
    """How a snapshot of ours keys its leaves, for `orbax_layout`."""
    keys = {name: [{"key": part, "key_type": 2} for part in name.split(".")] for name in leaves}
    return replace(source, kind="orbax", leaves=leaves, metadata={"item": "params", "keys": keys, "sharding": {}})


def _read_json(source: CheckpointSource, name: str) -> dict[str, Any] | None:
    path = next((file for file in source.files if file.name == name), None)
    return None if path is None else read_object(path)


@contextlib.contextmanager
def _about(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


@contextlib.contextmanager
def _published(layout: OutputLayout, target: Path) -> Iterator[Mapping[str, tuple[ByteRange, ...]]]:
    """The places of the leaves in a directory beside `target`, which becomes `target` when the block ends well."""
    work = publish.working_directory(target, "")
    directory = work / "checkpoint"
    _refuse_existing(target)
    work.mkdir(parents=True, exist_ok=True)
    with journal.lock_work_directory(work, 0):
        try:
            if directory.exists():  # of a process that was killed
                shutil.rmtree(directory)
            layout.create_files(directory)
            yield layout.byte_ranges_in(directory)
            _refuse_existing(target)
            publish.publish(directory, target, list(layout.sizes), _DIGEST)
        finally:
            shutil.rmtree(work)


def _refuse_existing(target: Path) -> None:
    if (target.exists() or target.is_symlink()) and not publish.is_upload_interrupted(target, _DIGEST):
        raise ValueError(f"{target}: exists already, and is never overwritten: choose another --out, or remove it")
