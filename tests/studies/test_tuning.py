"""Tuning: every contender gets the same number of settings, and its best one has no lower neighbour."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.config.errors import UserError
from pma_jax.studies.tuning import Axis, Contender, check_equal_numbers, tune

BATCH, RATE = Axis("training.batch_size_sequences", 4, 2), Axis("schedule.peak_rate", 0.002, 2)
GRID = tuple(itertools.product(range(3), range(-1, 2)))


def bowl(name, batch, rate, grid=GRID):
    """Return a contender whose loss is lowest at a position of each axis, and the list of settings it measures."""
    measured = []

    def measure(settings):
        measured.extend(map(tuple, settings))
        values = [[float(text.partition("=")[2]) for text in setting] for setting in settings]
        return [[(b / 4 - 2**batch) ** 2 + (r / 0.002 - 2**rate) ** 2] * 2 for b, r in values]

    return Contender(name, (BATCH, RATE), grid, measure), measured


@given(st.integers(-2, 4), st.integers(-3, 3), st.integers(-2, 4), st.integers(-3, 3))
def test_each_best_is_found_beyond_the_grid_with_the_same_number_of_settings(b1, r1, b2, r2):
    (one, of_one), (other, of_other) = bowl("raw", b1, r1), bowl("merged", b2, r2)
    tuned = tune([one, other], limit=80)
    assert tuned["raw"].best == (b1, r1) and tuned["merged"].best == (b2, r2)
    assert len(set(of_one)) == len(of_one) == len(of_other) == len(set(of_other)), "no setting is measured twice"
    assert all(not each.open_neighbours(each.best) for each in tuned.values())


def test_settings_are_overrides_with_four_digits():
    contender, measured = bowl("raw", 1, 0, grid=((1, 0),))
    tuned = tune([contender])
    assert contender.overrides((1, 1)) == ["training.batch_size_sequences=8", "schedule.peak_rate=0.004"]
    assert Axis("k", 0.002, 2**0.5).value(1) == 0.002828
    assert len(measured) == 5 and tuned["raw"].best == (1, 0), "the setting and its four neighbours"


def test_a_contender_with_more_settings_than_its_rival_is_refused_by_name():
    one, other = bowl("raw", 1, 0)[0], bowl("merged", 1, 0, grid=GRID[:4])[0]
    with pytest.raises(UserError, match="merged is tuned over 4 settings and raw over 9"):
        tune([one, other])
    with pytest.raises(UserError, match="EMA is tuned over 1 settings and SMA over 3"):
        check_equal_numbers({"SMA": 3, "EMA": 1})
    check_equal_numbers({"SMA": 3, "EMA": 3})


def test_values_below_a_minimum_are_no_neighbours():
    axis = Axis("training.batch_size_sequences", 4, 2, minimum=1)
    contender = Contender("raw", (axis,), ((0,),), lambda settings: [[float(s[0].partition("=")[2])] for s in settings])
    tuned = tune([contender])["raw"]
    assert axis.value(tuned.best[0]) == 1 and min(tuned.losses) == tuned.best


def test_zero_is_the_lowest_value_of_its_axis_and_conditions_hold():
    decay = Axis("optimizer.weight_decay", 0.1, 5, zero_at=-2)
    assert [decay.value(i) for i in (-2, -1, 0, 1)] == [0, 0.02, 0.1, 0.5] and not decay.is_valid(-3)
    loss = lambda settings: [[float(s[0].partition("=")[2])] for s in settings]  # noqa: E731
    assert tune([Contender("raw", (decay,), ((0,),), loss)])["raw"].best == (-2,)
    tuned = tune([Contender("raw", (decay,), ((1,),), loss, lambda position: position[0] >= 0)])["raw"]
    assert tuned.best == (0,) and set(tuned.losses) == {(2,), (1,), (0,)}, "no setting that is not allowed is measured"


def test_a_setting_that_diverges_is_left():
    def losses(settings):
        rates = [float(setting[0].partition("=")[2]) for setting in settings]
        return [[math.inf if rate > 0.003 else abs(rate - 0.001)] * 3 for rate in rates]

    tuned = tune([Contender("raw", (Axis("schedule.peak_rate", 0.002, 2),), ((0,), (1,)), losses)])["raw"]
    assert tuned.mean((1,)) == math.inf and tuned.best == (-1,)


def test_a_contender_that_is_done_measures_what_its_rival_needs():
    (one, of_one), (other, of_other) = bowl("raw", 1, 0), bowl("merged", 1, 3)
    tune([one, other])
    assert set(of_one) == set(of_other), "their runs are shared"


def test_a_best_setting_at_the_edge_after_the_limit_is_refused():
    contender = Contender("raw", (RATE,), ((0,),), lambda settings: [[float(s[0].partition("=")[2])] for s in settings])
    with pytest.raises(UserError, match=r"raw: the best of \d+ settings is at the edge .*schedule.peak_rate="):
        tune([contender], limit=6)
