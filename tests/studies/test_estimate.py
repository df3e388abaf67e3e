"""Estimates of the machine time: which runs' speeds are taken."""

from pma_jax.studies.estimate import NEWEST_RUNS, KnownSpeed, Speed, choose_speed


def known(batch_sequences: int, finished: float, train_seconds: float) -> KnownSpeed:
    return KnownSpeed(Speed(1.0, train_seconds, 0.5), batch_sequences, finished)


def test_the_speed_is_that_of_the_newest_runs_with_the_same_batch():
    old = [known(4, float(i), 9.0) for i in range(20)]
    new = [known(4, 100.0 + i, 2.0 + i) for i in range(NEWEST_RUNS)]
    other = [known(32, 1000.0, 0.1)]
    chosen = choose_speed([*new, *other, *old], 4)
    assert chosen == Speed(1.0, 2.0 + (NEWEST_RUNS - 1) / 2, 0.5)
    assert choose_speed([*old, *other], 32).train_seconds == 0.1


def test_without_runs_of_the_batch_those_of_others_count():
    assert choose_speed([known(4, 0.0, 1.0), known(8, 1.0, 3.0)], 16).train_seconds == 2.0
