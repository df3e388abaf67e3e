"""The estimate of all experiments, against the machine time of the runs that they trained."""

import argparse

import pytest
from test_experiments import FOLDER, load_module

from pma_jax.studies import estimate, recorded_runs, run_cache
from pma_jax.studies.study import Study

TUNED_ONLY = ("science_large", "science_moe")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the costs of the recorded runs, (training, evaluation), by model and batch."""
    cache = tmp_path_factory.mktemp("recorded")
    recorded_runs.read_into_cache(FOLDER / "recorded_runs.jsonl.gz", cache)
    costs = {}
    for run in run_cache.finished_runs(cache):
        both = run_cache.training_cost(run), run_cache.evaluation_cost(run)
        costs.setdefault(run.config.model, {}).setdefault(run.config.training.batch_size_sequences, []).append(both)
    return costs


def mean_speed(costs):
    """Return the mean speed of runs: the seconds of all per token of all."""
    seconds, tokens = ([sum(one[i][key] for one in costs) for i in (0, 1)] for key in ("seconds", "tokens"))
    return estimate.Speed(0.0, seconds[0] / tokens[0], seconds[1] / tokens[1])


@pytest.mark.slow
def test_estimates_count_the_work_that_was_done(recorded, tmp_path, monkeypatch):
    everywhere = [cost for by_batch in recorded.values() for costs in by_batch.values() for cost in costs]

    def list_speeds(study, size):
        by_batch = recorded.get(study.trunk_config(size, study.seeds[0]).model, {})
        known = [estimate.KnownSpeed(mean_speed(costs), batch, 0.0) for batch, costs in by_batch.items()]
        return known or [estimate.KnownSpeed(mean_speed(everywhere), 1, 0.0)]

    monkeypatch.setattr(estimate, "list_speeds", list_speeds)
    run_all = load_module(FOLDER / "run_all.py")
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=lambda text: tuple(text.split(",")))
    parser.add_argument("--seeds", type=lambda text: tuple(map(int, text.split(","))))
    hours, trained = 0.0, set()
    for name, options in run_all.list_calls(run_all.QUESTIONS, ["--estimate"]).values():
        monkeypatch.syspath_prepend(str(FOLDER / name))
        script = load_module(FOLDER / name / "script.py")
        given = {key: value for key, value in vars(parser.parse_known_args(options)[0]).items() if value}
        study = Study(tmp_path, tuned=FOLDER / "tuning" / "results.json", workers=2, **script.DEFAULTS | given)
        estimated = estimate.estimate(study, script.plan(study), trained)
        hours, trained = hours + estimated.hours, trained | estimated.trained
    left_out = [Study(tmp_path).trunk_config(size, 0).model for size in TUNED_ONLY]
    counted = [costs for model, by_batch in recorded.items() if model not in left_out for costs in by_batch.values()]
    spent = sum(cost["seconds"] for costs in counted for both in costs for cost in both) / 3600
    print(f"{hours:.1f} machine hours estimated, {spent:.1f} spent")
    assert hours == pytest.approx(spent, rel=0.25)
