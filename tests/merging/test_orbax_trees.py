"""Merge Orbax trees with leaves of every type; Orbax restores the result as it restores an input."""

import collections
import json
import logging
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1 import training

from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.merging.verify import verify
from pma_jax.storage.formats.open import open_source

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
ROW = np.array([0.25, 0.75])
Pair = collections.namedtuple("Pair", "first second")


def tree(seed):
    """Return a tree with a leaf of every type that Orbax saves; only floating-point leaves depend on `seed`."""
    rng = np.random.default_rng(seed)
    return {
        "jax": jnp.asarray(rng.standard_normal((6, 4)), jnp.bfloat16),
        "numpy": rng.standard_normal((2, 3)).astype(np.float32),
        "double": rng.standard_normal(3),
        "fp8": np.asarray(rng.standard_normal(4), ml_dtypes.float8_e5m2),
        "scalar": jnp.asarray(rng.standard_normal(), jnp.float32),
        "number": float(rng.standard_normal()),
        "count": 5,
        "flag": True,
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "pair": Pair(jnp.asarray(rng.standard_normal(3), jnp.float32), (jnp.arange(3), np.ones(2, bool))),
        "optax": optax.adamw(1e-3).init({"w": jnp.ones(2)}),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "int4": jnp.arange(5).astype(jnp.int4),
        "complex": np.full(2, 1 + 2j),
        "a/b": jnp.asarray(rng.standard_normal(2), jnp.float16),
    }


def save_v1(path, value):
    ocp.save(path, value | {"text": "a model", "deep": {"text": 'x/y ~ "z" é'}})
    return path


def save_raw_files(path, value):
    context = ocp.Context()
    context.array.saving.use_ocdbt, context.array.saving.use_compression = False, False
    with context:
        return save_v1(path, value)


def save_items(path, value):
    ocp.save_checkpointables(path, {"params": value, "opt": {"mu": jnp.ones(3)}})
    return path


def save_training(path, value):
    with training.Checkpointer(path) as checkpointer:
        checkpointer.save(7, value)
    return path / "7"


def save_v0(path, value):
    v0.PyTreeCheckpointer().save(path, value | {"text": "a model"})
    return path


def save_standard(path, value):
    with v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, value)
    return path


def save_manager(path, value):
    with v0.CheckpointManager(path) as manager:
        items = v0.args.Composite(params=v0.args.StandardSave(value), data=v0.args.JsonSave({"position": 3}))
        manager.save(7, args=items, metrics={"loss": 1.0})
    return path / "7"


def restore_manager(path, abstract=None):
    (path.parent / "steps").mkdir(exist_ok=True)
    link = path.parent / "steps" / str(len(list((path.parent / "steps").iterdir())))
    link.symlink_to(path)
    with v0.CheckpointManager(path.parent / "steps") as manager:
        args = v0.args.Composite(params=v0.args.StandardRestore(abstract))
        return manager.restore(int(link.name), args=args)["params"]


def restore_standard(path, abstract=None):
    return v0.StandardCheckpointer().restore(path, abstract)


# Name -> (save, restore without the structure, restore into a tree).
WRITERS = {
    "v1": (save_v1, ocp.load, None),
    "v1 raw files": (save_raw_files, ocp.load, None),
    "v1 items": (save_items, lambda path: ocp.load_checkpointables(path)["params"], None),
    "v1 training": (save_training, ocp.load, ocp.load),
    "v0 pytree": (save_v0, lambda path: v0.PyTreeCheckpointer().restore(path), None),
    "v0 standard": (save_standard, restore_standard, restore_standard),
    "manager": (save_manager, restore_manager, restore_manager),
}


def is_key(leaf):
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check_restored(got, inputs):
    """Compare a restored merge with the inputs that were restored in the same way."""
    assert jax.tree.structure(got, is_leaf=is_key) == jax.tree.structure(inputs[0], is_leaf=is_key)
    for value, *values in zip(*(jax.tree.leaves(one, is_leaf=is_key) for one in (got, *inputs)), strict=True):
        assert type(value) is type(values[0])
        if isinstance(value, str):
            assert value == values[0]
            continue
        if is_key(value):
            assert value.dtype == values[0].dtype
            value, *values = (jax.random.key_data(key) for key in (value, *values))
        value, *values = (np.asarray(one) for one in (value, *values))
        assert value.dtype == values[0].dtype and value.shape == values[0].shape
        if jnp.issubdtype(value.dtype, jnp.floating):
            exact = sum(c * one.astype(np.float64) for c, one in zip(ROW, values, strict=True))
            eps = float(ml_dtypes.finfo(value.dtype).eps)
            np.testing.assert_allclose(value.astype(np.float64), exact, rtol=eps, atol=eps)
        else:
            np.testing.assert_array_equal(value, values[0])


@pytest.mark.parametrize("kind", WRITERS)
def test_orbax_restores_a_merge_like_its_inputs(tmp_path, kind, caplog):
    save, restore, restore_into = WRITERS[kind]
    trees = [tree(seed) for seed in range(2)]
    paths = [save(tmp_path / f"{k}000", value) for k, value in enumerate(trees)]
    merge(plan([open_source(path) for path in paths], ROW), [tmp_path / "out"])
    assert verify(tmp_path / "out", with_sources=True) == []
    inputs = [restore(path) for path in paths]
    caplog.clear()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_restored(restore(tmp_path / "out"), inputs)
        if restore_into is not None:
            got = restore_into(tmp_path / "out", trees[0])
            check_restored(got, [restore_into(path, trees[0]) for path in paths])
            assert isinstance(got["pair"], Pair) and isinstance(got["optax"][0], optax.ScaleByAdamState)
    said = caplog.text + "".join(str(warning.message) for warning in caught)
    assert "malformed" not in said and "not found" not in said
    assert ocp.is_orbax_checkpoint(tmp_path / "out")


def test_another_dtype_leaves_python_numbers_and_types_alone(tmp_path):
    for k in range(2):
        save_v1(tmp_path / str(k), tree(k))
    sources = [open_source(tmp_path / str(k)) for k in range(2)]
    merge(plan(sources, ROW, dtype="float32"), [tmp_path / "out"])
    got = ocp.load(tmp_path / "out")
    assert got["jax"].dtype == got["numpy"].dtype == got["double"].dtype == np.float32
    assert isinstance(got["jax"], jax.Array) and isinstance(got["numpy"], np.ndarray)
    numbers = [tree(k)["number"] for k in range(2)]
    assert type(got["number"]) is float and got["number"] == pytest.approx(ROW @ numbers, rel=1e-15)
    assert got["count"] == 5 and got["flag"] is True and got["text"] == "a model"


@pytest.mark.mesh
def test_a_merge_is_restored_onto_another_mesh(tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P("x", "y")))  # noqa: E731
    values = [np.random.default_rng(k).standard_normal((8, 8)).astype(np.float32) for k in range(2)]
    for k, value in enumerate(values):
        ocp.save(tmp_path / str(k), {"w": place(value), "n": value, "s": 1.5})
    merge(plan([open_source(tmp_path / str(k)) for k in range(2)], ROW), [tmp_path / "out"])
    got = ocp.load(tmp_path / "out")
    assert got["w"].sharding == place(values[0]).sharding and isinstance(got["n"], np.ndarray)
    sharding = jax.NamedSharding(jax.make_mesh((2, 4), ("a", "b")), jax.P("b", "a"))
    target = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding), "n": values[0], "s": 1.5}
    got = ocp.load(tmp_path / "out", target)
    assert got["w"].sharding == sharding
    np.testing.assert_allclose(got["w"], ROW[0] * values[0] + ROW[1] * values[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda k: f"run {k}", "the text 'run 1', not the text 'run 0'"),
        (lambda k: [None, {}][k], "an empty Dict, not an empty None"),
        (lambda k: [None, "x"][k], "the text 'x', not an empty None"),
        (lambda k: jax.random.key(0, impl=["rbg", "unsafe_rbg"][k]), "a random key of unsafe_rbg, not"),
        (lambda k: [jnp.zeros(2, np.uint32), jax.random.key(0)][k], "not an array or absent"),
        (lambda k: [jnp.ones(2), None][k], "other is missing in"),
    ],
)
def test_leaves_that_cannot_be_averaged_must_agree(tmp_path, make, message):
    for k in range(2):
        ocp.save(tmp_path / str(k), {"w": jnp.ones(2), "other": make(k)})
    with pytest.raises(ValueError, match=message):
        plan([open_source(tmp_path / str(k)) for k in range(2)], ROW)


def test_safetensors_output_tells_what_it_leaves_out(tmp_path):
    ocp.save(tmp_path / "0", {"w": jnp.ones(2), "text": "a model", "none": None, "key": jax.random.key(0)})
    made = plan([open_source(tmp_path / "0")], [1.0], format="safetensors")
    assert [note for note in made.notes if "none (None), text (string)" in note]
    assert [note for note in made.notes if "key" in note and "random" in note]


def test_a_type_of_another_program_and_a_single_array_are_refused(tmp_path):
    ocp.save(tmp_path / "0", {"w": jnp.ones(2), "other": 1})
    file = tmp_path / "0" / "state" / "_METADATA"
    metadata = json.loads(file.read_text())
    metadata["tree_metadata"]["('other',)"]["value_metadata"]["value_type"] = "my.Leaf"
    file.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=r"'other' has the type 'my.Leaf', which only the program"):
        open_source(tmp_path / "0")
    ocp.save(tmp_path / "1", jnp.ones(3))
    with pytest.raises(ValueError, match="single array without a name"):
        open_source(tmp_path / "1")


def test_parameters_beside_others_are_a_subtree_only_in_a_training_state(tmp_path):
    """Leave nothing out of a tree that only looks as if its parameters were in one of its keys."""
    ocp.save(tmp_path / "0", {"weights": jnp.ones(2), "bias": jnp.ones(3)})
    assert sorted(open_source(tmp_path / "0").leaves) == ["bias", "weights"]
    ocp.save(tmp_path / "1", {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(3)}})
    assert sorted(open_source(tmp_path / "1").leaves) == ["batch_stats.mean", "params.w"]
    ocp.save(tmp_path / "2", {"params": {"w": jnp.ones(2), "none": None}, "opt_state": {"mu": jnp.ones(3)}})
    merge(plan([open_source(tmp_path / "2")], [1.0]), [tmp_path / "out"])
    got = ocp.load(tmp_path / "out")
    assert got.keys() == {"params"} and got["params"]["none"] is None
