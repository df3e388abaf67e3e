"""Write small checkpoints as other trainers do, with the calls of their savers."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import serialization as flax_serialization
from flax import traverse_util
from jax.experimental.array_serialization import serialization
from ml_dtypes import bfloat16
from orbax.checkpoint import v1 as ocp_v1


def state(seed, parameters):
    """Return the leaves of a training state by key path, with parameters below `parameters`."""
    rng = np.random.default_rng(seed)
    return {
        f"{parameters}/Dense_0/kernel": jnp.asarray(rng.normal(size=(6, 4)), jnp.float32),
        f"{parameters}/Dense_0/bias": jnp.zeros(4, jnp.float32),
        f"{parameters}/embedding": jnp.asarray(rng.normal(size=(5, 3)), jnp.bfloat16),
        f"{parameters}/temperature": jnp.float32(rng.normal()),
        "opt_state/0/mu": jnp.asarray(rng.normal(size=(6, 4)), jnp.float32),
        "opt/0/count": jnp.int32(seed),
        "step": jnp.int32(100 * seed),
    }


def serialize(arrays, specs):
    manager = serialization.GlobalAsyncCheckpointManager()
    manager.serialize(arrays, specs, on_commit_callback=lambda: None)
    manager.wait_until_finished()


def save_big_vision(folder, seed):
    path = folder / f"checkpoint.bv-{100 * seed:09d}"
    leaves = state(seed, "params")
    names = [str(path / name.replace("/", "~")) for name in leaves]
    serialize(list(leaves.values()), [serialization.get_tensorstore_spec(name) for name in names])
    return path


def save_levanter(folder, seed, database, has_index=True):
    path = folder / f"step-{100 * seed}"
    leaves = state(seed, "model")
    specs = [
        {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": {"driver": "file", "path": str(path)}, "path": name},
        }
        if database
        else serialization.get_tensorstore_spec(str(path / name))
        for name in leaves
    ]
    if database:
        path.mkdir(parents=True)
    serialize(list(leaves.values()), specs)
    if database and has_index:
        arrays = [
            {"path": n, "shape": x.shape, "dtype": str(x.dtype), "chunk_shape": x.shape} for n, x in leaves.items()
        ]
        index = {"format_version": 1, "array_driver": "zarr3", "kvstore_driver": "ocdbt", "arrays": arrays}
        (path / "manifest.json").write_text(json.dumps(index))
    metadata = {"step": 100 * seed, "timestamp": "2025-09-26T12:04:00", "is_temporary": seed == 2}
    (path / "metadata.json").write_text(json.dumps(metadata))
    return path


def save_easydel(folder, seed):
    path = folder / f"run-{100 * seed}"
    leaves = {name.replace("opt_state", "tx"): x for name, x in state(seed, "model").items()}
    leaves = {name: x for name, x in leaves.items() if name.startswith(("model", "tx"))}
    serialize(list(leaves.values()), [serialization.get_tensorstore_spec(str(path / name)) for name in leaves])
    prefixes = {"model": [], "tx": []}
    for name, x in leaves.items():
        prefixes[name.split("/")[0]].append({"path": name, "shape": list(x.shape), "dtype": str(x.dtype)})
    index = {"format": "tensorstore", "version": "0.0.99.12", "prefixes": prefixes}
    files = {"tensorstore_index": index, "model_structure": {"prefix": "model"}, "tx_structure": {}, "config": {}}
    files["metadata"] = {"step": 100 * seed, "is_temporary": False, "has_optimizer_state": True}
    # As with `AsyncCheckpointManager(enable_validation=True)`.
    checksums = {name: hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for name, x in leaves.items()}
    files["checkpoint_metadata"] = {"version": "0.0.99.12", "checksum": checksums, "custom_metadata": {}}
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


# As T5X registers it.
flax_serialization.register_serialization_state(
    ts.Spec, ty_to_state_dict=lambda spec: spec.to_json(), ty_from_state_dict=lambda _, spec: spec, override=True
)
T5X_INLINE = ("target/decoder/scale", "target/logit", "target/rows", "state/step", "state/param_states/scale/v")


def t5x_state(seed):
    rng = np.random.default_rng(seed)
    return {
        "target/decoder/kernel": rng.normal(size=(6, 4)).astype(np.float32),
        "target/decoder/scale": rng.normal(size=3).astype(np.float32),
        "target/embedding": rng.normal(size=(5, 3)).astype(bfloat16),
        "target/logit": np.float32(rng.normal()),
        "target/rows": rng.normal(size=(2, 2)).astype(bfloat16),
        "state/step": np.int32(1000 * seed),
        "state/param_states/kernel/v": rng.normal(size=(6, 4)).astype(np.float32),
        "state/param_states/scale/v": rng.normal(size=3).astype(np.float32),
    }


def save_t5x(folder, seed, leaves=None):
    """Save as `Checkpointer.save`: partitioned arrays with tensorstore, the others in the msgpack file."""
    path = folder / f"checkpoint_{1000 * seed}"
    path.mkdir(parents=True)
    written = {}
    for name, x in (leaves or t5x_state(seed)).items():
        if name in T5X_INLINE or not hasattr(x, "shape"):
            written[name] = x
            continue
        metadata = {"shape": list(x.shape), "chunks": [-(-x.shape[0] // 2), *x.shape[1:]], "compressor": {"id": "gzip"}}
        spec = {"driver": "zarr", "dtype": x.dtype.name, "metadata": metadata}
        spec["kvstore"] = {"driver": "file", "path": name.replace("/", ".")}
        written[name] = ts.Spec(spec)
        absolute = spec | {"kvstore": {"driver": "file", "path": str(path / name.replace("/", "."))}}
        ts.open(ts.Spec(absolute), create=True, open=True).result().write(x).result()
    tree = traverse_util.unflatten_dict(written, sep="/")
    (path / "checkpoint").write_bytes(flax_serialization.to_bytes({"version": 3, "optimizer": tree}))
    return path


def parameters(seed):
    rng = np.random.default_rng(seed)
    return {
        "decoder": {"layers": {"mlp": {"wi": {"kernel": jnp.asarray(rng.normal(size=(4, 3, 6)), jnp.float32)}}}},
        "token_embedder": {"embedding": jnp.asarray(rng.normal(size=(8, 4)), jnp.bfloat16)},
    }


def collection(seed):
    return {"batch_stats": {"norm": {"mean": jnp.full(3, 1.0 * seed)}}}


def maxtext_state(seed):
    """Return a state with the keys that MaxText 0.2.5 wrote, when it was run: a chain of optimizers is a list."""
    optimizer = jax.tree.map(lambda x: x + 1, parameters(seed))
    return {
        "step": jnp.int32(100 * seed),
        "params": {"params": parameters(seed)} | collection(seed),
        "opt_state": [{"mu": {"params": optimizer}, "count": jnp.int32(seed)}, None, {"count": jnp.int32(seed)}],
        "nnx_aux": {"model": {"rngs": {"dropout": {"count": jnp.uint32(seed), "key": jnp.zeros(2, jnp.uint32)}}}},
    }


def save_maxtext(folder, seeds):
    """Save as MaxText 0.2 until it used Orbax v1: `checkpoints/N/items` beside the iterator's `iter`."""
    handlers = {
        "items": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True),
        "iter": ocp.JsonCheckpointHandler(),
    }
    with ocp.CheckpointManager(folder / "checkpoints", item_names=tuple(handlers), item_handlers=handlers) as manager:
        for seed in seeds:
            items = ocp.args.PyTreeSave(maxtext_state(seed))
            args = ocp.args.Composite(items=items, iter=ocp.args.JsonSave({"position": seed}))
            manager.save(100 * seed, args=args)
    return folder / "checkpoints"


def save_maxtext_v1(folder, seeds, loss=None):
    """Save as MaxText 0.2.5: by Orbax v1, with how the model is built in the custom metadata."""
    for seed in seeds:
        metadata = {"scan_layers": True, "lora": {"lora_rank": 8}} | ({"loss": loss[seed]} if loss else {})
        context = ocp_v1.Context()
        context.array.saving.use_ocdbt = context.array.saving.use_zarr3 = True
        with context:
            state = {"items": maxtext_state(seed)}
            ocp_v1.save_checkpointables(folder / "checkpoints" / str(100 * seed), state, custom_metadata=metadata)
    return folder / "checkpoints"


def save_kauldron(folder, seeds, collections=collection):
    """Save as Kauldron 1.4: `checkpoints/ckpt_N`, with the state as the default item."""
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt")
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:
        for seed in seeds:
            state = {"step": seed, "params": parameters(seed), "collections": collections(seed)}
            state["opt_state"] = {"0": {"mu": parameters(seed + 9)}}
            manager.save(100 * seed, args=ocp.args.StandardSave(state))
    return folder / "checkpoints"
