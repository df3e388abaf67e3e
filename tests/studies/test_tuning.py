"""Tuning: every contender gets the same number of settings, and its best one has no lower neighbour."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.config.errors import UserError
from pma_jax.studies.tuning import Axis, Contender, Tuned, check_equal_numbers, follow_best, measure_best, search, tune

BATCH, RATE = Axis("training.batch_size_sequences", 4, 2), Axis("schedule.peak_rate", 0.002, 2)
GRID = tuple(itertools.product(range(3), range(-1, 2)))


def values_of(setting):
    return [float(text.partition("=")[2]) for text in setting]


def bowl(name, batch, rate, grid=GRID):
    """Return a contender, and its loss at a setting, which is lowest at a position of each axis."""

    def loss(batch_size, peak_rate):
        return (batch_size / 4 - 2**batch) ** 2 + (peak_rate / 0.002 - 2**rate) ** 2

    return Contender(name, (BATCH, RATE), grid), loss


def measuring(losses, seeds=2):
    """Return a function that measures settings by the loss of each contender, and what it measured of each."""
    measured = {name: [] for name in losses}

    def measure(settings):
        for name, of_one in settings.items():
            measured[name].extend(map(tuple, of_one))
        return {
            name: [[losses[name](*values_of(setting))] * seeds for setting in of_one]
            for name, of_one in settings.items()
        }

    return measure, measured


def tune_one(contender, loss, **options):
    return tune([contender], measuring({contender.name: loss})[0], **options)[contender.name]


@given(st.integers(-2, 4), st.integers(-3, 3), st.integers(-2, 4), st.integers(-3, 3))
def test_each_best_is_found_beyond_the_grid_with_the_same_number_of_settings(b1, r1, b2, r2):
    (one, of_one), (other, of_other) = bowl("raw", b1, r1), bowl("merged", b2, r2)
    measure, measured = measuring({"raw": of_one, "merged": of_other})
    tuned = tune([one, other], measure, limit=80)
    assert tuned["raw"].best == (b1, r1) and tuned["merged"].best == (b2, r2)
    assert len({len(settings) for settings in measured.values()}) == 1
    assert all(len(set(settings)) == len(settings) for settings in measured.values()), "no setting is measured twice"
    assert all(not each.open_neighbours(each.best) for each in tuned.values())


def test_settings_are_overrides_with_four_digits():
    contender, loss = bowl("raw", 1, 0, grid=((1, 0),))
    tuned = tune_one(contender, loss)
    assert contender.overrides((1, 1)) == ["training.batch_size_sequences=8", "schedule.peak_rate=0.004"]
    assert Axis("k", 0.002, 2**0.5).value(1) == 0.002828
    assert len(tuned.losses) == 5 and tuned.best == (1, 0), "the setting and its four neighbours"


def test_best_settings_are_decided_on_more_seeds():
    """The second setting is lower on the further seeds, by more than the first one is lower on the first."""
    rate = Axis("schedule.peak_rate", 1, 2)
    losses = {0.5: 3.0, 1.0: 1.0, 2.0: 1.1, 4.0: 5.0}
    first, first_measured = measuring({"raw": lambda value: losses[value]}, seeds=1)
    more, more_measured = measuring({"raw": lambda value: {1.0: 2.0, 2.0: 1.0}[value]})
    tuned = measure_best(tune([Contender("raw", (rate,), ((0,), (1,)))], first), more, 2)["raw"]
    assert tuned.best == (1,) and tuned.losses == {(0,): [1.0, 2.0, 2.0], (1,): [1.1, 1.0, 1.0]}
    assert len(first_measured["raw"]) == 3 and len(more_measured["raw"]) == 2


def test_a_search_on_one_seed_chooses_among_its_best_settings_on_all():
    axis = Axis("schedule.peak_rate", 1, 2)
    on_first, on_others = {0.5: 3.0, 1.0: 1.0, 2.0: 1.1}, {1.0: 2.0, 2.0: 1.0}
    seen = []

    def measure_on(seeds, settings):
        values = [values_of(setting)[0] for setting in settings["raw"]]
        seen.extend((seed, value) for seed in seeds for value in values)
        return {"raw": [[(on_first if seed == 100 else on_others)[value] for seed in seeds] for value in values]}

    contender = Contender("raw", (axis,), ((0,), (1,)))
    tuned, best = search([contender], measure_on, (100, 101, 102), 2)
    assert best["raw"].best == (1,), "the best on all seeds, not that on the first"
    assert best["raw"].losses == {(0,): [1.0, 2.0, 2.0], (1,): [1.1, 1.0, 1.0]}
    assert tuned["raw"].losses == {(0,): [1.0], (1,): [1.1], (-1,): [3.0]}
    assert {value for seed, value in seen if seed != 100} == {1.0, 2.0} and len(seen) == 7
    tuned, best = search([contender], measure_on, (100, 101), 2, follow_neighbours=False)
    assert best["raw"].best == (0,) and list(tuned["raw"].losses) == [(0,)], "the first setting is taken"


def test_neighbours_of_the_best_finalist_are_followed_until_it_is_lower_than_all():
    axis, seen = Axis("schedule.peak_rate", 1, 2), []

    def measure(settings):
        values = {name: [values_of(setting)[0] for setting in of_one] for name, of_one in settings.items()}
        seen.append(values)
        return {name: [[abs(value - 9)] * 3 for value in of_one] for name, of_one in values.items()}

    contenders = {name: Contender(name, (axis,), ((0,),)) for name in ("low", "at its best")}
    finalists = {
        "low": Tuned(contenders["low"], {(0,): [8.0] * 3, (1,): [7.0] * 3}),
        "at its best": Tuned(contenders["at its best"], {(0,): [1.0] * 3, (1,): [1.5] * 3}),
    }
    tried = {
        name: Tuned(one.contender, {at: [one.losses[at][0]] for at in one.losses}) for name, one in finalists.items()
    }
    tried["at its best"].losses[-1,] = [9.0]
    follow_best(tried, finalists, measure)
    assert seen == [{"low": [4]}, {"low": [8]}, {"low": [16]}], "a neighbour tried in the search is not measured again"
    assert finalists["low"].best == (3,) and finalists["at its best"].best == (0,)


def test_a_search_on_one_seed_alone_measures_each_setting_once():
    seen = []

    def measure_on(seeds, settings):
        seen.append((tuple(seeds), len(settings["raw"])))
        return {"raw": [[abs(values_of(setting)[0] - 1.4)] * len(seeds) for setting in settings["raw"]]}

    axis = Axis("schedule.peak_rate", 1, 2)
    tuned, best = search([Contender("raw", (axis,), ((0,), (1,)))], measure_on, (100,), 1)
    assert seen == [((100,), 2), ((100,), 1)], "the two given and a neighbour of the best; no seed, no measurement"
    assert best["raw"].losses == {(0,): tuned["raw"].losses[0,]} and len(tuned["raw"].losses) == 3


def test_finalists_of_a_shorter_search_are_measured_anew_on_all_seeds():
    axis = Axis("schedule.peak_rate", 1, 2)
    in_full, short, seen = {1.0: 3.0, 2.0: 4.0, 4.0: 2.0}, {0.5: 9.0, 1.0: 2.0, 2.0: 1.0, 4.0: 1.5}, []

    def measure_on(seeds, settings):
        values = [values_of(setting)[0] for setting in settings["raw"]]
        seen.extend((seed, value) for seed in seeds for value in values)
        return {"raw": [[in_full[value]] * len(seeds) for value in values]}

    def measure_first(settings):
        return {"raw": [[short[values_of(setting)[0]]] for setting in settings["raw"]]}

    tuned, best = search([Contender("raw", (axis,), ((0,),))], measure_on, (100, 101), 2, measure_first=measure_first)
    assert sorted(seen) == [(seed, value) for seed in (100, 101) for value in (2.0, 4.0)]
    assert best["raw"].best == (2,) and best["raw"].losses == {(1,): [4.0, 4.0], (2,): [2.0, 2.0]}
    assert tuned["raw"].losses == {(0,): [2.0], (-1,): [9.0], (1,): [1.0], (2,): [1.5]}


def test_a_contender_with_more_settings_than_its_rival_is_refused_by_name():
    one, other = bowl("raw", 1, 0)[0], bowl("merged", 1, 0, grid=GRID[:4])[0]
    with pytest.raises(UserError, match="merged is tuned over 4 settings and raw over 9"):
        tune([one, other], measuring({})[0])
    with pytest.raises(UserError, match="EMA is tuned over 1 settings and SMA over 3"):
        check_equal_numbers({"SMA": 3, "EMA": 1})
    check_equal_numbers({"SMA": 3, "EMA": 3})


def test_values_below_a_minimum_are_no_neighbours():
    axis = Axis("training.batch_size_sequences", 4, 2, minimum=1)
    tuned = tune_one(Contender("raw", (axis,), ((0,),)), lambda batch: batch)
    assert axis.value(tuned.best[0]) == 1 and min(tuned.losses) == tuned.best


def test_values_from_a_limit_on_are_no_neighbours_and_rounding_passes_no_bound():
    """The ends of the axis, 98304 and 786432, have more digits than a setting has."""
    axis = Axis("schedule.decay_start_tokens", 196_608, 2, minimum=98_304, limit=786_432)
    assert [i for i in range(-4, 5) if axis.is_valid(i)] == [-1, 0, 1]
    assert [axis.value(i) for i in (-1, 0)] == [98_304, 196_600], "four digits, but not below the minimum"


def test_zero_is_the_lowest_value_of_its_axis_and_conditions_hold():
    decay = Axis("optimizer.weight_decay", 0.1, 5, zero_at=-2)
    assert [decay.value(i) for i in (-2, -1, 0, 1)] == [0, 0.02, 0.1, 0.5] and not decay.is_valid(-3)
    assert tune_one(Contender("raw", (decay,), ((0,),)), lambda value: value).best == (-2,)
    tuned = tune_one(Contender("raw", (decay,), ((1,),), lambda position: position[0] >= 0), lambda value: value)
    assert tuned.best == (0,) and set(tuned.losses) == {(2,), (1,), (0,)}, "no setting that is not allowed is measured"


def test_a_setting_that_diverges_is_left():
    contender = Contender("raw", (Axis("schedule.peak_rate", 0.002, 2),), ((0,), (1,)))
    tuned = tune_one(contender, lambda rate: math.inf if rate > 0.003 else abs(rate - 0.001))
    assert tuned.mean((1,)) == math.inf and tuned.best == (-1,)


def test_a_contender_that_is_done_measures_what_its_rival_needs():
    (one, of_one), (other, of_other) = bowl("raw", 1, 0), bowl("merged", 1, 3)
    measure, measured = measuring({"raw": of_one, "merged": of_other})
    tune([one, other], measure)
    assert set(measured["raw"]) == set(measured["merged"]), "their runs are shared"


def test_a_best_setting_at_the_edge_after_the_limit_is_refused():
    with pytest.raises(UserError, match=r"raw: the best of \d+ settings is at the edge .*schedule.peak_rate="):
        tune_one(Contender("raw", (RATE,), ((0,),)), lambda rate: rate, limit=6)
