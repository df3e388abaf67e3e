"""The slopes of the experiment growth: against numpy's fits, on models whose differences are known."""

import growth_page
import numpy as np
import pytest

TOKENS = [300, 100, 600]


def model(parameters: int, tokens: int, gap: float, span: float, rng: np.random.Generator) -> dict:
    """Return results of a model with a known gap, in nats per token, and best span, as a share of the tokens."""
    merged = rng.normal(1.5, 0.01, (4, 3))
    windows = {n: [[(np.log(n / 32) - np.log(span)) ** 2 * t for t in TOKENS]] * 4 for n in (2, 4, 8, 16, 32)}
    return {
        "series": "tokens",
        "parameters": parameters,
        "tokens": tokens,
        "end": 32,
        "document_tokens": TOKENS,
        "raw": ((merged + 0.1) * TOKENS).tolist(),
        "merged": (merged * TOKENS).tolist(),
        "annealed": ((merged - gap) * TOKENS).tolist(),
        "windows": {str(n): losses for n, losses in windows.items()},
    }


def test_slopes_and_powers_are_those_of_the_models():
    rng, tokens = np.random.default_rng(0), np.array([1e6, 2e6, 4e6, 8e6])
    gaps, spans = [0.002, 0.004, 0.005, 0.009], 0.2 * (tokens / 1e6) ** -0.25
    models = [model(10**5, int(n), gap, span, rng) for n, gap, span in zip(tokens, gaps, spans, strict=True)]
    slope = growth_page.slope(models, "tokens", "merged", "annealed")
    assert slope.mean == pytest.approx(np.polyfit(np.log2(tokens), gaps, 1)[0], rel=1e-9)
    power = growth_page.span_exponent(models, "tokens")
    assert power.mean == pytest.approx(0.75, abs=1e-6), "the share falls as tokens to the power -0.25"
    others = [growth_page.span_exponent(models, "tokens", n).mean for n in growth_page.NEIGHBOURS]
    assert others == pytest.approx([0.75] * 3, abs=1e-6), "the losses are a parabola, so that all fits agree"
    assert growth_page.slope(models, "tokens", "raw", "merged").mean == pytest.approx(0, abs=1e-9)


def test_the_slope_has_an_error_over_seeds_and_documents():
    rng, tokens = np.random.default_rng(1), [1e6, 2e6, 4e6]
    models = [model(10**5, int(n), 0.0, 0.2, rng) for n in tokens]
    for one in models:
        one["annealed"] = (np.array(one["merged"]) - rng.normal(0.01, 0.005, (4, 3)) * TOKENS).tolist()
    by_seed = [
        [np.sum(one["merged"][seed]) - np.sum(one["annealed"][seed]) for one in models] / np.sum(TOKENS)
        for seed in range(4)
    ]
    slopes = np.polyfit(np.log2(tokens), np.transpose(by_seed), 1)[0]
    found = growth_page.slope(models, "tokens", "merged", "annealed")
    assert found.mean == pytest.approx(slopes.mean())
    assert found.standard_error > 0.5 * slopes.std(ddof=1) / 2


def test_the_best_rate_lies_between_those_of_the_grid():
    losses = {f"{rate:g}": np.log2(rate / 3e-3) ** 2 for rate in (1e-3, 2e-3, 4e-3, 8e-3)}
    searched = {"rates": {"merged": {"rate": 4e-3, "losses": losses | {"0.016": None}}}}
    assert growth_page.best_rate(searched, "merged") == pytest.approx(3e-3), "a diverged rate is left out"
