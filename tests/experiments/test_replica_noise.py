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


@pytest.mark.parametrize("degree", [1, 2])
def test_the_loss_at_the_expected_weights_is_recovered(degree):
    rng = np.random.default_rng(0)
    # A loss of order 2 or 3, separable in the weights, with other coefficients on each document.
    hessians, third, drift = rng.uniform(0.5, 2, (3, 400)), rng.uniform(0, 1, (3, 400)), rng.normal(size=400)

    def loss(x):
        return hessians @ x**2 / 2 + (degree == 2) * third @ x**3 / 6

    params = drift + 0.3 * (rng.exponential(size=(7, 400)) - 1)
    means = {
        m: np.mean([loss(x) for x in rows @ params], axis=0) for m, rows in replica_noise.subset_mean_weights(7).items()
    }
    floors = replica_noise.extrapolate_to_many(list(means), list(means.values()), degree)
    np.testing.assert_allclose(floors, loss(drift), rtol=0.1)
    # The mean over all subsets of a size is exactly such a polynomial, so that few of the sizes give the same floor.
    few = [2, 5, 6][: degree + 1]
    of_few = replica_noise.extrapolate_to_many(few, [means[m] for m in few], degree)
    np.testing.assert_allclose(of_few, floors, rtol=1e-9)
    one = replica_noise.extrapolate_to_many(list(means), [of[0] for of in means.values()], degree)
    np.testing.assert_allclose(one, floors[0], rtol=1e-12)


@pytest.mark.parametrize(("degree", "replicas"), [(1, [3, 3]), (2, [2, 3, 3])])
def test_too_few_replica_counts_cannot_be_fitted(degree, replicas):
    with pytest.raises(ValueError, match=f"at least {degree + 1} different numbers of replicas"):
        replica_noise.extrapolate_to_many(replicas, np.ones(len(replicas)), degree)
