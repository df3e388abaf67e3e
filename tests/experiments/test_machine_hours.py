"""The estimate of all experiments, against the machine time of the runs that they trained."""

import argparse

import pytest
from test_experiments import FOLDER, load_module

from pma_jax.studies import estimate, recorded_runs, run_cache
from pma_jax.studies.study import Study
from pma_jax.studies.tuning import TUNING_SEEDS

TUNED_SEPARATELY = ("science_large", "science_moe")  # by calls that `run_all.py` does not make


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the configurations of the recorded runs with their costs, (training, evaluation)."""
    cache = tmp_path_factory.mktemp("recorded")
    recorded_runs.read_into_cache(FOLDER / "recorded_runs.jsonl.gz", cache)
    finished = run_cache.finished_runs(cache)
    return [(run.config, (run_cache.training_cost(run), run_cache.evaluation_cost(run))) for run in finished]


def mean_speed(costs):
    """Return the mean speed of runs: the seconds of all per token of all."""
    seconds, tokens = ([sum(one[i][key] for one in costs) for i in (0, 1)] for key in ("seconds", "tokens"))
    return estimate.Speed(0.0, seconds[0] / tokens[0], seconds[1] / tokens[1])


@pytest.mark.slow
def test_estimates_count_the_work_that_was_done(recorded, tmp_path, monkeypatch):
    def list_speeds(study, size):
        model, by_batch = study.trunk_config(size, study.seeds[0]).model, {}
        for config, costs in recorded:
            if config.model == model:
                by_batch.setdefault(config.training.batch_size_sequences, []).append(costs)
        known = [estimate.KnownSpeed(mean_speed(costs), batch, 0.0) for batch, costs in by_batch.items()]
        return known or [estimate.KnownSpeed(mean_speed([costs for _, costs in recorded]), 1, 0.0)]

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
    models = [Study(tmp_path).trunk_config(size, 0).model for size in TUNED_SEPARATELY]
    counted = [costs for of, costs in recorded if not (of.model in models and of.training.seed in TUNING_SEEDS)]
    spent = sum(cost["seconds"] for costs in counted for cost in costs) / 3600
    print(f"{hours:.1f} machine hours estimated, {spent:.1f} spent")
    assert hours == pytest.approx(spent, rel=0.25)
