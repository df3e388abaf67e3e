"""Planned runs: what is cached is named, workers share the rest, and the machine time is estimated before."""

import dataclasses

import pytest
import tiny
from test_study import data_keys

from pma_jax.config.errors import DivergenceError, UserError
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.studies import experiment, run_cache
from pma_jax.studies.estimate import describe_estimate, estimate
from pma_jax.studies.planned import Branch, OtherWork, PlannedEvaluation, PlannedRun, complete_all
from pma_jax.studies.study import Study

EVALUATION = PlannedEvaluation((RAW, Cell("sma", 2)), (8, 16), REPORT)


@pytest.fixture(scope="module")
def study(workspace, tmp_path_factory):
    overrides = (*experiment.TINY, *data_keys(workspace))
    cache = tmp_path_factory.mktemp("runs")
    return Study(cache, ("science_small",), (0, 1), 16, evaluation_tokens=400, overrides=overrides)


@pytest.mark.slow
def test_runs_are_completed_once_and_then_cached(study):
    trunks = [PlannedRun("science_small", seed, (), None, (EVALUATION,)) for seed in (0, 1)]
    branch = PlannedRun("science_small", 0, (), Branch(12, 16, "cosine"), (PlannedEvaluation((RAW,), (16,), REPORT),))
    plan = [*trunks, branch, OtherWork("fits", "science_small", 0, 0, 4000)]
    tokens = trunks[0].get(study).config.training.total_tokens  # trains, and evaluates nothing
    assert trunks[0].missing_tokens(study) == (0, 4 * 400) and trunks[1].missing_tokens(study) == (tokens, 4 * 400)
    assert branch.missing_tokens(study) == (tokens // 4, 400)
    complete_all(study, plan, 1)
    assert [work.missing_tokens(study) for work in plan] == [(0, 0), (0, 0), (0, 0), (0, 4000)]
    estimated = estimate(study, plan)
    assert estimated.cached == {"science_small": [0, 1], "science_small, cosine decay from unit 12 to 16": [0]}
    assert estimated.dependent == {"fits": [0]} and not estimated.missing
    assert 0 < estimated.hours == estimated.dependent_hours < 0.1
    text = describe_estimate("stable_phase", estimated)
    assert "cached: science_small, seeds 0, 1" in text and "depends on results: fits, seeds 0" in text
    new = PlannedRun("science_small", 9)
    once, twice = (estimate(study, [new] * count).hours for count in (1, 2))
    branched = estimate(study, [new, dataclasses.replace(new, branch=Branch(12, 16))]).hours
    assert once < branched < 2 * once and twice < branched, "a run is trained once, and a branch is shorter"
    key, same = new.training_key(study), dataclasses.replace(new, changes=("schedule.decay=none",))
    assert same.training_key(study) == key, "a change to the value that it has is no other run"
    assert estimate(study, [new]).trained == {key} and not estimate(study, plan).trained
    assert estimate(study, [same], [key]).hours == 0, "another estimate counts it"
    assert run_cache.evaluation_cost(trunks[0].get(study))["tokens"] == 4 * 400
    assert {run.path for run in run_cache.finished_runs(study.cache)} == {w.get(study).path for w in plan[:3]}


@pytest.mark.slow
def test_only_the_losses_of_a_search_are_kept_and_more_trains_the_run_again(study):
    searched = PlannedRun("science_small", 20, (), None, (EVALUATION,), keeps_snapshots=False)
    same = PlannedRun("science_small", 21, (), None, (EVALUATION,))
    complete_all(study, [searched, same], 1)
    run = searched.get(study)
    assert not run.of_kind("point") and same.get(study).of_kind("point")
    assert {path.name for path in run.path.iterdir() if path.is_dir()} == set()
    assert searched.missing_tokens(study) == (0, 0), "its losses are known"
    losses = study.losses(run, EVALUATION.cells, EVALUATION.ends, EVALUATION.part)
    more = dataclasses.replace(searched, evaluations=(PlannedEvaluation((Cell("sma", 4),), (16,), REPORT),))
    trained, evaluated = more.missing_tokens(study)
    assert trained == run.config.training.total_tokens and evaluated == 400
    complete_all(study, [more], 1)
    assert searched.missing_tokens(study)[0] == trained, "the losses of the earlier training are not kept beside it"
    complete_all(study, [searched], 1)
    assert study.losses(searched.get(study), EVALUATION.cells, EVALUATION.ends, EVALUATION.part) == losses


@pytest.mark.slow
def test_entries_that_share_a_training_are_one_piece_of_work(study, monkeypatch, capfd):
    for name, value in tiny.environment(devices=1).items():
        monkeypatch.setenv(name, value)
    first = PlannedRun("science_small", 22, (), None, (EVALUATION,), keeps_snapshots=False)
    other = dataclasses.replace(first, evaluations=(PlannedEvaluation((Cell("sma", 4),), (16,), REPORT),))
    again = dataclasses.replace(other, changes=("schedule.decay=none",))
    complete_all(study, [first, other, again, first, PlannedRun("science_small", 23)], 2)
    assert capfd.readouterr().err.count("training for") == 2, "each is trained once, before its snapshots are removed"
    assert not any(any(run.missing_tokens(study)) for run in (first, other, again))
    run = first.get(study)
    assert run_cache.has_losses_only(run) and not run.of_kind("point")
    kept = dataclasses.replace(first, seed=24)
    complete_all(study, [kept, dataclasses.replace(kept, evaluations=(), keeps_snapshots=True)], 1)
    assert kept.get(study).of_kind("point"), "an entry keeps them"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_share_the_runs_and_their_failure_is_one_line(study, monkeypatch, capfd):
    for name, value in tiny.environment(devices=1).items():
        monkeypatch.setenv(name, value)
    plan = [PlannedRun("science_small", seed, (), None, (EVALUATION,)) for seed in (5, 6, 7)]
    assert estimate(dataclasses.replace(study, workers=2), plan).missing == {"science_small": [5, 6, 7]}
    complete_all(study, plan, 2)
    assert [work.missing_tokens(study) for work in plan] == [(0, 0)] * 3
    wrong = [PlannedRun("science_small", seed, ("data.files=/nowhere/*.txt",), None, ()) for seed in (8, 9)]
    with pytest.raises(UserError, match=r"worker \d failed"):
        complete_all(study, wrong, 2)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines == ["error: data.files: /nowhere/*.txt matches no file: check the glob"] * 2


@pytest.mark.slow
def test_a_run_that_diverges_is_recorded_and_not_trained_again(study, monkeypatch, capfd):
    diverging = PlannedRun("science_small", 3, ("schedule.peak_rate=1e30",), None, (EVALUATION,))
    plan = [diverging, PlannedRun("science_small", 3, (), None, (EVALUATION,))]
    complete_all(study, plan, 1)
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "peak_rate=1e30, seed 3, diverged: step" in line and "not finite" in line]
    assert [work.missing_tokens(study) for work in plan] == [(0, 0)] * 2, "the others are completed"
    assert diverging.has_diverged(study) and not plan[1].has_diverged(study)
    monkeypatch.setattr(run_cache, "train", lambda *arguments: pytest.fail("trained again"))
    with pytest.raises(DivergenceError, match="not finite"):
        diverging.get(study)
    config = study.trunk_config("science_small", 3, diverging.changes)
    run, error = run_cache.get_even_if_diverged(study.cache, config)
    assert run.config == config and "not finite" in error
    config = study.trunk_config("science_small", 3)
    assert run_cache.get_even_if_diverged(study.cache, config) == (plan[1].get(study), "")
