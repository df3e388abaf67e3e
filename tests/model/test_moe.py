import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import P

from pma_jax.config import ModelConfig
from pma_jax.model import decoder, experts, moe
from pma_jax.model.loss import loss_sums
from pma_jax.runtime.mesh import AXES, put_batch

TINY = ModelConfig(
    vocabulary_size=32,
    width=16,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=4,
    experts=8,
    experts_per_token=3,
    expert_hidden=12,
    shared_experts=1,
)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 11)).astype(np.int32)
WEIGHTS = (1e-3, 0.1, 0.01)  # The losses: z, balance, the router's z.


def mesh_of(data=1, fsdp=1, tensor=1, expert=1):
    shape = (1, data, fsdp, tensor, expert)
    return jax.make_mesh(shape, AXES, devices=jax.devices()[: np.prod(shape)])


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(mesh_of()):
        yield


@functools.cache
def fresh(config, bias=0.1, seed=1):
    """Return parameters with biases that change which experts are selected."""
    rng = np.random.default_rng(seed)

    def values(path, leaf):
        normal = rng.standard_normal(leaf.shape).astype(leaf.dtype)
        if path[-1].key == moe.ROUTER_BIAS:
            return bias * normal
        return 1 + 0.2 * normal if "norm" in path[-1].key else normal / 4

    with jax.set_mesh(mesh_of()):
        shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(values, shapes)


def placed(config, params, mesh):
    abstract = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    return jax.tree.map(lambda a, x: jax.device_put(x, jax.NamedSharding(mesh, a.sharding.spec)), abstract, params)


def loss_sums_and_gradients(config, params, tokens):
    graph = decoder.graph_definition(config)
    objective = lambda p: loss_sums(graph, p, tokens, *WEIGHTS)  # noqa: E731
    return jax.device_get(jax.jit(jax.value_and_grad(objective, has_aux=True))(params))


@functools.cache
def on_one_device(config, bias=0.1):
    with jax.set_mesh(mesh_of()):
        return loss_sums_and_gradients(config, fresh(config, bias), TOKENS)


def assert_close(actual, expected, rtol=1e-4, atol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected)


ROUTERS = [
    {},
    {"router_scores": "sigmoid"},
    {"router_normalized": False, "shared_experts": 0, "scan_layers": False, "layers": 2},
    {"router_scores": "sigmoid", "layers": 2},
    {"router_scores": "sigmoid", "router_normalized": False, "router_bias": False},
    {"experts_per_token": 1},
    {"experts_per_token": 8},
]


QUICK = (0, 4)


@pytest.mark.parametrize(
    "changes",
    [x if i in QUICK else pytest.param(x, marks=pytest.mark.slow) for i, x in enumerate(ROUTERS)],
    ids=str,
)
def test_mixture_equals_a_loop_over_experts_in_float64(changes):
    config = dataclasses.replace(TINY, **changes)
    apply = jax.jit(decoder.apply, static_argnums=0)
    logits = apply(decoder.graph_definition(config), fresh(config), TOKENS)
    expected = reference.logits(config, fresh(config), TOKENS)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


# --- Gradients, against every expert computed for every token ---------------------------------------------------------


def every_expert(config, p, x_BxLxD):
    """Return the mixture and its auxiliary losses in plain jnp, without sorting or gathers."""
    logits = jnp.einsum("bld,de->ble", x_BxLxD, p["router_DxE"])
    sigmoid = config.router_scores == "sigmoid"
    scores = 1 / (1 + jnp.exp(-logits)) if sigmoid else jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    ranked = scores + p.get(moe.ROUTER_BIAS, 0)
    kth = jnp.sort(ranked, axis=-1)[..., -config.experts_per_token]
    chosen = (ranked >= kth[..., None]).astype(jnp.float32)
    weights = scores * chosen
    if config.router_normalized:
        weights = weights / weights.sum(-1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("bld,edf->blef", x_BxLxD, p["expert_gate_ExDxF"]))
    hidden = hidden * jnp.einsum("bld,edf->blef", x_BxLxD, p["expert_up_ExDxF"])
    y = jnp.einsum("ble,blef,efd->bld", weights, hidden, p["expert_down_ExFxD"])
    fraction = chosen.mean(1) / config.experts_per_token * config.experts
    share = (scores / scores.sum(-1, keepdims=True)).mean(1)
    balance = x_BxLxD.shape[1] * jnp.sum(jax.lax.stop_gradient(fraction) * share)
    z = jnp.sum(jnp.log(jnp.exp(logits).sum(-1)) ** 2)
    return y, {"balance": balance, "z": z, "load_E": chosen.sum((0, 1))}


@pytest.mark.parametrize(
    "changes", [ROUTERS[4], *(pytest.param(ROUTERS[i], marks=pytest.mark.slow) for i in (0, 1, 2))], ids=str
)
def test_gradients_and_losses_equal_those_of_computing_every_expert(changes):
    config = dataclasses.replace(TINY, **changes)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), fresh(config)["blocks"]["moe"])
    rng = np.random.default_rng(2)
    x, g = (rng.standard_normal((4, 9, 16)).astype(np.float32) for _ in range(2))
    graph, _ = nnx_parts(config)

    def objective(module, params, x):
        y, sums = module(params, x)
        return jnp.sum(y * g) + 0.3 * sums["balance"] + 0.2 * sums["z"], sums["load_E"]

    ours = functools.partial(objective, lambda p, x: graph(p, x))
    theirs = functools.partial(objective, functools.partial(every_expert, config))
    (value, load), gradients = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(params, x)
    # Not jitted: XLA on CPU (jax 0.10.2) miscompiles this formula's softmax next to its sort.
    (expected, expected_load), expected_gradients = jax.value_and_grad(theirs, (0, 1), has_aux=True)(params, x)
    assert float(value) == pytest.approx(float(expected), rel=1e-4)
    np.testing.assert_array_equal(load, expected_load)
    if config.router_bias:
        assert not np.any(gradients[0][moe.ROUTER_BIAS]), "no gradient reaches the bias"
    assert_close(gradients, expected_gradients)


def nnx_parts(config):
    """Return the mixture as a function of its parameters and input."""
    from flax import nnx

    module = nnx.eval_shape(lambda: moe.MixtureOfExperts(config, nnx.Rngs(params=jax.random.key(0))))
    graph, state = nnx.split(module)
    return lambda params, x: nnx.merge(graph, nnx.State(params))(x), state


# --- Meshes -----------------------------------------------------------------------------------------------------------

EVEN, SKEWED = 0.1, 5.0  # The scale of the biases.
SHAPES = [
    ((8, 1, 1, 1), EVEN),
    ((1, 1, 1, 8), EVEN),
    ((1, 1, 1, 8), SKEWED),
    ((2, 1, 1, 4), SKEWED),
    ((1, 2, 2, 2), EVEN),
    ((1, 2, 2, 2), SKEWED),
    ((1, 4, 2, 1), EVEN),
]


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize(("shape", "bias"), SHAPES, ids=str)
def test_mesh_does_not_change_the_result(shape, bias):
    """Skew the router: all tokens choose the same few experts, so the exchange needs more than one round."""
    config = dataclasses.replace(TINY, remat="full" if shape[3] == 4 else "none")
    (expected, expected_sums), expected_gradients = on_one_device(TINY, bias)  # Without remat.
    mesh = mesh_of(*shape)
    with jax.set_mesh(mesh):
        params = placed(config, fresh(TINY, bias), mesh)
        (value, sums), gradients = loss_sums_and_gradients(config, params, put_batch(mesh, TOKENS))
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_array_equal(sums["load_TxE"], expected_sums["load_TxE"])
    assert_close(gradients, expected_gradients)
    metrics = moe.load_metrics(jnp.asarray(sums["load_TxE"]), 8 * 10, 3)
    assert metrics["dropped"] == 0
    if bias > 1:
        assert metrics["load_max_violation"] > 1 and metrics["load_min_violation"] == -1


@pytest.mark.slow
@pytest.mark.mesh
def test_many_small_rounds_do_not_change_the_result(monkeypatch):
    monkeypatch.setattr(experts, "CAPACITY_FACTOR_PER_ROUND", 0.2)
    (expected, expected_sums), expected_gradients = on_one_device(TINY, SKEWED)
    mesh = mesh_of(expert=4)
    with jax.set_mesh(mesh):
        params = placed(TINY, fresh(TINY, SKEWED), mesh)
        (value, sums), gradients = loss_sums_and_gradients(TINY, params, put_batch(mesh, TOKENS))
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_array_equal(sums["load_TxE"], expected_sums["load_TxE"])
    assert_close(gradients, expected_gradients)


@pytest.mark.mesh
def test_tokens_move_by_all_to_all_and_experts_stay():
    mesh = mesh_of(2, 1, 1, 4)
    config = dataclasses.replace(TINY, scan_layers=False)
    with jax.set_mesh(mesh):
        params = placed(config, fresh(config), mesh)
        assert params["blocks"]["moe"]["expert_up_ExDxF"].sharding.spec == P(None, "expert", "fsdp", "tensor")
        assert params["blocks"]["moe"]["expert_up_ExDxF"].addressable_shards[0].data.shape == (1, 2, 16, 12)
        graph = decoder.graph_definition(config)
        run = jax.jit(decoder.apply, static_argnums=0)
        text = run.lower(graph, params, put_batch(mesh, TOKENS)).compile().as_text()
    assert "all-to-all" in text
    assert "f32[1,8,16,12]" not in text and "f32[8,16,12]" not in text, "no device gathers all experts"


# --- Invariants -------------------------------------------------------------------------------------------------------


@pytest.mark.mesh
@pytest.mark.parametrize("shape", [pytest.param((1, 1, 1, 1), marks=pytest.mark.slow), (1, 1, 1, 4)], ids=str)
def test_order_of_experts_does_not_change_the_result(shape):
    order = np.random.default_rng(3).permutation(8)
    params = fresh(TINY)
    renamed = {
        "router_DxE": lambda leaf: leaf[..., order],
        "router_bias_E": lambda leaf: leaf[..., order],
        "expert_gate_ExDxF": lambda leaf: leaf[:, order],
        "expert_up_ExDxF": lambda leaf: leaf[:, order],
        "expert_down_ExFxD": lambda leaf: leaf[:, order],
    }
    mixed = {name: renamed[name](leaf) for name, leaf in params["blocks"]["moe"].items()}
    permuted = params | {"blocks": params["blocks"] | {"moe": mixed}}
    apply = jax.jit(decoder.apply, static_argnums=0)
    mesh = mesh_of(*shape)
    with jax.set_mesh(mesh):
        graph = decoder.graph_definition(TINY)
        before, after = (apply(graph, placed(TINY, p, mesh), put_batch(mesh, TOKENS)) for p in (params, permuted))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


def test_bias_selects_experts_without_weighting_them():
    config = dataclasses.replace(TINY, experts_per_token=8, router_scores="sigmoid")
    apply = jax.jit(decoder.apply, static_argnums=0)
    graph = decoder.graph_definition(config)
    # With all experts selected the bias must have no effect at all.
    np.testing.assert_allclose(
        apply(graph, fresh(config, 0.0), TOKENS), apply(graph, fresh(config, 5.0), TOKENS), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("scores", [pytest.param("softmax", marks=pytest.mark.slow), "sigmoid"])
def test_bias_balances_a_skewed_router(scores):
    config = dataclasses.replace(TINY, router_scores=scores)
    rng = np.random.default_rng(4)
    # Some experts are favoured for every token, as in a router without balancing.
    logits = (rng.standard_normal((4096, 8)) + np.linspace(-1, 1, 8)).astype(np.float32)

    @jax.jit
    def step(bias):
        _, _, chosen = moe.route(config, logits, bias)
        load = jnp.bincount(chosen.reshape(-1), length=8)
        return moe.update_router_bias(bias[None], load[None], 2e-3)[0], load

    bias = jnp.zeros(8)
    _, first = step(bias)
    for _ in range(400):
        bias, load = step(bias)
    violation = lambda load: float(moe.load_metrics(load[None], 4096, 3)["load_max_violation"])  # noqa: E731
    assert violation(first) > 0.5
    assert violation(load) < 0.05
    assert float(moe.load_metrics(load[None], 4096, 3)["load_min_violation"]) > -0.05


@pytest.mark.mesh
def test_balance_loss_is_least_when_even_and_greatest_when_all_tokens_agree():
    even = jnp.full((2, 8, 4), 0.25)
    cycling = jnp.stack([jnp.arange(8) % 4, (jnp.arange(8) + 1) % 4], axis=-1)[None].repeat(2, 0)
    assert float(moe._balance_loss(even, cycling)) == pytest.approx(2 * 8)
    peaked = jnp.zeros((2, 8, 4)).at[..., 0].set(1.0)
    assert float(moe._balance_loss(peaked, jnp.zeros((2, 8, 1), jnp.int32))) == pytest.approx(2 * 8 * 4)


@pytest.mark.slow
def test_bfloat16_keeps_float32_gradients_and_nearly_the_loss():
    config = dataclasses.replace(TINY, compute_dtype="bfloat16")
    (value, _), gradients = loss_sums_and_gradients(config, fresh(TINY), TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype(np.float32)}
    assert float(value) == pytest.approx(float(on_one_device(TINY)[0][0]), rel=2e-2)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"experts": 6}, (1, 1, 1, 4), r"model.experts is 6, and expert splits it in 4"),
        ({"expert_hidden": 13}, (1, 1, 2, 1), r"model.expert_hidden is 13, and tensor splits it in 2"),
    ],
)
def test_size_that_does_not_divide_is_one_error(changes, shape, message):
    config = dataclasses.replace(TINY, **changes)
    with jax.set_mesh(mesh_of(*shape)), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
