"""Select checkpoints by tokens: ranges, grids, gaps, stages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.merging.selection import Selection, select

TENTHS = np.arange(1, 31) * 100_000


def test_last_selects_the_newest():
    assert select(TENTHS, last=3) == Selection((27, 28, 29))
    assert select(TENTHS).indices == tuple(range(30))
    with pytest.raises(ValueError, match="31 checkpoints are requested and there are 30"):
        select(TENTHS, last=31)


def test_range_includes_both_ends():
    assert select(TENTHS, between_tokens=(200_000, 400_000)).indices == (1, 2, 3)
    assert select(TENTHS, between_tokens=(None, 200_000)).indices == (0, 1)
    assert select(TENTHS, between_tokens=(2_900_000, None), last=1).indices == (29,)
    with pytest.raises(ValueError, match=r"no checkpoint is in 1:2 tokens: there are 30, from 100,000 to 3,000,000"):
        select(TENTHS, between_tokens=(1, 2))


def test_every_selects_the_nearest_and_reports_deviations():
    tokens = [1_000, 2_000, 2_950, 4_000, 6_000, 7_000, 8_040, 9_000]
    chosen = select(tokens, every_tokens=2_000)
    assert [tokens[i] for i in chosen.indices] == [1_000, 2_950, 7_000, 9_000]
    assert chosen.notes == (
        "every 2,000 tokens back from 9,000, nearest within 200",
        "missing: no checkpoint near 5,000 tokens",
        "off grid: 2,950 tokens is used for 3,000",
    )
    assert [tokens[i] for i in select(tokens, every_tokens=1_000, tolerance_tokens=0).indices] == [
        1_000, 2_000, 4_000, 6_000, 7_000, 9_000,
    ]  # fmt: skip


def test_last_of_a_grid_extends_past_missing_checkpoints():
    tokens = [1_000, 2_000, 4_000, 5_000]
    chosen = select(tokens, every_tokens=1_000, last=3)
    assert [tokens[i] for i in chosen.indices] == [2_000, 4_000, 5_000]
    assert any("missing: no checkpoint near 3,000" in note for note in chosen.notes)
    with pytest.raises(ValueError, match="5 checkpoints are requested and there are 4"):
        select(tokens, every_tokens=1_000, last=5)


def test_tiny_interval_over_a_long_run_is_fast():
    assert select([1, 10**13], every_tokens=1).notes[1] == "missing: no checkpoint near 2 to 9,999,999,999,999 tokens"


def test_gaps_and_off_grid_checkpoints_are_reported_without_a_grid_too():
    assert select([100, 200, 300, 600, 700, 750, 850]).notes == (
        "missing: about 2 between 300 and 600 tokens (usual interval 100)",
        "off grid: 750 tokens is 50 after 700 (usual interval 100)",
    )
    assert select(TENTHS).notes == ()


def test_stage_boundary_is_never_crossed_silently():
    tokens, stages = [100, 200, 300, 400], ["stage1", "stage1", "stage2", "stage2"]
    assert select(tokens, last=2, stages=stages).indices == (2, 3)
    with pytest.raises(ValueError, match=r"between stage1 at 200 and stage2 at 300 tokens.*set across_stages"):
        select(tokens, last=3, stages=stages)
    allowed = select(tokens, last=3, stages=stages, across_stages=True)
    assert allowed.indices == (1, 2, 3)
    assert allowed.notes == ("crosses a boundary between stage1 at 200 and stage2 at 300 tokens",)


def test_parallel_runs_at_equal_positions_are_not_one_trajectory():
    tokens, stages = [100, 100, 200, 200], ["ingredient1", "ingredient2"] * 2
    with pytest.raises(ValueError, match="between ingredient1 at 200 and ingredient2 at 200"):
        select(tokens, last=2, stages=stages)
    with pytest.raises(ValueError, match="two checkpoints are at 100 tokens"):
        select(tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last": 0}, "at least 1"),
        ({"every_tokens": 0}, "positive"),
        ({"tolerance_tokens": 5}, "requires every_tokens"),
        ({"stages": ["a"]}, "1 stages for 30"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        select(TENTHS, **options)
    with pytest.raises(ValueError, match="oldest first"):
        select([2, 1])
    with pytest.raises(ValueError, match="no checkpoints"):
        select([])


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40, unique=True), st.integers(1, 10**5))
def test_grid_keeps_order_and_stays_within_the_tolerance(positions, every):
    tokens = np.sort(positions)
    chosen = tokens[list(select(tokens, every_tokens=every).indices)]
    assert chosen[-1] == tokens[-1] and (np.diff(chosen) > 0).all()
    off = (tokens[-1] - chosen) % every
    assert (np.minimum(off, every - off) <= 0.1 * every).all()
