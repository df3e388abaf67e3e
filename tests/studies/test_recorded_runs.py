"""The losses of a cache of runs in one file: a study goes on from it without the snapshots."""

import dataclasses
import gzip
import json
import shutil

import pytest
import tiny
from test_study import data_keys

from pma_jax.config.errors import UserError
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.evaluation.trajectory import LOSSES_FILE_NAME
from pma_jax.studies import experiment, recorded_runs, run_cache
from pma_jax.studies.estimate import PROBE_SEED, choose_speed, list_speeds
from pma_jax.studies.planned import Branch, PlannedEvaluation, PlannedRun
from pma_jax.studies.study import Study

pytestmark = pytest.mark.slow

END = PlannedEvaluation((RAW, Cell("sma", 2)), (16,), REPORT)
TRUNK = PlannedRun("science_small", 0, (), None, (END,))
BRANCH = PlannedRun("science_small", 0, (), Branch(12, 16), (PlannedEvaluation((RAW,), (16,), REPORT),))


@pytest.fixture(scope="module")
def study(workspace, tmp_path_factory):
    overrides = (*experiment.TINY, *data_keys(workspace))
    cache = tmp_path_factory.mktemp("runs")
    study = Study(cache, ("science_small",), (0,), 16, evaluation_tokens=400, overrides=overrides)
    TRUNK.complete(study)
    BRANCH.complete(study)
    return study


@pytest.fixture
def elsewhere(study, tmp_path):
    """Return the study with a cache that was made from a file of recorded runs."""
    path = tmp_path / "recorded_runs.jsonl.gz"
    count = recorded_runs.add_to_file(study.cache, path)
    assert recorded_runs.read_into_cache(path, tmp_path / "cache") == count
    assert recorded_runs.read_into_cache(path, tmp_path / "cache") == 0
    return dataclasses.replace(study, cache=tmp_path / "cache", runs_used={})


def losses(study, planned, cell=RAW):
    return study.losses(planned.get(study), [cell], [16])[cell, 16]


def test_recorded_runs_are_not_trained_again(study, elsewhere, monkeypatch):
    monkeypatch.setattr(run_cache, "train", lambda *_: pytest.fail("trains a recorded run"))
    for planned in (TRUNK, BRANCH):
        assert planned.missing_tokens(elsewhere) == (0, 0)
        planned.complete(elsewhere)
        assert losses(elsewhere, planned) == pytest.approx(losses(study, planned), abs=1e-6)
        assert run_cache.training_cost(planned.get(elsewhere)) == run_cache.training_cost(planned.get(study))
    with pytest.raises(UserError, match=r"only the losses of this run are here.* of 1 merges.*: remove .* to train"):
        losses(elsewhere, TRUNK, Cell("sma", 3))


def test_recorded_paths_are_those_of_the_cache_that_reads_them(study, tmp_path):
    merged = study.merge(TRUNK.get(study), Cell("sma", 2), 16)
    started = dataclasses.replace(TRUNK, changes=(f"training.start_from={merged.path}", "training.seed=5"))
    started.complete(study)
    path = tmp_path / "recorded_runs.jsonl.gz"
    recorded_runs.add_to_file(study.cache, path)
    assert str(study.cache) not in gzip.decompress(path.read_bytes()).decode()
    recorded_runs.read_into_cache(path, tmp_path / "cache")
    elsewhere = dataclasses.replace(study, cache=tmp_path / "cache", runs_used={})
    there = str(merged.path).replace(str(study.cache), str(elsewhere.cache))
    run = dataclasses.replace(started, changes=(f"training.start_from={there}", "training.seed=5")).find(elsewhere)
    assert run and run.config.training.start_from == there
    assert BRANCH.get(elsewhere).metadata["forked_from"]["path"] == str(TRUNK.get(elsewhere).path)


def test_readings_of_snapshots_are_recorded_and_their_lack_trains_again(study, elsewhere, tmp_path):
    wanted = dataclasses.replace(TRUNK, readings=("norm",))
    assert any(wanted.missing_tokens(elsewhere)) and not any(wanted.missing_tokens(study))
    with pytest.raises(UserError, match="only the losses of this run are here"):
        run_cache.get_or_read(wanted.get(elsewhere), "norm", lambda run: {})
    assert run_cache.get_or_read(wanted.get(study), "norm", lambda run: {"l2": 2.5}) == {"l2": 2.5}
    path = tmp_path / "more.jsonl.gz"
    recorded_runs.add_to_file(study.cache, path)
    recorded_runs.add_to_file(elsewhere.cache, path)  # a cache without the reading does not remove it
    recorded_runs.read_into_cache(path, tmp_path / "third")
    third = dataclasses.replace(study, cache=tmp_path / "third", runs_used={})
    assert not any(wanted.missing_tokens(third))
    assert run_cache.get_or_read(wanted.get(third), "norm", lambda run: pytest.fail("reads again")) == {"l2": 2.5}
    wanted.complete(elsewhere)
    assert run_cache.get_or_read(wanted.get(elsewhere), "norm", lambda run: {"l2": 3.5}) == {"l2": 3.5}


def test_a_run_of_which_more_is_read_is_trained_again(study, elsewhere):
    more = dataclasses.replace(TRUNK, evaluations=(dataclasses.replace(END, cells=(RAW, Cell("sma", 3))),))
    total = TRUNK.get(study).config.training.total_tokens
    assert more.missing_tokens(elsewhere) == (total, 2 * 400)
    more.complete(elsewhere)
    assert losses(elsewhere, more, Cell("sma", 3)) == pytest.approx(losses(study, TRUNK, Cell("sma", 3)), abs=1e-6)


def test_a_branch_of_a_recorded_trunk_trains_both(study, elsewhere):
    shorter = dataclasses.replace(BRANCH, branch=Branch(14, 16))
    shorter.complete(elsewhere)
    assert losses(elsewhere, shorter) == pytest.approx(losses(study, shorter), abs=1e-6)


def test_the_file_keeps_what_it_has(study, elsewhere, tmp_path):
    path = tmp_path / "recorded_runs.jsonl.gz"
    first = path.read_bytes()
    recorded_runs.add_to_file(elsewhere.cache, path)
    assert path.read_bytes() == first
    losses(study, TRUNK, Cell("sma", 4))
    recorded_runs.add_to_file(study.cache, path)
    (run,) = [run for run in recorded_runs.read_file(path) if run["key"] == TRUNK.get(study).path.parent.name]
    (by_merge,) = run["losses"].values()
    assert any(key.startswith("sma:4 at") for key in by_merge)


def test_losses_of_two_trainings_are_not_mixed(study, elsewhere, tmp_path):
    path, key = tmp_path / "recorded_runs.jsonl.gz", TRUNK.get(study).path.parent.name
    shutil.copytree(TRUNK.get(study).path.parent, tmp_path / "other" / key)
    file = tmp_path / "other" / key / "run" / LOSSES_FILE_NAME
    stored = json.loads(file.read_text())
    ((digest, by_merge),) = stored.items()
    moved = {merge: [1.001 * nats for nats in nats_D] for merge, nats_D in by_merge.items()}

    def record(more):
        added = {f"more {i}": next(iter(moved.values())) for i in range(more)}
        file.write_text(json.dumps({digest: moved | added}))
        recorded_runs.add_to_file(tmp_path / "other", path)
        (run,) = [run for run in recorded_runs.read_file(path) if run["key"] == key]
        return run["losses"][digest]

    before, merge = record(0), next(iter(by_merge))
    assert before.keys() == by_merge.keys() and before[merge] == pytest.approx(by_merge[merge], abs=1e-3)
    after = record(1)  # this training has more losses: it replaces the other
    assert after.keys() == {*by_merge, "more 0"} and after[merge] == pytest.approx(moved[merge], abs=1e-3)


def test_runs_that_measure_the_speed_of_a_machine_are_not_recorded(study, tmp_path):
    shutil.copytree(TRUNK.get(study).path.parent, tmp_path / "cache" / "probe")
    file = tmp_path / "cache" / "probe" / "run" / "config.json"
    config = json.loads(file.read_text())
    config["training"]["seed"] = PROBE_SEED
    file.write_text(json.dumps(config))
    assert recorded_runs.add_to_file(tmp_path / "cache", tmp_path / "recorded_runs.jsonl.gz") == 0


def test_recorded_seconds_estimate_the_time_without_a_run(elsewhere, monkeypatch):
    monkeypatch.setattr("pma_jax.studies.estimate.complete_all", lambda *_: pytest.fail("trains to measure the speed"))
    speed = choose_speed(list_speeds(elsewhere, TRUNK.size), TRUNK.batch_sequences(elsewhere))
    costs = [run_cache.training_cost(run) for run in run_cache.finished_runs(elsewhere.cache)]
    per_token = [cost["seconds"] / cost["tokens"] for cost in costs]
    assert min(per_token) <= speed.train_seconds <= max(per_token)
    assert speed.start_seconds == 0 and speed.evaluate_seconds > 0


def test_a_key_that_is_no_name_of_an_entry_is_refused(study, tmp_path):
    path = tmp_path / "recorded_runs.jsonl.gz"
    recorded_runs.add_to_file(study.cache, path)
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    lines[-1] = json.dumps(json.loads(lines[-1]) | {"key": "../elsewhere"}).encode()
    path.write_bytes(gzip.compress(b"".join(lines)))
    with pytest.raises(UserError, match=r"line \d+: '../elsewhere' is not the key of a run"):
        recorded_runs.read_into_cache(path, tmp_path / "cache")
    assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "cache").exists()


def test_a_folder_without_runs_is_one_line_and_writes_nothing(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "missing"):
        monkeypatch.setattr("sys.argv", ["recorded_runs", str(folder), str(tmp_path / "file.gz")])
        with pytest.raises(SystemExit, match=r"error: no runs in .*: give the directory"):
            recorded_runs.main()
    assert not (tmp_path / "file.gz").exists()


def test_more_losses_of_a_branch_do_not_train_its_recorded_trunk(study, elsewhere, monkeypatch):
    shutil.copytree(BRANCH.get(study).path.parent, BRANCH.get(elsewhere).path.parent, dirs_exist_ok=True)
    more = dataclasses.replace(BRANCH, evaluations=(dataclasses.replace(END, cells=(Cell("sma", 3),)),))
    monkeypatch.setattr(run_cache, "train", lambda *_: pytest.fail("trains a recorded run"))
    more.complete(elsewhere)
    assert run_cache.has_losses_only(TRUNK.get(elsewhere))


@pytest.mark.parametrize(
    "data",
    [b"{}\n", gzip.compress(b'{"key": 1}\n'), gzip.compress(b'{"a": 1}')[:-9]],
    ids=["not gzipped", "wrong type", "cut"],  # the compressed bytes hold the time, which differs between processes
)
def test_a_damaged_file_is_one_line(tmp_path, data):
    path = tmp_path / "recorded_runs.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(UserError, match="recorded_runs"):
        recorded_runs.read_into_cache(path, tmp_path / "cache")
    assert not tiny.contents(tmp_path / "cache")
