import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from pma_jax import config as configuration
from pma_jax.model import ladder
from pma_jax.model.decoder import abstract_params, activated_parameter_count, parameter_count
from pma_jax.runtime.mesh import AXES, check_mesh

CONFIGS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("[a-z]*.py"))
PAPER = {  # Size: interval in tokens and window, as the paper prints them.
    "dense_411m": (2e9, 6),
    "dense_2b": (5e9, 6),
    "dense_8b": (15e9, 10),
    "dense_70b": (40e9, 10),
    "moe_700m_7b": (4e9, 10),
    "moe_1b3_13b": (8e9, 10),
    "moe_10b_100b": (80e9, 10),
}


def abstract_of(config):
    """Return shapes only: the mesh has many simulated devices, whose parameters would not fit in memory."""
    mesh = jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1])
    return abstract_params(config.model, mesh)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_configuration_resolves_and_round_trips_json(name):
    config = configuration.resolve(configuration.load(name))
    assert configuration.from_json(configuration.to_json(config)) == config


@pytest.mark.parametrize("name", ladder.SIZES)
def test_parameter_count_is_within_5_percent_of_the_name(name):
    config = configuration.resolve(configuration.load(name))
    params, size = abstract_of(config), ladder.SIZES[name]
    assert config.model == size.model
    assert parameter_count(params) == pytest.approx(size.total_params, rel=0.05)
    assert activated_parameter_count(params, config.model) == pytest.approx(size.activated_params, rel=0.05)


def test_every_size_has_a_file_and_the_papers_sizes_exist():
    others = {name for name in CONFIGS if name.startswith(("science_", "replicas_")) or name == "snoo"}
    assert set(ladder.SIZES) | {"tiny", "tiny_moe", "demo"} == set(CONFIGS) - others
    named = {(size.activated_params, size.total_params) for size in ladder.SIZES.values()}
    dense = {(n, n) for n in (411e6, 2e9, 8e9, 70e9)}
    mixtures = {(330e6, 3.3e9), (0.7e9, 7e9), (1.3e9, 13e9), (3e9, 30e9), (10e9, 100e9), (15e9, 150e9), (20e9, 200e9)}
    assert dense | mixtures <= named


@pytest.mark.parametrize("name", PAPER)
def test_interval_and_window_equal_the_papers(name):
    config = configuration.resolve(configuration.load(name))
    assert (config.checkpoint.interval_tokens, config.checkpoint.window) == PAPER[name]
    assert config.training.total_tokens == 20 * config.checkpoint.window * config.checkpoint.interval_tokens


def test_1b3_13b_run_is_as_long_as_the_papers():
    assert configuration.load("moe_1b3_13b").training.total_tokens == 1.6e12


@pytest.mark.parametrize("moe", [False, True])
def test_recommended_intervals_are_near_the_papers_and_increase(moe):
    points = ladder.MOE_POINTS if moe else ladder.DENSE_POINTS
    for params, tokens, window in points:
        interval, recommended_window = ladder.recommend_interval_and_window(params, moe)
        assert 1 / 1.3 < interval / tokens < 1.3
        assert recommended_window == window
    sizes = np.geomspace(1e8, 1e11, 30)
    intervals = [ladder.recommend_interval_and_window(n, moe)[0] for n in sizes]
    assert intervals == sorted(intervals) and len(set(intervals)) > 25


def test_fit_uses_the_papers_points():
    actual = {n for n, *_ in ladder.DENSE_POINTS} | {n for n, *_ in ladder.MOE_POINTS}
    assert actual == {ladder.SIZES[name].activated_params for name in PAPER}
    for points in (ladder.DENSE_POINTS, ladder.MOE_POINTS):
        for params, tokens, window in points:
            assert (tokens, window) in [PAPER[name] for name in PAPER if ladder.SIZES[name].activated_params == params]


@pytest.mark.parametrize("name", ladder.SIZES)
def test_size_divides_over_its_intended_mesh(name):
    """Check by sizes alone: the mesh has 16 devices that this machine lacks."""
    config = configuration.resolve(configuration.load(name))
    tensor, expert = (1, 4) if config.model.experts else (4, 1)
    shape = dict.fromkeys(AXES, 1) | {"fsdp": 4, "tensor": tensor, "expert": expert}
    mesh = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
    check_mesh(dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, cpu_devices=0)), mesh)


def test_documented_table_matches_the_configurations():
    page = (Path(__file__).parents[2] / "docs" / "ladder.md").read_text()
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")
    ]
    units = {"M": 1e6, "B": 1e9}
    assert [row[0] for row in rows] == list(ladder.SIZES)
    for name, *numbers, window, source in rows:
        activated, total, interval = (float(number[:-1]) * units[number[-1]] for number in numbers)
        config, size = configuration.resolve(configuration.load(name)), ladder.SIZES[name]
        assert (activated, total) == pytest.approx((size.activated_params, size.total_params))
        assert (interval, int(window)) == pytest.approx((config.checkpoint.interval_tokens, config.checkpoint.window))
        assert source == ("paper" if name in PAPER else "interpolation")
    for call, interval, window in re.findall(
        r"recommend_interval_and_window\((.*?)\)  # .*?([\d.]+)B tokens, (\d+)", page
    ):
        size, _, moe = call.partition(", moe=")
        assert ladder.recommend_interval_and_window(float(size), moe == "True") == (float(interval) * 1e9, int(window))
