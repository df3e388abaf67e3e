import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import P

from pma_jax.config import ModelConfig
from pma_jax.model import decoder
from pma_jax.model.layers import rms_norm
from pma_jax.model.loss import loss_sums
from pma_jax.runtime import mesh as meshes
from pma_jax.runtime.mesh import put_batch

TINY = ModelConfig(vocabulary_size=32, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, hidden=24)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 11)).astype(np.int32)


# What OLMo 2 and SmolLM3 have and Llama lacks.
AFTER = {"norm_position": "after", "qk_norm": True, "qk_norm_over": "projection"}
JOINT_SCALES = {"query_norm_NxH": TINY.heads, "key_norm_KxH": TINY.kv_heads}
OTHER_BLOCKS = [
    AFTER,
    AFTER | {"kv_heads": 4, "scan_layers": False, "remat": "full", "no_rope_interval": 1},
    {"layers": 5, "no_rope_interval": 2, "tie_embeddings": True},
    {"no_rope_interval": 2, "scan_layers": False, "qk_norm": True, "separator_token": 7},
]


def mesh_of(data=1, fsdp=1, tensor=1, expert=1):
    devices = jax.devices()[: data * fsdp * tensor * expert]
    return jax.make_mesh((1, data, fsdp, tensor, expert), meshes.AXES, devices=devices)


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(mesh_of()):
        yield


@functools.cache
def fresh(config):
    """Return parameters whose norm scales are not all ones, so that an unused scale shows."""
    rng = np.random.default_rng(1)

    def values(path, leaf):
        normal = rng.standard_normal(leaf.shape).astype(leaf.dtype)
        return 1 + 0.2 * normal if "norm" in path[-1].key else normal / 4

    with jax.set_mesh(mesh_of()):
        shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(values, shapes)


_apply = jax.jit(decoder.apply, static_argnums=0)


def logits(config, params, tokens):
    return np.asarray(_apply(decoder.graph_definition(config), params, tokens))


def loss_and_gradients(config, params, tokens):
    graph = decoder.graph_definition(config)
    objective = lambda p: loss_sums(graph, p, tokens, z_loss_weight=1e-3)[0]  # noqa: E731
    return jax.device_get(jax.jit(jax.value_and_grad(objective))(params))


@functools.cache
def on_one_device(config):
    return loss_and_gradients(config, fresh(config), TOKENS)


def assert_close(actual, expected, rtol=1e-4, atol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 4, "tie_embeddings": True},
        {"kv_heads": 1, "qk_norm": True, "rope_theta": 100.0},
        {"attention_window_tokens": 3, "separator_token": 7},
        *OTHER_BLOCKS,
    ],
    ids=str,
)
def test_logits_equal_float64(changes):
    config = dataclasses.replace(TINY, **changes)
    params = fresh(config)
    expected = reference.logits(config, params, TOKENS)
    np.testing.assert_allclose(logits(config, params, TOKENS), expected, atol=1e-5 * np.abs(expected).max())
    assert np.std(expected) > 0.1


@pytest.mark.parametrize(
    "changes", [OTHER_BLOCKS[0], *(pytest.param(case, marks=pytest.mark.slow) for case in OTHER_BLOCKS[1:])], ids=str
)
def test_gradients_equal_central_differences_in_float64(changes):
    """Move one leaf at a time in a random direction, and compare the change of the loss with the gradient."""
    config = dataclasses.replace(TINY, **changes)
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), fresh(config))

    def loss(params):
        z = reference.logits(config, params, TOKENS)[:, :-1]
        z = z - z.max(axis=-1, keepdims=True)
        nats = np.log(np.exp(z).sum(axis=-1)) - np.take_along_axis(z, TOKENS[:, 1:, None], axis=-1)[..., 0]
        return nats.sum()

    graph = decoder.graph_definition(config)
    gradients = jax.device_get(jax.jit(jax.grad(lambda p: loss_sums(graph, p, TOKENS)[0]))(fresh(config)))
    rng = np.random.default_rng(3)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        direction = rng.standard_normal(gradient.shape)

        def moved(step, path=path, direction=direction):
            return jax.tree_util.tree_map_with_path(
                lambda at, leaf: leaf + step * direction if at == path else leaf, params
            )

        slope = (loss(moved(1e-5)) - loss(moved(-1e-5))) / 2e-5
        scale = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert np.isfinite(gradient).all() and scale > 0
        assert abs(np.sum(gradient * direction) - slope) < 1e-4 * scale, path


def test_a_norm_over_the_projection_is_not_one_over_each_head():
    heads = dataclasses.replace(TINY, qk_norm=True)
    ones = {name: np.ones((TINY.layers, TINY.head_dim), np.float32) for name in ("query_norm_H", "key_norm_H")}
    params = fresh(heads) | {"blocks": fresh(heads)["blocks"] | ones}
    blocks = {name: leaf for name, leaf in params["blocks"].items() if name not in ones}
    blocks |= {name: np.ones((TINY.layers, n, TINY.head_dim), np.float32) for name, n in JOINT_SCALES.items()}
    joint = dataclasses.replace(heads, qk_norm_over="projection")
    difference = logits(joint, params | {"blocks": blocks}, TOKENS) - logits(heads, params, TOKENS)
    assert np.abs(difference).max() > 1e-3


@pytest.mark.parametrize("over", ["head", "projection"])
def test_leaves_are_float32_and_named_by_their_shapes(over):
    config = dataclasses.replace(TINY, qk_norm=True, qk_norm_over=over, compute_dtype="bfloat16")
    leaves = jax.tree_util.tree_leaves_with_path(fresh(config))
    sizes = {"V": 32, "D": 16, "N": 4, "K": 2, "H": 4, "F": 24}
    for path, leaf in leaves:
        dims = path[-1].key.rsplit("_", 1)[1].split("x")
        stacked = (2,) if path[0].key == "blocks" else ()
        assert leaf.dtype == np.float32
        assert leaf.shape == (*stacked, *(sizes[dim] for dim in dims)), path
    assert decoder.parameter_count(fresh(config)) == sum(leaf.size for _, leaf in leaves)


def test_tied_embeddings_drop_one_matrix():
    tied = fresh(dataclasses.replace(TINY, tie_embeddings=True))
    assert decoder.parameter_count(fresh(TINY)) - decoder.parameter_count(tied) == 32 * 16
    assert "unembedding_DxV" not in tied


@pytest.mark.parametrize("position", [1, 5, 10])
@pytest.mark.parametrize("scan", [True, False])
def test_token_does_not_affect_earlier_logits(position, scan):
    config = dataclasses.replace(TINY, scan_layers=scan)
    changed = TOKENS.copy()
    changed[:, position] = (changed[:, position] + 1) % 32
    before, after = logits(config, fresh(config), TOKENS), logits(config, fresh(config), changed)
    np.testing.assert_allclose(after[:, :position], before[:, :position], atol=1e-5)
    assert (np.abs(after - before)[:, position:].max(axis=(0, 2)) > 1e-4).all()


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packed_documents_are_isolated(scan):
    config = dataclasses.replace(TINY, separator_token=7, scan_layers=scan)
    first, second = TOKENS[:, :5].copy(), TOKENS[:, 5:].copy()
    first[first == 7], second[second == 7] = 8, 8
    first[:, -1] = 7
    packed = logits(config, fresh(config), np.concatenate([first, second], axis=1))
    # Rotary positions are relative, so a document that starts later has the same logits.
    for alone, part in ((first, packed[:, :5]), (second, packed[:, 5:])):
        np.testing.assert_allclose(part, logits(config, fresh(config), alone), atol=1e-5)
    together = logits(TINY, fresh(TINY), np.concatenate([first, second], axis=1))
    assert np.abs(together - packed)[:, 5:].max() > 1e-3


def test_rows_of_a_batch_are_independent():
    complete, alone = logits(TINY, fresh(TINY), TOKENS), logits(TINY, fresh(TINY), TOKENS[2:3])
    np.testing.assert_allclose(complete[2:3], alone, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"remat": "full"}, {"remat": "dots", "scan_layers": False}], ids=str)
def test_remat_and_unrolling_do_not_change_the_result(changes):
    expected = on_one_device(TINY)
    assert_close(loss_and_gradients(dataclasses.replace(TINY, **changes), fresh(TINY), TOKENS), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "again"),
    [({}, 6), ({"experts": 4, "expert_hidden": 8}, 6)],
    ids=["dense", "experts"],
)
def test_dots_recomputes_no_product_and_full_recomputes_every_one_that_a_gradient_needs(changes, again):
    """Count query, key, value, output, gate and up.

    Experts have one product for gate and up, and the gradient of the router's weights needs their down.
    """

    def products(remat):
        config = dataclasses.replace(TINY, remat=remat, **changes)
        graph = decoder.graph_definition(config)
        params = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))

        def gradient(params, tokens):
            make = functools.partial(decoder.make_decoder, graph)
            return jax.grad(lambda params: jnp.sum(make(params).hidden_states(tokens)[0]))(params)

        # Lowered for a GPU, where the experts' products are not loops; one trace of the scanned layer.
        exported = jax.export.export(jax.jit(gradient), platforms=["cuda"])(params, np.zeros((2, 4), np.int32))
        return exported.mlir_module().count("stablehlo.dot_general")

    none, dots, full = (products(remat) for remat in ("none", "dots", "full"))
    assert full - dots == again
    assert 0 < dots - none <= 5, "attention's own two products of two blocks, and the router's small one"


@pytest.mark.parametrize("tie_embeddings", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_initial_model_predicts_nearly_uniformly(tie_embeddings):
    config = ModelConfig(width=64, layers=1, heads=2, kv_heads=2, hidden=96, tie_embeddings=tie_embeddings)
    params = jax.jit(lambda key: decoder.init_params(config, key))(jax.random.key(1))
    tokens = np.random.default_rng(1).integers(0, 256, (4, 33)).astype(np.int32)
    _, sums = jax.jit(loss_sums, static_argnums=0)(decoder.graph_definition(config), params, tokens)
    # Logits of unit variance cost half a nat over log V, the loss of the uniform distribution.
    assert float(sums["nats"] / sums["count"]) == pytest.approx(math.log(256) + 0.5, abs=0.3)


@pytest.mark.slow
def test_bfloat16_compute_keeps_float32_gradients_and_nearly_the_loss():
    config = dataclasses.replace(TINY, compute_dtype="bfloat16")
    loss, gradients = loss_and_gradients(config, fresh(TINY), TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype(np.float32)}
    assert logits(config, fresh(TINY), TOKENS).dtype == np.float32
    assert loss == pytest.approx(on_one_device(TINY)[0], rel=1e-2)


SHAPES = [(2, 2, 2), *(pytest.param(s, marks=pytest.mark.slow) for s in [(8, 1, 1), (1, 8, 1), (4, 1, 2), (1, 1, 2)])]


@pytest.mark.mesh
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="norms before"),
        pytest.param(AFTER | {"no_rope_interval": 2}, marks=pytest.mark.slow, id="norms after"),
    ],
)
def test_mesh_does_not_change_the_result(shape, changes):
    config = dataclasses.replace(
        TINY, **{"scan_layers": shape != (4, 1, 2), "qk_norm": True, "remat": "dots"} | changes
    )
    expected = on_one_device(config)
    mesh = mesh_of(*shape)
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
        params = jax.tree.map(
            lambda a, x: jax.device_put(x, jax.NamedSharding(mesh, a.sharding.spec)), abstract, fresh(config)
        )
        assert_close(loss_and_gradients(config, params, put_batch(mesh, TOKENS)), expected)


@pytest.mark.mesh
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)], ids=str)
def test_mesh_does_not_change_the_initial_parameters(shape):
    with jax.set_mesh(mesh_of(*shape)):
        split = jax.jit(lambda key: decoder.init_params(TINY, key))(jax.random.key(4))
    with jax.set_mesh(mesh_of()):
        complete = jax.jit(lambda key: decoder.init_params(TINY, key))(jax.random.key(4))
    assert_close(jax.device_get(split), jax.device_get(complete), rtol=1e-6, atol=1e-7)


@pytest.mark.mesh
def test_parameters_carry_their_sharding():
    config = dataclasses.replace(TINY, kv_heads=4)
    with jax.set_mesh(mesh_of(2, 2, 2)):
        params = jax.jit(lambda key: decoder.init_params(config, key))(jax.random.key(0))
    blocks = params["blocks"]
    assert blocks["query_DxNxH"].sharding.spec == P(None, "fsdp", "tensor", None)
    assert blocks["down_FxD"].sharding.spec == P(None, "tensor", "fsdp")
    assert params["embedding_VxD"].sharding.spec == P("tensor", "fsdp")
    # Half along fsdp, half along tensor: a quarter per device, replicated twice along data.
    assert blocks["gate_DxF"].addressable_shards[0].data.size * 4 == blocks["gate_DxF"].size


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"kv_heads": 1}, (1, 1, 2), r"model.kv_heads is 1, and tensor splits it in 2"),
        ({"width": 20}, (1, 8, 1), r"model.width is 20, and fsdp splits it in 8"),
        ({"hidden": 30}, (2, 1, 4), r"model.hidden is 30, and tensor splits it in 4"),
        ({"vocabulary_size": 33}, (1, 1, 2), r"model.vocabulary_size is 33, and tensor splits it in 2"),
    ],
)
def test_dim_that_does_not_divide_is_one_error(changes, shape, message):
    config = dataclasses.replace(TINY, **{"kv_heads": 4} | changes)
    with jax.set_mesh(mesh_of(*shape)), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))


def test_colliding_axes_are_one_error(monkeypatch):
    monkeypatch.setattr(decoder, "RULES", dataclasses.replace(meshes.RULES, hidden="fsdp"))
    with pytest.raises(ValueError, match="both split by mesh axis 'fsdp'"):
        jax.eval_shape(lambda: decoder.init_params(TINY, jax.random.key(0)))


def test_rms_norm_computes_in_float32():
    x = jnp.full((1, 4), 300.0, jnp.bfloat16)
    y = rms_norm(x, jnp.ones(4), 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float32), 1.0)
