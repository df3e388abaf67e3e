"""Averaging between workers (experiments/replicas): bytes sent, settings, the search, readouts, and the page."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sent_bytes
import tiny
import traffic
import worker_estimates
import worker_figure
import worker_page
import worker_readouts
import worker_search
import worker_settings
from worker_settings import WORKERS, Ground

from pma_jax import config as configuration
from pma_jax.config import ReplicasConfig
from pma_jax.replicas import fragments, method, quantize, sparta
from pma_jax.replicas.method import Sync
from pma_jax.studies import experiment, pages
from pma_jax.studies.study import Study
from pma_jax.studies.tuning import TUNING_SEEDS

SCRIPT = Path(__file__).parents[2] / "experiments" / "replicas" / "script.py"
PARAMS = {
    "blocks": {"weight": jnp.zeros((3, 5, 7)), "scale": jnp.zeros((3, 5))},
    fragments.EMBEDDING: jnp.zeros((11, 5)),
    "final_norm": jnp.zeros(5),
}
ELEMENTS = 105 + 15 + 55 + 5


def load_script():
    spec = importlib.util.spec_from_file_location("replicas_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return Study(tmp_path_factory.mktemp("cache"), sizes=("science_replicas",), seeds=tuple(range(8)))


@pytest.fixture(scope="module")
def ground(study):
    return worker_settings.find_ground(study)


def settings_of(ground):
    experiments = worker_settings.list_settings(ground, 8, {})
    return {name: setting for settings in experiments.values() for name, setting in settings.items()}


def config_of(study, ground, changes):
    return dataclasses.replace(study, units=ground.units).trunk_config(ground.size, 0, changes)


# --- Bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_sync_are_those_of_what_is_sent():
    config = ReplicasConfig(method="diloco", count=4)
    assert sent_bytes.sync_bytes(config, Sync(outer=True), PARAMS) == 4 * ELEMENTS
    assert sent_bytes.sync_bytes(config, Sync(received=0), PARAMS) == 0
    config = ReplicasConfig(method="sparta", count=4, sparta_share=0.1)
    chosen = sparta.choose(jax.random.key(0), [leaf.size for leaf in jax.tree.leaves(PARAMS)], 0.1)
    assert sent_bytes.sync_bytes(config, Sync(share=True), PARAMS) == sum(4 * index.size for index in chosen)
    both = sent_bytes.sync_bytes(config, Sync(share=True, outer=True), PARAMS)
    assert both == sum(4 * index.size for index in chosen) + 4 * ELEMENTS


@pytest.mark.parametrize("kind", ["int8", "int4", "e3m0"])
@pytest.mark.parametrize("fragment", [0, 1])
def test_bytes_of_a_rounded_fragment_are_those_of_its_codes_and_scales(kind, fragment):
    config = ReplicasConfig(method="streaming", count=4, streaming_fragments=2, streaming_dtype=kind)
    leaves = fragments.take(PARAMS, fragment, 2)

    def sent(leaf):
        scale = quantize.leaf_scales([leaf[None]], kind)[0][0]
        return quantize.pack(quantize.quantize_leaf(leaf, scale, kind), kind), scale

    arrays = [array for leaf in leaves for array in jax.eval_shape(sent, leaf)]
    expected = sum(array.size * array.dtype.itemsize for array in arrays)
    assert sent_bytes.sync_bytes(config, Sync(sent=fragment), PARAMS) == expected


def test_bytes_of_complete_runs(study, ground):
    elements = 56_544
    params = {"w": jax.ShapeDtypeStruct((elements,), jnp.float32)}
    of = lambda changes: sent_bytes.sent_bytes(config_of(study, ground, changes), params)  # noqa: E731
    assert of(()) == 1280 * 4 * elements
    assert of(worker_settings.diloco(ground, 4)) == of(worker_settings.noloco(ground, 4)) == 40 * 4 * elements
    assert of(worker_settings.diloco(ground, 1)) == 0
    # The averages come one step after the snapshots, so that the last one is not reached.
    assert of(worker_settings.periodic(ground, 4, 32)) == 39 * 4 * elements
    assert of(worker_settings.periodic(ground, 4, 1)) == 1280 * 4 * elements
    assert of(worker_settings.periodic(ground, 4, 0)) == 0
    assert of(worker_settings.sparta(ground, 0.005)) == 1280 * 4 * math.ceil(0.005 * elements)


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_every_setting_is_a_valid_configuration_of_equal_tokens(study, ground):
    assert (ground.units, ground.unit_steps, ground.batch_tokens) == (40, 32, 1024)
    for name, setting in settings_of(ground).items():
        config = config_of(study, ground, (*setting.changes, *worker_search.COMMON))
        assert config.training.total_tokens == 1_310_720, name
        assert config.checkpoint.interval_tokens == ground.unit_tokens, name
        if setting.workers:
            assert config.replicas.count == setting.workers, name


def test_grids_are_those_of_the_plan(ground):
    experiments = worker_settings.list_settings(ground, 8, {})
    first = set(experiments["1"])
    assert first == {"one worker", "data-parallel, batch 2", "K=2, H=32", "K=8, H=32"} | {
        f"K=4, H={steps}" for steps in (1, 8, 32, 128, "never")
    }
    assert len(experiments["2"]) == 7 and {"DiLoCo, eta=0.7, beta=0", "DiLoCo, eta=1, beta=0.9"} <= set(
        experiments["2"]
    )
    assert all(setting.seeds == 8 for setting in experiments["1"].values())


@pytest.mark.parametrize("steps", [8, 32, 128])
def test_workers_are_read_just_before_an_average(study, ground, steps):
    config = config_of(study, ground, worker_settings.periodic(ground, WORKERS, steps))
    due = [n for n in range(1, 1281) if method.sync_after(config, n * 1024).outer]
    assert due == [n * steps + 1 for n in range(1, 1280 // steps + 1) if n * steps + 1 <= 1280]


def test_tiny_ground_has_only_valid_settings(tmp_path):
    study = Study(tmp_path, units=16, seeds=(0, 1), overrides=experiment.TINY)
    small = worker_settings.find_ground(study)
    assert small.units == 10 and small.layers == 1
    for setting in settings_of(small).values():
        config_of(study, small, setting.changes)


# --- The search -------------------------------------------------------------------------------------------------------


def test_every_contender_of_a_search_gets_as_many_settings_and_no_best_is_at_the_edge(study, ground, monkeypatch):
    def loss_of(search, setting):
        values = [float(text.partition("=")[2]) for text in setting]
        bases = [axis.base for axis in search.axes]
        return sum((math.log2(value / base) - 0.6) ** 2 for value, base in zip(values, bases, strict=True))

    def losses_of(study, ground, searches, settings, seeds):
        losses = {name: [loss_of(searches[name], setting) for setting in of_one] for name, of_one in settings.items()}
        return {
            name: [{model: [loss] * len(seeds) for model in ("raw", "merged")} for loss in of_one]
            for name, of_one in losses.items()
        }

    monkeypatch.setattr(worker_search, "measure_settings", losses_of)
    searched = worker_search.search_all(study, ground)
    for contenders in searched.values():
        assert len({len(one["tried"]) for one in contenders.values()}) == 1
        for one in contenders.values():
            seeds = sorted(len(tried["raw"]) for tried in one["tried"])
            assert seeds[-3:] == [3, 3, 3] and set(seeds[:-3]) == {1}, "the best three on all seeds"
    assert searched["methods"]["DiLoCo"]["best"] == ["schedule.peak_rate=0.005657", "replicas.diloco_rate=1"]
    assert searched["cells"]["K=4, H=32"]["best"] == ["schedule.peak_rate=0.005657"]
    setting = worker_settings.list_settings(ground, 8, {})["4"]["SPARTA, p=0.005, rate x2"]
    assert worker_readouts.rates(setting, searched) == ["schedule.peak_rate=0.011314"]


def test_first_runs_are_those_of_the_grids_on_one_tuning_seed(study, ground):
    runs = worker_search.first_runs(study, ground)
    assert {run.seed for run in runs} == {TUNING_SEEDS[0]}
    later = worker_settings.twice_the_workers(ground, {})
    contenders = len(worker_settings.method_searches(ground)) + len(worker_settings.cell_searches(ground, {}))
    assert len(runs) == 3 * (contenders - len(later))


# --- Readouts ---------------------------------------------------------------------------------------------------------


def test_distance_and_correlation_at_known_values():
    assert worker_readouts.distance(np.array([[1.0, 1.0], [1.0, -1.0]])) == pytest.approx(1)
    assert worker_readouts.correlation(np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])) == pytest.approx(1 / 3)
    assert worker_readouts.correlation(np.ones((3, 4))) == pytest.approx(1)


# --- The page ---------------------------------------------------------------------------------------------------------


def made_up_results(ground: Ground, diverged=()):
    """Return results in which noise is what averaging over workers or in time removes."""
    rng, documents = np.random.default_rng(0), 12
    experiments = worker_settings.list_settings(ground, 8, {})
    settings = {}
    for name, setting in settings_of(ground).items():
        settings[name] = {"setting": list(setting.changes), "tuned": ["schedule.peak_rate=0.004"]}
        if name in diverged:
            settings[name]["diverged"] = [0]
            continue
        losses = {"mean": 1.55, "merged mean": 1.5}
        losses |= {"worker": 1.6, "merged worker": 1.51} if setting.workers else {}
        nats = {
            model: (loss + 0.01 * rng.normal(size=(setting.seeds, documents))) * 1000 for model, loss in losses.items()
        }
        settings[name] |= {"windows": {"mean": 8, "worker": 8}, "document_tokens": [1000] * documents}
        settings[name] |= {"nats": {model: x.tolist() for model, x in nats.items()}, "sent_bytes": 9_047_040}
        if setting.workers:
            spread = rng.uniform(0.1, 0.2, setting.seeds).tolist()
            settings[name]["spread"] = {"distance": spread, "correlation": spread}
    rates = ("0.002", "0.004", "0.008")
    one = {
        "best": ["schedule.peak_rate=0.004"],
        "tried": [{"setting": [f"schedule.peak_rate={rate}"]} for rate in rates],
    }
    at_edge = one | {"best": ["schedule.peak_rate=0.002"]}
    return {
        "made": {"margin": 0.003, "seeds": list(range(8))},
        "size": ground.size,
        "ground": dataclasses.asdict(ground),
        "search": {"seeds": 3, "finalists": 3},
        "searched": {"methods": {"plain": one}, "cells": {"K=4, H=32": at_edge}},
        "experiments": {number: list(of_one) for number, of_one in experiments.items()},
        "counts": [{"workers": 1, "name": "one worker"}, {"workers": 4, "name": "K=4, H=32"}],
        "settings": settings,
    }


def test_page_has_an_interval_with_each_figure_and_answers_the_question(ground):
    results = made_up_results(ground)
    text = worker_page.report(results)
    assert pages.find_bare_figures(text) == []
    assert all(f"### {number}." in text for number in range(1, 7))
    base = worker_page.base_name(results)
    assert worker_estimates.interaction(results, base).mean == pytest.approx(0.04, abs=0.005)
    across = [worker_estimates.gain_across(results, base, merged).mean for merged in (False, True)]
    assert across == pytest.approx([0.05, 0.01], abs=0.005)
    assert "largely overlap" in worker_page.answer(results)
    assert text.count("so that others may be better: `K=4, H=32` (`schedule.peak_rate=0.002`).") == 1
    row = worker_page.summarize(results)
    assert all(dataclasses.astuple(row)) and "nats" in row.effect
    assert set(worker_figure.draw(results)) == {"figure.png"}


def test_nothing_of_a_loss_by_averaging_over_workers_is_said_to_be_left(ground):
    results = made_up_results(ground)
    nats = results["settings"]["K=4, H=never"]["nats"]
    nats["worker"], nats["mean"] = nats["mean"], nats["worker"]
    assert "`K=4, H=never`: averaging over workers loses 0." in worker_page.report(results)


def test_page_says_which_settings_diverged(ground):
    diverged = ("K=4, H=32", "DiLoCo, eta=1, beta=0.9", "SPARTA, p=0.005, rate x2", "plain")
    results = made_up_results(ground, diverged)
    text = worker_page.report(results)
    assert text.count("diverged with 1 seeds") == 5, "K=4, H=32 is a row of two tables"
    assert pages.find_bare_figures(text) == []
    assert all(dataclasses.astuple(worker_page.summarize(results))) and worker_figure.draw(results)


@pytest.mark.parametrize(
    ("left", "noise", "words"),
    [
        (0.01, 0.001, "largely overlap"),
        (0.04, 0.001, "does not give"),
        (0.025, 0.02, "is not decided"),
    ],
)
def test_answer_claims_no_more_than_the_interval_shows(ground, left, noise, words):
    results = made_up_results(ground)
    measured = results["settings"]["K=4, H=32"]
    tokens = np.array(measured["document_tokens"])
    shape = np.shape(measured["nats"]["mean"])
    rng = np.random.default_rng(0)
    for model, loss in {"worker": 1.55, "mean": 1.5, "merged worker": 1.4 + left, "merged mean": 1.4}.items():
        measured["nats"][model] = ((loss + noise * rng.normal(size=shape)) * tokens).tolist()
    assert words in worker_page.describe_remaining(results, "K=4, H=32")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_few_settings_end_to_end(workspace, tmp_path, monkeypatch):
    script, kept = load_script(), ("one worker", "K=4, H=3", "NoLoCo, K=4")
    complete = script.list_settings

    def few(ground, seeds, outer):
        listed = complete(ground, seeds, outer)
        return {number: {name: s for name, s in of_one.items() if name in kept} for number, of_one in listed.items()}

    monkeypatch.setattr(script, "list_settings", few)
    keys = {**tiny.keys(workspace)["data"], "files": tiny.write_functions(workspace / "functions")}
    keys["held_out_percent"] = 20
    given = [f"data.{key}={value}" for key, value in keys.items()]
    arguments = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--tiny"]
    arguments += [f"--config.{text}" for text in (*given, "mesh.cpu_devices=0", "mesh.data=1")]
    results = experiment.run_experiment(
        str(SCRIPT), script.measure, script.report, script.summarize, script.draw, script.plan, arguments=arguments
    )
    assert results["settings"].keys() == set(kept)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["row"] == results["row"]
    noloco = results["settings"]["NoLoCo, K=4"]
    assert set(noloco["nats"]) == {"mean", "merged mean", "worker", "merged worker"}
    assert all(0 < distance < 1 for distance in noloco["spread"]["distance"])
    assert results["made"]["runs"] == 2 * len(kept)
    assert configuration.load("science_replicas").training.batch_size_sequences == 8


def test_the_table_of_bytes_between_slices_is_that_of_the_compiled_programs():
    stored = json.loads(SCRIPT.with_name("traffic.json").read_text())
    page = (SCRIPT.parents[2] / "docs" / "replicas.md").read_text()
    assert pages.extract_results(page).strip() == traffic.format_rows(stored["rows"]).strip()
    for row in stored["rows"]:  # each parameter once in the type that is sent; the step of a worker sends nothing
        assert row["bytes"] == pytest.approx(row["expected_bytes"], rel=0.01)
    assert {row["bytes"] for row in stored["rows"] if row["method"] == traffic.WORKERS} == {0}
    assert {row["method"] for row in stored["rows"]} == traffic.METHODS.keys() | {traffic.WORKERS}
