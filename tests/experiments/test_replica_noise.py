"""The loss of means over replicas (experiments/why_it_works) against exact sums."""

import numpy as np
import pytest
import replica_noise


def test_rows_are_the_means_of_every_subset():
    rows = replica_noise.subset_mean_weights(4)
    assert [len(rows[m]) for m in (1, 2, 3, 4)] == [4, 6, 4, 1]
    for m, matrix in rows.items():
        np.testing.assert_allclose(matrix.sum(axis=1), 1)
        assert set(np.unique(matrix)) <= {0, 1 / m}
        assert len({tuple(row) for row in matrix}) == len(matrix)
        np.testing.assert_allclose(matrix.mean(axis=0), 1 / 4)


def test_independent_noise_in_a_quadratic_is_recovered():
    rng = np.random.default_rng(0)
    hessian, drift = np.diag(rng.uniform(0.1, 2, 200)), rng.normal(size=200)
    params = drift + 0.3 * rng.normal(size=(7, 200))
    actual = {
        m: np.mean([x @ hessian @ x / 2 for x in rows @ params])
        for m, rows in replica_noise.subset_mean_weights(7).items()
    }
    fit = replica_noise.fit_replica_noise(list(actual), list(actual.values()))
    assert fit.noise_per_replica == pytest.approx(0.09 * np.trace(hessian) / 2, rel=0.2)
    assert fit.floor == pytest.approx(drift @ hessian @ drift / 2, rel=0.1)
    # The mean over all subsets of a size is exactly linear in 1 / m.
    np.testing.assert_allclose(
        list(actual.values()), [fit.floor + fit.noise_per_replica / m for m in actual], rtol=1e-9
    )


def test_single_replica_count_cannot_be_fitted():
    with pytest.raises(ValueError, match="at least 2 different numbers of replicas"):
        replica_noise.fit_replica_noise([3, 3], [1.0, 1.1])
