"""The paper's recipes, explicit weights, composition and the text form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.merging import recipes

TEXTS = [
    "sma",
    "sma:10",
    "ema:alpha=0.2",
    "ema:alpha=0.2:10",
    "ema_closed:alpha=0.1",
    "wma",
    "lawa:5",
    "decay:shape=linear",
    "decay:shape=cosine",
    "decay:shape=minus_sqrt:7",
    "decay:shape=exponential",
    "power:sigma_rel=0.1",
    "power:sigma_rel=0.1,start_tokens=5:4",
    "lagfree",
    "lagfree:lag=0.5,order=1",
    "lagfree:lag=0,order=2:10",
]


def test_sma_weights_are_one_over_n():
    w = recipes.sma(10)
    assert w.dtype == np.float64 and w.shape == (10,)
    np.testing.assert_array_equal(w, [0.1] * 10)


def test_ema_follows_the_papers_recursion_from_the_oldest():
    # Eq. 4 by hand for N = 10: the oldest keeps 0.9^9, checkpoint i gets 0.1 * 0.9^(10 - i).
    by_hand = [0.387420489, 0.043046721, 0.04782969, 0.0531441, 0.059049, 0.06561, 0.0729, 0.081, 0.09, 0.1]
    np.testing.assert_allclose(recipes.ema(10, 0.1), by_hand, rtol=1e-12)
    models = np.random.default_rng(0).normal(size=(10, 3))
    for alpha in (0.1, 0.2, 1.0):
        running = models[0]
        for model in models[1:]:
            running = alpha * model + (1 - alpha) * running
        np.testing.assert_allclose(recipes.ema(10, alpha) @ models, running, rtol=1e-12)


def test_ema_closed_form_is_the_printed_one_normalised():
    printed = 0.1 * 0.9 ** np.arange(9, -1, -1)
    assert printed.sum() == pytest.approx(0.651, abs=5e-4)
    np.testing.assert_allclose(recipes.ema_closed(10, 0.1), printed / printed.sum(), rtol=1e-12)


def test_mean_ages_are_ordered_as_in_the_papers_figure_4():
    intervals = np.arange(10)
    ages = [recipes.mean_age(w, intervals) for w in (recipes.wma(10), recipes.ema(10, 0.2), recipes.sma(10))]
    np.testing.assert_allclose(ages, [3.0, 3.463, 4.5], atol=1e-3)
    assert recipes.mean_age(recipes.ema(10, 0.1), intervals) == pytest.approx(5.513, abs=1e-3)
    assert recipes.mean_age(recipes.ema_closed(10, 0.1), intervals) == pytest.approx(3.647, abs=1e-3)
    assert recipes.mean_age(recipes.sma(10), intervals * 1000) == pytest.approx(4500)


def test_wma_weights_grow_linearly():
    np.testing.assert_allclose(recipes.wma(4), [0.1, 0.2, 0.3, 0.4], rtol=1e-15)


def test_lawa_is_the_plain_mean_of_the_latest():
    np.testing.assert_array_equal(recipes.coefficients("lawa:2", [1, 2, 3]), [0, 0.5, 0.5])


def test_explicit_weights_are_validated():
    np.testing.assert_array_equal(recipes.weights([0.25, 0.75]), [0.25, 0.75])
    np.testing.assert_allclose(recipes.weights([-0.5, 1.5]), [-0.5, 1.5])
    np.testing.assert_allclose(recipes.weights([1, 3], normalize=True), [0.25, 0.75])
    for values, normalize, message in (
        ([0.2, 0.3], False, "sum to 0.5, not 1.*normalize"),
        ([1, -1], True, "sum to 0 cannot"),
        ([1, float("nan")], False, "finite"),
        ([], False, "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            recipes.weights(values, normalize)


@given(st.sampled_from(TEXTS), st.integers(10, 40), st.integers(0, 2**32 - 1))
def test_every_recipe_sums_to_one_at_any_positions(text, n, seed):
    tokens = np.cumsum(np.random.default_rng(seed).integers(10, 10**9, n))
    row = recipes.coefficients(text, tokens)
    assert row.dtype == np.float64 and row.shape == (n,)
    assert row.sum() == pytest.approx(1.0, abs=1e-9)
    window = recipes.parse(text).window
    assert window is None or not row[:-window].any()


@given(st.lists(st.floats(0.1, 1), min_size=1, max_size=8), st.randoms())
def test_explicit_weights_permute_with_their_checkpoints(values, random):
    order = list(range(len(values)))
    random.shuffle(order)
    row = recipes.weights(values, normalize=True)
    np.testing.assert_allclose(recipes.weights([values[i] for i in order], normalize=True), row[order], rtol=1e-12)


@pytest.mark.parametrize("text", [*TEXTS, "weights:0.2,0.3,0.5", "weights:1", "weights:1,3,normalize=true:2"])
def test_recipe_keeps_its_text_form(text):
    recipe = recipes.parse(text)
    assert recipe.text == text and hash(recipe) is not None


def test_weights_have_a_text_form():
    np.testing.assert_allclose(recipes.coefficients("weights:0.2,0.3,0.5", [1, 2, 3]), [0.2, 0.3, 0.5])
    np.testing.assert_allclose(recipes.coefficients("weights:0.5,0.5:2", [1, 2, 3]), [0, 0.5, 0.5])
    np.testing.assert_allclose(recipes.coefficients("weights:2,6,normalize=true", [1, 2]), [0.25, 0.75])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("smaa", "did you mean 'sma'"),
        ("", "there are sma"),
        ("sma:0", "at least 1"),
        ("sma:-3", "at least 1"),
        ("sma:x=1", "takes no parameters"),
        ("sma:1:2:3", "too many parts"),
        ("ema", "needs alpha: for example ema:alpha=0.2"),
        ("ema:alfa=0.2", "did you mean 'alpha'"),
        ("ema:0.2", "write ema:alpha=0.2"),
        ("ema:alpha=2", "at most 1"),
        ("ema:alpha=nan", "must be a number"),
        ("ema:alpha=x", "must be a number"),
        ("ema:alpha=0.1,alpha=0.2", "twice"),
        ("decay", "needs shape"),
        ("decay:shape=cosin", "did you mean 'cosine'"),
        ("power:sigma_rel=0.3", "at most 0.288"),
        ("lagfree:order=3", "choose 1"),
        ("lagfree:order=1.5", "whole number"),
        ("lagfree:lag=-1", "choose 0"),
        ("lagfree:order=2:2", "at least 3 checkpoints"),
        ("weights", "needs its weights"),
        ("weights:0.2,0.3", "sum to 0.5"),
        ("weights:0.5,0.5:3", "2 weights for 3"),
        ("weights:1,normalize=maybe", "true or false"),
    ],
)
def test_invalid_text_is_one_line_that_gives_the_remedy(text, message):
    with pytest.raises(ValueError, match=message) as error:
        recipes.parse(text)
    assert "\n" not in str(error.value)


def test_invalid_positions_are_refused():
    with pytest.raises(ValueError, match="asks for 4 checkpoints and there are 3"):
        recipes.coefficients("sma:4", [1, 2, 3])
    with pytest.raises(ValueError, match="oldest first"):
        recipes.coefficients("sma", [3, 2, 1])
    with pytest.raises(ValueError, match="at least one"):
        recipes.coefficients("sma", [])
    with pytest.raises(ValueError, match="2 weights for 3"):
        recipes.coefficients("weights:0.5,0.5", [1, 2, 3])
