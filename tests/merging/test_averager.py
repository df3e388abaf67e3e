"""The averager against float64 NumPy on several meshes, and properties of its compiled programs. All runs under jit."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pma_jax.merging import averager, recipes

SPECS = {
    "embed": jax.P("fsdp", "tensor"),
    "up": jax.P(None, "fsdp", "tensor"),
    "scale": jax.P(),
    "both": jax.P(("fsdp", "tensor")),
}
SHAPES = {"embed": (16, 8), "up": (3, 8, 16), "scale": (5,), "both": (64,)}
COLLECTIVES = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)\b"
)


def make_mesh(shape):
    return jax.make_mesh(shape, ("fsdp", "tensor"), devices=jax.devices()[: int(np.prod(shape))])


def make_checkpoints(count, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [{k: rng.normal(size=s).astype(jnp.dtype(dtype)) for k, s in SHAPES.items()} for _ in range(count)]


def on_mesh(params, mesh):
    return {k: jax.device_put(x, jax.NamedSharding(mesh, SPECS[k])) for k, x in params.items()}


def expected(params_K, weights):
    return {k: np.tensordot(weights, np.stack([np.float64(p[k]) for p in params_K]), 1) for k in params_K[0]}


def with_dtype(params, dtype):
    return {k: jnp.asarray(x).astype(dtype) for k, x in params.items()}


def assert_placed(tree, like):
    for key, x in like.items():
        assert tree[key].sharding.is_equivalent_to(x.sharding, x.ndim), key


def assert_close(tree, reference, rtol=1e-6):
    for key, want in reference.items():
        np.testing.assert_allclose(np.float64(tree[key]), want, rtol=rtol, atol=rtol, err_msg=key)


def abstract_on(mesh, dtype):
    return {k: jax.ShapeDtypeStruct(s, dtype, sharding=jax.NamedSharding(mesh, SPECS[k])) for k, s in SHAPES.items()}


@pytest.mark.mesh
@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 1), (1, 8)])
@pytest.mark.parametrize("recipe", ["sma", "ema:alpha=0.2", "wma", "lagfree"])
def test_both_forms_equal_float64_on_any_mesh(shape, recipe):
    mesh = make_mesh(shape)
    plain = make_checkpoints(5)
    c = recipes.coefficients(recipe, [1, 2, 3, 5, 8])
    with jax.set_mesh(mesh):
        params_K = [on_mesh(p, mesh) for p in plain]
        fused = averager.weighted_sum(params_K, c)
        total = None
        for params, weight in zip(params_K, c, strict=True):
            total = averager.add_weighted(total, [params], np.float32([weight]))
    for result in (fused, total):
        assert_close(result, expected(plain, c))
        assert_placed(result, params_K[0])


@pytest.mark.mesh
def test_checkpoints_on_other_meshes_are_averaged_on_the_first_mesh():
    plain = make_checkpoints(4)
    first, other = make_mesh((2, 4)), make_mesh((4, 2))
    params_K = [on_mesh(plain[0], first), *(on_mesh(p, other) for p in plain[1:3]), plain[3]]
    (streamed,) = averager.weighted_sums_of_stream(params_K, recipes.sma(4)[None])
    for result in (averager.weighted_sum(params_K, recipes.sma(4)), streamed):
        assert_close(result, expected(plain, recipes.sma(4)))
        assert_placed(result, params_K[0])


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]
)
def test_every_float_dtype_is_summed_in_float32(dtype):
    plain = make_checkpoints(10, dtype)
    in_float32 = averager.weighted_sum([with_dtype(params, jnp.float32) for params in plain], recipes.sma(10))
    assert_close(in_float32, expected(plain, recipes.sma(10)))
    kept = averager.weighted_sum(plain, recipes.sma(10))
    assert kept["embed"].dtype == jnp.dtype(dtype)
    chex.assert_trees_all_equal(kept, with_dtype(in_float32, kept["embed"].dtype), strict=True)
    total = averager.add_weighted(None, [jax.tree.map(jnp.asarray, plain[0])], np.float32([0.5]))
    assert total["embed"].dtype == jnp.float32


def test_64_bit_leaves_are_refused_without_x64():
    for leaf in (np.ones(2), np.ones(2, np.complex128), np.array(2**40)):
        params_K = [{"w": np.ones(2, np.float32), "x": leaf}] * 2
        with pytest.raises(ValueError, match=f"x is {leaf.dtype}, which JAX would convert .*JAX_ENABLE_X64=1"):
            averager.weighted_sum(params_K, [0.5, 0.5])
        with pytest.raises(ValueError, match="JAX_ENABLE_X64"):
            averager.weighted_sums_of_stream(params_K, [[0.5, 0.5]])


def test_float64_is_summed_in_float64_under_x64():
    plain = make_checkpoints(7, np.float64)
    with jax.enable_x64(True):
        for result in (
            averager.weighted_sum(plain, recipes.ema(7, 0.1)),
            *averager.weighted_sums_of_stream(plain, recipes.ema(7, 0.1)[None]),
        ):
            assert result["up"].dtype == np.float64
            assert_close(result, expected(plain, recipes.ema(7, 0.1)), rtol=1e-14)


def test_mean_of_bfloat16_is_correctly_rounded():
    rng = np.random.default_rng(0)
    params_K = [{"w": rng.normal(size=200_000).astype(jnp.bfloat16)} for _ in range(10)]
    for c, complete, divisor in ((recipes.sma(10), np.ones(10), 10), (recipes.wma(10), np.arange(1, 11), 55)):
        exact = expected(params_K, complete)["w"] / divisor
        in_float32 = np.asarray(averager.weighted_sum([with_dtype(params, np.float32) for params in params_K], c)["w"])
        # Some sums need more than 24 bits; multiplying by a rounded reciprocal would round a third of all values
        # wrongly.
        assert (in_float32 != exact.astype(np.float32)).mean() < 1e-3
        np.testing.assert_array_equal(np.asarray(averager.weighted_sum(params_K, c)["w"]), exact.astype(jnp.bfloat16))


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_one_checkpoint_is_returned_unchanged(seed):
    for dtype in (np.float32, jnp.bfloat16):
        params = make_checkpoints(1, dtype, seed)[0]
        result = averager.weighted_sum([params], [1.0])
        assert all(np.array_equal(result[k], params[k]) and result[k].dtype == dtype for k in SHAPES)


@settings(max_examples=25)
@given(st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=4), st.randoms(), st.integers(0, 2**32 - 1))
def test_average_is_invariant_to_permuting_checkpoints_with_their_weights(weights, random, seed):
    params_K = make_checkpoints(4, seed=seed)
    order = list(range(4))
    random.shuffle(order)
    result = averager.weighted_sum([params_K[k] for k in order], [weights[k] for k in order])
    assert_close(result, expected(params_K, weights), rtol=2e-6)


@settings(max_examples=25)
@given(st.lists(st.floats(-2, 2, width=32), min_size=6, max_size=6), st.floats(-2, 2, width=32), st.integers(0, 99))
def test_average_is_linear_in_the_weights(weights, factor, seed):
    params_K = make_checkpoints(3, seed=seed)
    a, b = np.array(weights[:3]), np.array(weights[3:])
    complete = averager.weighted_sum(params_K, a + factor * b)
    parts = averager.weighted_sum([averager.weighted_sum(params_K, a), averager.weighted_sum(params_K, b)], [1, factor])
    assert_close(complete, {k: np.float64(x) for k, x in parts.items()}, rtol=1e-5)


def test_one_compilation_serves_all_weights_with_rounded_products():
    params_K = make_checkpoints(6)
    averager.weighted_sum(params_K, recipes.wma(6))
    sizes = averager.fused_sum._cache_size(), averager.add_weighted._cache_size()
    for c in (recipes.ema(6, 0.1), recipes.lagfree(6)):
        averager.weighted_sum(params_K, c)
    assert averager.fused_sum._cache_size() == sizes[0]
    params = jax.tree.map(jnp.asarray, params_K[0])
    total = jax.tree.map(jnp.zeros_like, params)
    for weight in (0.1, 0.2, -3.0):
        total = averager.add_weighted(total, [params], np.float32([weight]))
    assert averager.add_weighted._cache_size() == sizes[1] + 1


def compiled_forms(mesh, dtype=jnp.bfloat16):
    abstract, total = abstract_on(mesh, dtype), abstract_on(mesh, jnp.float32)
    arguments = (
        [abstract] * 4,
        np.ones(4, np.float32),
        np.float32(0.1),
        (averager.LeafArithmetic("float32", True, False),) * len(SHAPES),
    )
    return {
        "add_weighted": averager.add_weighted.lower(total, [abstract], np.ones(1, np.float32)),
        "add_weighted, 4": averager.add_weighted.lower(total, [abstract] * 4, np.ones(4, np.float32)),
        "fused_sum": averager.fused_sum.lower(total, *arguments),
        "fused_sum_16bit": averager.fused_sum_16bit.lower(total, *arguments),
    }


@pytest.mark.mesh
@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_no_collective_no_temporary_and_in_place_update(shape):
    mesh = make_mesh(shape)
    shard_bytes = {k: int(np.prod(jax.NamedSharding(mesh, SPECS[k]).shard_shape(s))) * 4 for k, s in SHAPES.items()}
    for name, lowered in compiled_forms(mesh).items():
        compiled = lowered.compile()
        assert not COLLECTIVES.search(compiled.as_text()), name
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes <= max(shard_bytes.values()), name
        assert "input_output_alias" in compiled.as_text(), name
        assert memory.alias_size_in_bytes >= sum(shard_bytes.values()), name


@pytest.mark.mesh
def test_donated_total_is_deleted_and_its_memory_reused():
    mesh = make_mesh((4, 2))
    params = on_mesh(make_checkpoints(1)[0], mesh)
    total = jax.tree.map(jnp.zeros_like, params)
    where = {k: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for k, x in total.items()}
    result = averager.add_weighted(total, [params], np.float32([1]))
    assert all(x.is_deleted() for x in total.values())
    assert where == {k: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for k, x in result.items()}
    again = averager.weighted_sum([params, params], [0.5, 0.5], out=result)
    assert all(x.is_deleted() for x in result.values())
    assert where == {k: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for k, x in again.items()}


@pytest.mark.parametrize("count", [17, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 16, 40))])
def test_long_sums_are_added_in_chunks(count):
    plain = make_checkpoints(count, jnp.bfloat16)
    for c in (recipes.sma(count), recipes.ema(count, 0.1)):
        in_float32 = averager.weighted_sum([with_dtype(params, jnp.float32) for params in plain], c)
        assert_close(in_float32, expected(plain, c))
        for result in (averager.weighted_sum(plain, c), *averager.weighted_sums_of_stream(plain, c[None])):
            chex.assert_trees_all_equal(result, with_dtype(in_float32, jnp.bfloat16), strict=True)
        (streamed,) = averager.weighted_sums_of_stream([with_dtype(params, jnp.float32) for params in plain], c[None])
        chex.assert_trees_all_equal(in_float32, streamed, strict=True)


def test_checkpoint_with_zero_weight_is_not_read():
    params_K = make_checkpoints(3)
    params_K[0]["embed"][:] = np.nan
    c = recipes.coefficients("sma:2", [1, 2, 3])
    assert_close(averager.weighted_sum(params_K, c), expected(params_K[1:], [0.5, 0.5]))


@pytest.mark.mesh
def test_equal_integers_pass_through_and_different_ones_are_refused():
    mesh = make_mesh((4, 2))
    sharding = jax.NamedSharding(mesh, jax.P("fsdp"))

    def make(ids, flag):
        return {
            "ids": jax.device_put(np.asarray(ids, np.int32), sharding),
            "flag": np.array(flag),
            "w": np.ones(3, jnp.bfloat16),
        }

    params_K = [make(range(8), True) for _ in range(3)]
    result = averager.weighted_sum(params_K, recipes.sma(3))
    assert result["ids"].dtype == np.int32 and result["flag"].dtype == bool and result["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(result["ids"], range(8))
    total = averager.add_weighted(None, [params_K[0]], np.float32([0.3]))
    np.testing.assert_array_equal(total["ids"], range(8))
    params_K[2] = make([0] * 8, False)
    with pytest.raises(ValueError, match=r"checkpoint 3 differs.* 2 leaves: flag; ids$"):
        averager.weighted_sum(params_K, recipes.sma(3))
    for z in (np.ones(2, np.complex64), np.ones(2, jnp.float8_e8m0fnu), np.ones(2, jnp.float4_e2m1fn)):
        assert averager.weighted_sum([{"z": z}] * 2, [0.5, 0.5])["z"].dtype == z.dtype
        with pytest.raises(ValueError, match="not averaged and must be equal; checkpoint 2 differs in 1 leaf: z"):
            averager.weighted_sum([{"z": z}, {"z": (z + z).astype(z.dtype)}], [0.5, 0.5])


def test_different_trees_are_refused_with_every_leaf_named():
    first = make_checkpoints(1)[0]
    other = {**first, "embed": np.zeros((2, 2), np.float32), "up": first["up"].astype(jnp.bfloat16), "new": first["up"]}
    del other["scale"]
    with pytest.raises(ValueError) as error:
        averager.weighted_sum([first, other], [0.5, 0.5])
    assert str(error.value) == (
        "checkpoint 2 differs from the first in 4 leaves: embed has shape (2, 2), not (16, 8); "
        "new is not expected; scale is missing; up is bfloat16, not float32"
    )
    many = {f"layer{i:02}": np.zeros(2, np.float32) for i in range(15)}
    with pytest.raises(ValueError, match=r"15 leaves: layer00 is missing; .*layer09 is missing; … and 5 more"):
        averager.weighted_sum([many, {}], [0.5, 0.5])
    with pytest.raises(ValueError, match="differs from the first in container types"):
        averager.weighted_sum([{"a": [first["up"]]}, {"a": (first["up"],)}], [0.5, 0.5])


def test_invalid_weights_are_refused():
    params_K = make_checkpoints(2)
    for weights, message in (([1.0], "1 weights for 2 checkpoints"), ([np.nan, 1], "finite")):
        with pytest.raises(ValueError, match=message):
            averager.weighted_sum(params_K, weights)
