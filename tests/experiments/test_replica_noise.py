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


def test_the_loss_at_the_expected_weights_of_a_quadratic_is_recovered():
    rng = np.random.default_rng(0)
    hessians, drift = rng.uniform(0.1, 2, (3, 200)), rng.normal(size=200)  # the diagonal of each document's
    params = drift + 0.3 * rng.normal(size=(7, 200))
    means = {
        m: np.mean([hessians @ x**2 / 2 for x in rows @ params], axis=0)
        for m, rows in replica_noise.subset_mean_weights(7).items()
    }
    floors = replica_noise.extrapolate_to_many(list(means), list(means.values()))
    np.testing.assert_allclose(floors, hessians @ drift**2 / 2, rtol=0.1)
    # The mean over all subsets of a size is exactly linear in 1 / m, so that two of the sizes give the same floor.
    two = replica_noise.extrapolate_to_many([2, 5], [means[2], means[5]])
    np.testing.assert_allclose(two, floors, rtol=1e-9)
    one = replica_noise.extrapolate_to_many(list(means), [of[0] for of in means.values()])
    np.testing.assert_allclose(one, floors[0], rtol=1e-12)


def test_single_replica_count_cannot_be_fitted():
    with pytest.raises(ValueError, match="at least 2 different numbers of replicas"):
        replica_noise.extrapolate_to_many([3, 3], [1.0, 1.1])
