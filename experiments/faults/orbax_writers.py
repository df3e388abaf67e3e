"""Checkpoints of every kind that Orbax writes: its interfaces, its options of storage, and trees that people save."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as v0
from flax import nnx
from flax.training.train_state import TrainState
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from orbax.checkpoint.experimental.v1 import training

Tree = Any
Pair = collections.namedtuple("Pair", "first second")


class Writer(NamedTuple):
    """One of Orbax's interfaces: how it saves a tree and restores it without being told the structure.

    Attributes:
        save: (new directory named by a step, tree, options of the storage) -> the directory of the checkpoint, which
            is in the directory `run` beside it if the interface manages several steps.
        restore: (directory) -> tree.
        restore_into: (directory, abstract tree) -> tree.
    """

    save: Callable[[Path, Tree, dict[str, Any]], Path]
    restore: Callable[[Path], Tree]
    restore_into: Callable[[Path, Tree], Tree]


def _v1_context(options: dict[str, Any]) -> ocp.Context:
    context = ocp.Context()
    saving = context.array.saving
    saving.use_ocdbt = options.get("use_ocdbt", True)
    saving.use_zarr3 = options.get("use_zarr3", True)
    saving.use_compression = options.get("compressed", True)
    saving.storage_options.chunk_byte_size = options.get("chunk_bytes")
    if "target_file_bytes" in options:
        saving.ocdbt_target_data_file_size = options["target_file_bytes"]
    return context


def _v0_handler(options: dict[str, Any]) -> v0.PyTreeCheckpointHandler:
    return v0.PyTreeCheckpointHandler(
        use_ocdbt=options.get("use_ocdbt", True),
        use_zarr3=options.get("use_zarr3", False),
        use_compression=options.get("compressed", True),
    )


def _save_args(tree: Tree, options: dict[str, Any]) -> Any:
    if "chunk_bytes" not in options:
        return None
    arguments = v0.SaveArgs(chunk_byte_size=options["chunk_bytes"])
    return jax.tree.map(lambda _: arguments, tree)


def _save_v1(path: Path, tree: Tree, options: dict[str, Any]) -> Path:
    with _v1_context(options):
        ocp.save(str(path), tree)
    return path


def _save_v1_items(path: Path, tree: Tree, options: dict[str, Any]) -> Path:
    with _v1_context(options):
        ocp.save_checkpointables(str(path), {"params": tree, "opt": {"mu": jnp.ones(3)}, "notes": {"text": "run 7"}})
    return path


def _save_training(path: Path, tree: Tree, options: dict[str, Any]) -> Path:
    run = path.parent / "run"
    with _v1_context(options), training.Checkpointer(str(run)) as checkpointer:
        checkpointer.save(int(path.name), tree)
    return run / path.name


def _save_v0(path: Path, tree: Tree, options: dict[str, Any]) -> Path:
    checkpointer = v0.Checkpointer(_v0_handler(options))
    checkpointer.save(path, args=v0.args.PyTreeSave(tree, save_args=_save_args(tree, options)))
    return path


def _save_v0_rich(path: Path, tree: Tree, options: dict[str, Any]) -> Path:
    checkpointer = v0.Checkpointer(_rich_handler())
    checkpointer.save(path, args=v0.args.PyTreeSave(tree))
    return path


def _rich_handler() -> v0.PyTreeCheckpointHandler:
    """Return a handler that also stores the types of the tree's containers."""
    options = PyTreeMetadataOptions(support_rich_types=True)
    return v0.PyTreeCheckpointHandler(pytree_metadata_options=options)


def _save_standard(path: Path, tree: Tree, options: dict[str, Any]) -> Path:
    with v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree, save_args=_save_args(tree, options))
    return path


def _save_manager(path: Path, tree: Tree, options: dict[str, Any]) -> Path:
    run = path.parent / "run"
    with v0.CheckpointManager(run) as manager:
        manager.save(int(path.name), args=v0.args.StandardSave(tree, save_args=_save_args(tree, options)))
    return run / path.name


def _save_manager_items(path: Path, tree: Tree, options: dict[str, Any]) -> Path:
    handlers = {"params": _v0_handler(options), "dataset": v0.JsonCheckpointHandler()}
    run = path.parent / "run"
    with v0.CheckpointManager(run, item_handlers=handlers) as manager:
        params = v0.args.PyTreeSave(tree, save_args=_save_args(tree, options))
        items = v0.args.Composite(params=params, dataset=v0.args.JsonSave({"position": 3}))
        manager.save(int(path.name), args=items, metrics={"loss": 1.5})
    return run / path.name


def _restore_with_manager(restore: Callable[[v0.CheckpointManager, int], Tree], path: Path) -> Tree:
    """Restore the directory of a step through a manager, under any name: the manager wants the step's number."""
    root = path.parent / f"{path.name}-as-step"
    if not root.exists():
        root.mkdir()
        (root / "7").symlink_to(path)
    with v0.CheckpointManager(root) as manager:
        return restore(manager, 7)


def _load_v1(path: Path, abstract: Tree = None) -> Tree:
    return ocp.load(str(path), abstract)


def _as_restore_args(abstract: Tree) -> Any:
    return v0.args.PyTreeRestore(abstract, restore_args=v0.checkpoint_utils.construct_restore_args(abstract))


WRITERS: dict[str, Writer] = {
    "v1 save": Writer(_save_v1, _load_v1, _load_v1),
    "v1 items": Writer(
        _save_v1_items,
        lambda path: ocp.load_checkpointables(str(path))["params"],
        lambda path, abstract: ocp.load_checkpointables(str(path), {"params": abstract})["params"],
    ),
    "v1 training": Writer(_save_training, _load_v1, _load_v1),
    "v0 pytree": Writer(
        _save_v0,
        lambda path: v0.PyTreeCheckpointer().restore(path),
        lambda path, abstract: v0.Checkpointer(v0.PyTreeCheckpointHandler()).restore(
            path, args=_as_restore_args(abstract)
        ),
    ),
    "v0 rich types": Writer(
        _save_v0_rich,
        lambda path: v0.Checkpointer(_rich_handler()).restore(path),
        lambda path, abstract: v0.Checkpointer(_rich_handler()).restore(path, args=_as_restore_args(abstract)),
    ),
    "v0 standard": Writer(
        _save_standard,
        lambda path: v0.StandardCheckpointer().restore(path),
        lambda path, abstract: v0.StandardCheckpointer().restore(path, abstract),
    ),
    "manager": Writer(
        _save_manager,
        lambda path: _restore_with_manager(
            lambda manager, step: manager.restore(step, args=v0.args.StandardRestore()), path
        ),
        lambda path, abstract: _restore_with_manager(
            lambda manager, step: manager.restore(step, args=v0.args.StandardRestore(abstract)), path
        ),
    ),
    "manager items": Writer(
        _save_manager_items,
        lambda path: _restore_with_manager(
            lambda manager, step: manager.restore(step, args=v0.args.Composite(params=v0.args.PyTreeRestore())), path
        )["params"],
        lambda path, abstract: _restore_with_manager(
            lambda manager, step: manager.restore(step, args=v0.args.Composite(params=_as_restore_args(abstract))),
            path,
        )["params"],
    ),
}

# Options of the storage; the interfaces that have no such option ignore it.
STORAGES: dict[str, dict[str, Any]] = {
    "default": {},
    "zarr3": {"use_zarr3": True},
    "zarr2": {"use_zarr3": False},
    "files": {"use_ocdbt": False},
    "files zarr2": {"use_ocdbt": False, "use_zarr3": False},
    "files zarr3": {"use_ocdbt": False, "use_zarr3": True},
    "raw": {"compressed": False},
    "raw files": {"compressed": False, "use_ocdbt": False},
    "raw files zarr2": {"compressed": False, "use_ocdbt": False, "use_zarr3": False},
    "chunks": {"chunk_bytes": 256},
    "raw chunks": {"chunk_bytes": 256, "compressed": False},
    "raw file chunks": {"chunk_bytes": 256, "compressed": False, "use_ocdbt": False},
    "small database files": {"target_file_bytes": 1000},
}


def _floats(dtype: Any, place: Callable[[Any], Any] = jnp.asarray) -> Callable[[np.random.Generator], Tree]:
    return lambda rng: {
        "emb": place(rng.standard_normal((24, 16)).astype(dtype)),
        "layers": [{"w": place(rng.standard_normal((8, 8)).astype(dtype))} for _ in range(2)],
        "number": place(rng.standard_normal(()).astype(dtype)),
        "vector": place(rng.standard_normal(7).astype(dtype)),
    }


def _with_weights(make: Callable[[np.random.Generator], dict[str, Any]]) -> Callable[[np.random.Generator], Tree]:
    """Return trees with what `make` returns beside a matrix that differs from one checkpoint to the next."""
    return lambda rng: {"matrix": jnp.asarray(rng.standard_normal((5, 4)), jnp.float32)} | make(rng)


def _params(rng: np.random.Generator) -> Tree:
    return {"dense": {"kernel": jnp.asarray(rng.standard_normal((6, 4)), jnp.float32), "bias": jnp.ones(4)}}


def _train_state(rng: np.random.Generator) -> Tree:
    return TrainState.create(apply_fn=None, params=_params(rng), tx=optax.adamw(1e-3))


class _Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])


def _nnx_state(rng: np.random.Generator) -> Tree:
    return nnx.state(_Net(nnx.Rngs(int(rng.integers(1000)))), nnx.Param, nnx.BatchStat)


def _everything(rng: np.random.Generator) -> Tree:
    return {
        "jax": jnp.asarray(rng.standard_normal((12, 8)), jnp.bfloat16),
        "numpy": rng.standard_normal((4, 3)).astype(np.float32),
        "double": rng.standard_normal(5),
        "number": float(rng.standard_normal()),
        "count": 5,
        "flag": True,
        "zero": jnp.asarray(rng.standard_normal(), jnp.float32),
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "pair": Pair(jnp.asarray(rng.standard_normal(3), jnp.float32), jnp.arange(3)),
        "list": [jnp.asarray(rng.standard_normal(2), jnp.float16), jnp.ones(2, bool)],
        "key": jax.random.key(3),
    }


# Kinds of leaves and trees. Each makes a tree from a generator, which is another one for each checkpoint.
TREES: dict[str, Callable[[np.random.Generator], Tree]] = {
    "float32": _floats(np.float32),
    "bfloat16": _floats(ml_dtypes.bfloat16),
    "float16": _floats(np.float16),
    "float64": _floats(np.float64),
    "float8_e4m3fn": _floats(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": _floats(ml_dtypes.float8_e5m2),
    "numpy float32": _floats(np.float32, np.asarray),
    "numpy float64": _floats(np.float64, np.asarray),
    "numpy bfloat16": _floats(ml_dtypes.bfloat16, np.asarray),
    "not contiguous": _with_weights(
        lambda rng: {
            "fortran": np.asfortranarray(rng.standard_normal((6, 5)).astype(np.float32)),
            "strided": rng.standard_normal((8, 6)).astype(np.float32)[::2, ::3],
            "transposed": jnp.asarray(rng.standard_normal((4, 6)), jnp.float32).T,
        }
    ),
    "equal integers": _with_weights(
        lambda _: (
            {f"x_{name}": jnp.arange(6).astype(name) for name in ("int8", "uint8", "int16", "int32", "uint32")}
            | {"wide": np.arange(6), "unsigned": np.arange(6, dtype=np.uint64), "flags": jnp.arange(6) % 2 == 0}
        )
    ),
    "python numbers": _with_weights(
        lambda rng: {"scale": float(rng.standard_normal()), "steps": 12, "tied": True, "deep": {"x": [1.5, 2]}}
    ),
    "strings": _with_weights(lambda _: {"name": "a model", "deep": {"text": 'x/y ~ "z" é', "empty": ""}}),
    "empty nodes": _with_weights(lambda _: {"none": None, "dict": {}, "list": [], "tuple": (), "deep": {"none": None}}),
    "tuples": _with_weights(
        lambda rng: {"pair": (jnp.asarray(rng.standard_normal(3), jnp.float32), np.ones(2)), "nested": ((1, 2.5), [])}
    ),
    "named tuples": _with_weights(
        lambda rng: {"pair": Pair(jnp.asarray(rng.standard_normal(3), jnp.float32), Pair(1, np.ones(2)))}
    ),
    "optax states": _with_weights(lambda rng: {"inner": optax.adamw(1e-3).init(_params(rng))}),
    "random keys": _with_weights(
        lambda _: {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3)}
    ),
    "zero-dimensional": _with_weights(
        lambda rng: {"a": jnp.asarray(rng.standard_normal(), jnp.bfloat16), "b": np.asarray(rng.standard_normal())}
    ),
    "equal int4": _with_weights(lambda _: {"small": jnp.arange(7).astype(jnp.int4), "two": jnp.ones(5, jnp.int2)}),
    "equal complex": _with_weights(lambda _: {"wave": jnp.ones(5, jnp.complex64), "wide": np.full(3, 1 + 2j)}),
    "equal float8 scales": _with_weights(lambda _: {"powers": jnp.ones(5, jnp.float8_e8m0fnu)}),
    "names with slashes": lambda rng: {
        "a/b": jnp.asarray(rng.standard_normal(3), jnp.float32),
        "a": {"c": jnp.asarray(rng.standard_normal((2, 2)), jnp.float32)},
        "s/t": "text",
    },
    "integer keys": lambda rng: {1: {2: jnp.asarray(rng.standard_normal(3), jnp.float32)}},
    "a list at the top": lambda rng: [jnp.asarray(rng.standard_normal(3), jnp.float32), {"a": 1}],
    "flax TrainState": _train_state,
    "flax nnx State": _nnx_state,
    "everything": _everything,
}
