"""The runs that merges are judged by are those that the annealing's results name; what they lack is refused."""

import dataclasses
import json

import pytest
from test_study import data_keys

from pma_jax.config.errors import UserError
from pma_jax.studies import experiment
from pma_jax.studies.study import Study
from pma_jax.studies.targets import ALL_SHAPES, COSINE, HORIZONS, target_runs

RATES = {ALL_SHAPES: 0.002, COSINE: 0.004}


@pytest.fixture
def study(workspace, tmp_path):
    overrides = data_keys(workspace)
    return Study(
        tmp_path / "runs",
        ("science_small",),
        (3, 4),
        64,
        evaluation_tokens=400,
        overrides=overrides,
        minimum_documents=2,
    )


@pytest.fixture
def results(study, tmp_path):
    """Write results of an annealing with a rate of its own for each horizon and kind, and return their path."""
    total = study.trunk_config("science_small", 3).training.total_tokens
    size = {
        which: {
            horizon: {
                "units": 16,
                "setting": [f"training.total_tokens={total // divisor}", f"schedule.peak_rate={rate / divisor:g}"],
            }
            for horizon, divisor in HORIZONS.items()
        }
        for which, rate in RATES.items()
    }
    made = {"text": {"corpus_digest": study.describe_text()["corpus_digest"]}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"made": made, "sizes": {"science_small": size}}))
    return path


def rewrite(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize("which", [ALL_SHAPES, COSINE])
def test_each_horizon_has_the_run_of_its_kind_on_every_seed(study, results, which):
    runs = target_runs(study, results, "science_small", which)
    assert list(runs) == list(HORIZONS)
    for horizon, divisor in HORIZONS.items():
        assert [run.seed for run in runs[horizon]] == [3, 4]
        for run in runs[horizon]:
            assert f"schedule.peak_rate={RATES[which] / divisor:g}" in run.changes and run.units == 16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found["sizes"]["science_small"].pop(COSINE), "no cosine of science_small"),
        (lambda found: found["sizes"].pop("science_small"), "no annealing of science_small"),
        (lambda found: found["made"]["text"].update(corpus_digest="other"), "on another text"),
    ],
    ids=["cosine", "size", "text"],
)
def test_results_that_lack_the_kind_are_refused(study, results, change, said):
    rewrite(results, change)
    with pytest.raises(UserError, match=said):
        target_runs(study, results, "science_small", COSINE)


def test_results_of_another_length_and_none_are_refused(study, results, tmp_path):
    longer = dataclasses.replace(study, overrides=(*study.overrides, "training.total_tokens=6291456"))
    with pytest.raises(UserError, match="run its script again"):
        target_runs(longer, results, "science_small")
    with pytest.raises(UserError, match="run experiments/annealing"):
        target_runs(study, tmp_path / "missing.json", "science_small")


def test_a_study_that_does_not_search_takes_the_shape_without_results(study, tmp_path):
    tiny = dataclasses.replace(study, units=16, overrides=(*experiment.TINY, *study.overrides))
    for which, shape in ((ALL_SHAPES, "linear"), (COSINE, "cosine")):
        runs = target_runs(tiny, tmp_path / "missing.json", "science_small", which)
        assert all(f"schedule.decay={shape}" in run.changes for of in runs.values() for run in of)
