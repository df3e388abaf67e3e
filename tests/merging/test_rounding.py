"""One definition of a weighted sum: every way to merge returns the same bits."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import pma_jax as pma
from pma_jax.config import DECAY_SHAPES
from pma_jax.evaluation import merges
from pma_jax.merging import averager, recipes
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.merging.engine.rounding import are_products_exact, factor_coefficients, factor_rows
from pma_jax.merging.preview import Window
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.snapshots import restore_params
from pma_jax.runtime.mesh import data_parallel_mesh
from pma_jax.storage.formats.open import open_source, read_leaf
from pma_jax.storage.formats.safetensors import CODE_OF_DTYPE

TOKENS = [100, 200, 300, 450, 500, 600]
RECIPES = [
    "sma",
    "sma:3",
    "ema:alpha=0.2",
    "ema_closed:alpha=0.1",
    "wma",
    "wma:5",
    "lawa:4",
    *(f"decay:shape={shape}" for shape in DECAY_SHAPES),
    "power:sigma_rel=0.1",
    "lagfree:lag=0.5,order=1",
    "lagfree:lag=0,order=2",
    "weights:0.3,0.1,0.25,0.05,0.2,0.1",
    "weights:-0.5,1.5:2",
    "weights:1:1",
    "weights:0,0.5,0,0.25,0.25,0",
]
C = np.stack([recipes.coefficients(text, TOKENS) for text in RECIPES])


def bits(x):
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype, name
        np.testing.assert_array_equal(bits(actual[name]), bits(x), err_msg=name)


def write_checkpoints(folder, dtype):
    """Write six safetensors of odd sizes, with zeros of both signs; return their paths and their leaves."""
    rng = np.random.default_rng(0)
    leaves_K = []
    for _ in TOKENS:
        leaves = {"matrix": rng.standard_normal((1001, 33)), "vector": 1e3 * rng.standard_normal(777), "scalar": 0.3}
        leaves["vector"][::7] = -0.0
        leaves["vector"][1::7] *= rng.integers(0, 2, leaves["vector"][1::7].shape)
        leaves_K.append({name: np.asarray(x).astype(dtype) for name, x in leaves.items()})
    paths = [folder / str(tokens) for tokens in TOKENS]
    for path, leaves in zip(paths, leaves_K, strict=True):
        path.mkdir()
        save_file(leaves, path / "model.safetensors")
    return paths, leaves_K


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_storage_and_arrays_merge_to_the_same_bits(tmp_path, dtype):
    paths, leaves_K = write_checkpoints(tmp_path, dtype)
    together = [tmp_path / f"together-{r}" for r in range(len(C))]
    merge(plan([open_source(path) for path in paths], C, recipes=RECIPES), together)
    mesh = jax.make_mesh((8,), ("x",))
    sharded_K = [
        {name: jax.device_put(x, jax.NamedSharding(mesh, jax.P())) for name, x in leaves.items()}
        | {"matrix": jax.device_put(leaves["matrix"][:1000], jax.NamedSharding(mesh, jax.P("x")))}
        for leaves in leaves_K
    ]
    streamed_R = averager.weighted_sums_of_stream(iter(leaves_K), C)
    with jax.set_mesh(mesh):
        streamed_on_mesh_R = averager.weighted_sums_of_stream(iter(sharded_K), C)
    for r, row in enumerate(C):
        alone = tmp_path / f"alone-{r}"
        merge(plan([open_source(path) for path in paths], row[None], recipes=[RECIPES[r]]), [alone])
        expected = load_file(alone / "model.safetensors")
        assert_same_bits(load_file(together[r] / "model.safetensors"), expected)
        assert_same_bits(averager.weighted_sum(leaves_K, row), expected)
        assert_same_bits(streamed_R[r], expected)
        expected["matrix"] = expected["matrix"][:1000]
        assert_same_bits(averager.weighted_sum(sharded_K, row), expected)
        assert_same_bits(streamed_on_mesh_R[r], expected)


def random_values(dtype, count=4001, is_moderate=False):
    """Return finite values of all magnitudes, and extremes unless `is_moderate` (no product is subnormal)."""
    width = np.dtype(dtype).itemsize
    x = np.random.default_rng(1).integers(0, 256, (count, width), np.uint8).view(dtype)[:, 0]
    x[:4] = np.array([0.0, -0.0, ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).tiny]).astype(dtype)
    with np.errstate(all="ignore"):
        magnitudes = np.abs(x.astype(np.float64))
        keep = np.isfinite(magnitudes) & (x.astype(np.float32) == x if width < 8 else True)
        if is_moderate:
            keep &= (magnitudes == 0) | ((magnitudes > 2.0**-100) & (magnitudes < 2.0**115))
        return x[keep]


EQUAL_ROWS = [
    *(row[row != 0] for row in C),
    [1 / 3] * 3,
    recipes.sma(40),
    recipes.ema(40, 0.07),
    [-7.5, 8.5],
    [900, -899],
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn])
def test_merges_of_equal_inputs_in_storage_return_them(tmp_path, dtype):
    x = random_values(dtype)
    if dtype == np.float32:
        x = x[np.isfinite(x.astype(ml_dtypes.bfloat16))]
    (tmp_path / "in").mkdir()
    header = {"w": {"dtype": CODE_OF_DTYPE[x.dtype.name], "shape": [len(x)], "data_offsets": [0, x.nbytes]}}
    text = json.dumps(header).encode()
    (tmp_path / "in" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + x.tobytes())
    source = open_source(tmp_path / "in")
    # Of the last, rounding may change the result by more than a value.
    for number, row in enumerate(map(np.asarray, [*EQUAL_ROWS, [3e9, 1 - 3e9]])):
        rows = np.stack([row, np.roll(row, 1)])  # several recipes are summed by other functions
        for name, weights in (("one", rows[:1]), ("two", rows)):
            outs = [tmp_path / f"{name}-{number}-{r}" for r in range(len(weights))]
            merge(plan([source] * len(row), weights), outs)
            for out in outs:
                assert read_leaf(open_source(out), "w").tobytes() == x.tobytes(), row
        if dtype == np.float32:
            merge(plan([source] * len(row), rows[:1], dtype="bfloat16"), [tmp_path / f"bf16-{number}"])
            merged = read_leaf(open_source(tmp_path / f"bf16-{number}"), "w")
            assert merged.tobytes() == x.astype(ml_dtypes.bfloat16).tobytes()


OTHER_DTYPES = (np.float64, np.float16, ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    "dtype",
    [np.float32, ml_dtypes.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in OTHER_DTYPES)],
)
def test_merges_of_equal_arrays_return_them(dtype):
    x = random_values(dtype, is_moderate=True)
    with jax.enable_x64(np.dtype(dtype) == np.float64):
        for row in map(np.asarray, EQUAL_ROWS):
            trees = [{"w": x}] * len(row)
            assert np.asarray(averager.weighted_sum(trees, row)["w"]).tobytes() == x.tobytes(), row
            for streamed in averager.weighted_sums_of_stream(iter(trees), np.stack([row, np.roll(row, 1)])):
                assert np.asarray(streamed["w"]).tobytes() == x.tobytes(), row


def test_nearly_equal_inputs_merge_to_the_same_bits_and_as_exactly_as_others(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.standard_normal(5001).astype(np.float32)
    ulps = rng.integers(-3, 4, (len(TOKENS), 5001)).astype(np.uint32)
    leaves_K = [{"w": (base.view(np.uint32) + row).view(np.float32)} for row in ulps]
    for k, leaves in enumerate(leaves_K):
        (tmp_path / str(k)).mkdir()
        save_file(leaves, tmp_path / str(k) / "model.safetensors")
    sources = [open_source(tmp_path / str(k)) for k in range(len(TOKENS))]
    merge(plan(sources, C, recipes=RECIPES), [tmp_path / f"out{r}" for r in range(len(C))])
    for r, row in enumerate(C):
        merged = load_file(tmp_path / f"out{r}" / "model.safetensors")
        assert_same_bits(averager.weighted_sum(leaves_K, row), merged)
        assert_same_bits(averager.weighted_sums_of_stream(iter(leaves_K), row[None])[0], merged)
        exact = sum(c * leaves["w"].astype(np.float64) for c, leaves in zip(row, leaves_K, strict=True))
        error = np.abs(merged["w"] - exact) / np.spacing(np.abs(base))
        assert error.max() < 2 + 2 * np.abs(row).sum(), RECIPES[r]


def test_sums_that_overflow_are_added_in_a_wider_dtype(tmp_path):
    largest = np.finfo(np.float32).max
    for k, x in enumerate([largest, largest / 2, largest]):
        (tmp_path / str(k)).mkdir()
        save_file({"w": np.array([x, 1, k], np.float32)}, tmp_path / str(k) / "model.safetensors")
    merge(plan([open_source(tmp_path / str(k)) for k in range(3)], recipes.sma(3)), [tmp_path / "out"])
    merged = load_file(tmp_path / "out" / "model.safetensors")["w"]
    np.testing.assert_array_equal(merged, np.array([float(largest) * 2.5 / 3, 1, 1], np.float32))


def test_weights_that_do_not_sum_to_one_scale_equal_inputs(tmp_path):
    x = np.arange(1, 9, dtype=np.float32)
    assert averager.weighted_sum([{"w": x}] * 2, [0.5, 0.25])["w"].tolist() == (0.75 * x).tolist()
    assert averager.weighted_sum([{"w": x}] * 2, [1, -1])["w"].tolist() == [0] * 8


def test_more_checkpoints_than_one_pass_sums(tmp_path):
    count = averager.TREES_PER_PASS * 2 + 3
    rng = np.random.default_rng(0)
    leaves_K = [{"w": rng.standard_normal(501).astype(np.float32)} for _ in range(count)]
    for k, leaves in enumerate(leaves_K):
        (tmp_path / str(k)).mkdir()
        save_file(leaves, tmp_path / str(k) / "model.safetensors")
    row = recipes.ema(count, 0.05)
    merge(plan([open_source(tmp_path / str(k)) for k in range(count)], row[None]), [tmp_path / "out"])
    expected = load_file(tmp_path / "out" / "model.safetensors")
    assert_same_bits(averager.weighted_sum(leaves_K, row), expected)
    assert_same_bits(averager.weighted_sums_of_stream(iter(leaves_K), row[None])[0], expected)


def test_merges_previews_and_sweeps_of_a_run_have_the_same_bits(finished, tmp_path, monkeypatch):
    chosen = finished.snapshots
    tokens = [s.tokens for s in chosen]
    window = Window(len(chosen), lambda older, newer: True)
    abstract = abstract_params(finished.config.model, data_parallel_mesh())
    for snapshot in chosen:
        window.add(snapshot.tokens, restore_params(snapshot, abstract))
    swept = []
    monkeypatch.setattr(
        merges,
        "make_evaluator",
        lambda *_: tiny.FakeEvaluator(lambda params: swept.append(jax.device_get(params)) or np.zeros(2)),
    )
    texts = ["sma", "ema:alpha=0.2", "lagfree:lag=0.5", "decay:shape=minus_sqrt"]
    rows = [recipes.coefficients(text, tokens) for text in texts]
    merges.evaluate_merges(finished.config, chosen, rows, "select")
    for text, row, in_sweep in zip(texts, rows, swept, strict=True):
        stored = tiny.read(pma.merge(chosen, row, tmp_path / text, recipe=text))
        ((_, preview),) = window.merges(text, [len(chosen)])
        for tree in (pma.average(chosen, row), preview, in_sweep):
            jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), tree, stored)


def test_weights_with_integer_ratios_are_summed_as_integers():
    for c, ratio, divisor in (
        (recipes.sma(10), [1] * 10, 10),
        (recipes.wma(4), [1, 2, 3, 4], 10),
        (np.array([-0.5, 1.5]), [-1, 3], 2),
        (np.array([0.0, 0.5, 0.5]), [0, 1, 1], 2),
        (np.array([1.0]), [1], 1),
        (np.array([2.0, 4.0]), [1, 2], 0.5),
        (np.array([0.0]), [0], 1),
    ):
        multipliers, got_divisor = factor_coefficients(c)
        np.testing.assert_array_equal(multipliers, ratio)
        assert got_divisor == divisor
    multipliers, divisors, *_ = factor_rows(np.stack([recipes.ema(5, 0.1), recipes.sma(5)]))
    np.testing.assert_array_equal(multipliers, [recipes.ema(5, 0.1), np.ones(5)])
    np.testing.assert_array_equal(divisors, [1, 5])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32", "float64"])
def test_products_that_are_called_exact_are_those_of_float64(dtype):
    values = np.random.default_rng(0).normal(size=10_000).astype(dtype)
    rows = {"sma": recipes.sma(10), "wma": recipes.wma(10), "ema": recipes.ema(10, 0.1), "lagfree": recipes.lagfree(10)}
    exact = set()
    for name, coefficients in rows.items():
        if are_products_exact(coefficients, dtype):
            exact.add(name)
            for multiplier in factor_coefficients(coefficients)[0]:
                product = np.float32(multiplier) * values.astype(np.float32)
                np.testing.assert_array_equal(product, multiplier * values.astype(np.float64))
    assert exact == {"float64": set(), "float32": {"sma"}}.get(dtype, {"sma", "wma", "lagfree"})
