"""What the page of why_it_works reads of its curvature, against the gains of whole matrices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quadratic import (
    curvature_ratio,
    explained_share,
    kept_share,
    mean_cosine,
    measured_gain,
    negative_pairs,
    predicted_gain,
)

from pma_jax.analysis import curvature
from pma_jax.merging import recipes

TOKENS_D = np.array([100.0, 300.0, 50.0])


def make_results(rng, count, seeds=3):
    """Return the matrices and slopes per token of each seed over all text, and results that hold them by document."""
    matrices, slopes, of_seeds = [], [], {}
    for seed in range(seeds):
        roots_DxKxK = rng.normal(size=(len(TOKENS_D), count, count))
        matrix_DxKxK = np.einsum("dik,djk->dij", roots_DxKxK, roots_DxKxK)
        slopes_DxK = rng.normal(size=(len(TOKENS_D), count))
        matrix = matrix_DxKxK.sum(axis=0)
        sums = {
            "trace": np.trace(matrix_DxKxK, axis1=1, axis2=2),
            "total": matrix_DxKxK.sum(axis=(1, 2)),
            "last": matrix_DxKxK[:, -1, -1],
            "matrix": matrix,
        }
        quadratic = {"slope": slopes_DxK[:, -1] - slopes_DxK.mean(axis=1), "hessian": sums}
        merged_D = 2 * TOKENS_D + rng.normal(size=3)
        losses = {"last": 3 * TOKENS_D, "mean of the losses": 2.5 * TOKENS_D, "loss of the mean": merged_D}
        of_seeds[str(seed)] = {
            "quadratic": {"losses": losses, "merge": quadratic},
            "noise": {"document_tokens": TOKENS_D.tolist()},
        }
        matrices.append(matrix / TOKENS_D.sum())
        slopes.append(slopes_DxK.sum(axis=0) / TOKENS_D.sum())
    return matrices, slopes, {"window": count, "seeds": of_seeds}


@given(st.integers(2, 6), st.integers(0, 2**31))
def test_gains_from_sums_by_document_are_those_of_the_matrix(count, seed):
    matrices, slopes, results = make_results(np.random.default_rng(seed), count)
    weights = recipes.sma(count)
    over_mean = np.mean([curvature.merging_gain(m, weights) for m in matrices])
    pairs = zip(matrices, slopes, strict=True)
    over_last = np.mean([curvature.merging_gain_over_last(matrix, weights, of) for matrix, of in pairs])
    assert predicted_gain(results, "merge", "hessian", "mean of the losses").mean == pytest.approx(over_mean, rel=1e-9)
    assert predicted_gain(results, "merge", "hessian", "last").mean == pytest.approx(over_last, rel=1e-9, abs=1e-12)


def test_numbers_of_pairs_are_those_of_the_matrix():
    matrices, _, results = make_results(np.random.default_rng(0), 4)
    seeds = list(results["seeds"].values())
    kept = [m.mean() / (np.trace(m) / 4) for m in matrices]
    assert kept_share(results, "merge", "hessian").mean == pytest.approx(np.mean(kept), rel=1e-9)
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    counts = [sum(m[i, j] < 0 for i, j in pairs) for m in matrices]
    assert [negative_pairs(seed, "merge", "hessian") for seed in seeds] == counts
    for apart in (range(1, 2), range(2, 4)):
        cosines = [
            np.mean([m[i, j] / np.sqrt(m[i, i] * m[j, j]) for i, j in pairs if j - i in apart]) for m in matrices
        ]
        assert [mean_cosine(seed, "merge", "hessian", apart) for seed in seeds] == pytest.approx(cosines)


@pytest.mark.parametrize(("rows", "share"), [(np.eye(3), 1 / 3), (np.ones((3, 1)), 1), ([[1.0], [-1.0]], 0)])
def test_share_that_a_mean_keeps_at_three_known_values(rows, share):
    matrix = np.asarray(rows) @ np.asarray(rows).T
    of_document = {"total": [matrix.sum()] * 3, "trace": [np.trace(matrix)] * 3}
    seed = {"quadratic": {"merge": {"hessian": of_document}}, "noise": {"document_tokens": TOKENS_D.tolist()}}
    found = kept_share({"window": len(matrix), "seeds": {"0": seed, "1": seed}}, "merge", "hessian")
    assert found.mean == pytest.approx(share)


def test_twice_the_curvature_predicts_twice_the_gain():
    _, _, results = make_results(np.random.default_rng(2), 4)
    for seed in results["seeds"].values():
        merge = seed["quadratic"]["merge"]
        twice = {key: 2 * np.array(value) for key, value in merge["hessian"].items()}
        seed["quadratic"]["annealed"] = merge | {"hessian": twice}
    assert curvature_ratio(results, "hessian", "mean of the losses").mean == pytest.approx(2)


def test_share_of_the_measured_gain_covers_documents():
    matrices, _, results = make_results(np.random.default_rng(1), 4)
    measured = measured_gain(results, "mean of the losses")
    predicted = [curvature.merging_gain(m, recipes.sma(4)) for m in matrices]
    gains = [
        sum(2.5 * TOKENS_D - seed["quadratic"]["losses"]["loss of the mean"]) / TOKENS_D.sum()
        for seed in results["seeds"].values()
    ]
    assert measured.mean == pytest.approx(np.mean(gains))
    share = explained_share(results, "merge", "hessian", "mean of the losses")
    assert share.mean == pytest.approx(np.mean(np.divide(predicted, gains)))
    assert share.interval().low < share.mean < share.interval().high
