import json
import shutil
import subprocess
import time

import pytest
import tiny

from pma_jax.evaluation import watch as watching
from pma_jax.evaluation.watch import watch
from pma_jax.merging import recipes
from pma_jax.runs import snapshots, steps
from pma_jax.runs.directory import is_run, open_run, read_metric_records
from pma_jax.training.metrics import MetricsLog


@pytest.fixture
def copy(finished, tmp_path):
    """Return a copy of the finished run, which the test may change."""
    return open_run(shutil.copytree(finished.path, tmp_path / "run"))


@pytest.fixture
def evaluated(monkeypatch):
    """Record one item per evaluation."""
    make, calls = watching.make_evaluator, []

    def counted(*arguments):
        evaluator = make(*arguments)

        class Counted:
            sample = evaluator.sample

            def __call__(self, params):
                calls.append(1)
                return evaluator(params)

        return Counted()

    monkeypatch.setattr(watching, "make_evaluator", counted)
    return calls


def previews(run):
    """Return the loss of each watched preview, keyed by (recipe, step)."""
    records = read_metric_records(run.path / "watch.jsonl")
    actual = {(r["recipe"], r["step"]): r["loss"] for r in records}
    assert len(actual) == len(records), "each preview once"
    assert all((r["kind"], r["by"], r["tokens"]) == ("preview", "watch", 256 * r["step"]) for r in records)
    return actual


def trainer_previews(run):
    return {(r["recipe"], r["step"]): r["loss"] for r in run.metrics if r["kind"] == "preview" and "by" not in r}


@pytest.mark.slow
def test_run_trained_by_another_process_is_followed_to_its_end(workspace, tmp_path):
    file = tiny.write_config(
        tmp_path / "config.py", workspace, training__total_tokens=40 * 1024, preview__windows=(), preview__recipe="wma"
    )
    workdir, arguments = tmp_path / "run", {"stdout": subprocess.PIPE, "text": True, "env": tiny.environment(1)}
    with subprocess.Popen(
        tiny.command("train", "--config", file, "--workdir", workdir), stderr=subprocess.DEVNULL, **arguments
    ) as trainer:
        while trainer.poll() is None and not is_run(workdir):
            time.sleep(0.05)
        watcher = tiny.command("watch", workdir, "--windows", "2,3", "--poll-seconds", "0.05")
        with subprocess.Popen(watcher, stderr=subprocess.PIPE, **arguments) as following:
            first = following.stdout.readline()
            assert trainer.poll() is None, "the first preview is printed while the run trains"
            assert "held-out loss of wma:2" in first
            lines, errors = following.communicate(timeout=240)
        assert trainer.wait(timeout=240) == 0
    assert (following.returncode, errors) == (0, "")
    run = open_run(workdir)
    snapshots = run.snapshots
    stored = [tiny.named(tiny.read(s)) for s in snapshots]
    actual = previews(run)
    expected = [(f"wma:{n}", s.step) for k, s in enumerate(snapshots) for n in (2, 3) if n <= k + 1]
    assert len(snapshots) == 40 and list(actual) == expected and len(lines.splitlines()) == len(expected) - 1
    for k in (1, 2, 20, 39):
        for n in (2, 3)[: k if k < 2 else 2]:
            weights = recipes.wma(n)
            loss = tiny.loss_of_sum(run, stored[k + 1 - n : k + 1], weights)
            assert actual[f"wma:{n}", snapshots[k].step] == pytest.approx(loss, rel=1e-5)
    assert all("by" not in r for r in read_metric_records(run.path / "metrics.jsonl"))
    assert [r for r in run.metrics if r["kind"] == "preview"] == read_metric_records(run.path / "watch.jsonl")


def test_previews_equal_the_trainers(copy):
    lines = list(watch(copy))  # Ends by itself: the run is at its horizon.
    assert previews(copy) == pytest.approx(trainer_previews(copy), rel=1e-6)
    assert len(lines) == len(previews(copy)) == 9


def test_interrupted_watch_resumes_where_it_stopped(copy, evaluated):
    list(watch(copy))
    uninterrupted, log = previews(copy), copy.path / "watch.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    # Killed in the middle of the fifth record, after those of steps 8, 12 and 12 and one of step 16.
    log.write_text("".join(lines[:4]) + lines[4][:30])
    evaluated.clear()
    assert len(list(watch(copy))) == 5 and len(evaluated) == 5
    assert log.read_text().splitlines(keepends=True)[:4] == lines[:4]
    assert previews(copy) == uninterrupted


def test_completed_watch_reads_no_snapshot(copy, evaluated, monkeypatch):
    list(watch(copy))
    before, count = (copy.path / "watch.jsonl").read_bytes(), len(evaluated)
    monkeypatch.setattr(snapshots, "restore_params", lambda *_: pytest.fail("a snapshot was read"))
    assert list(watch(copy)) == []
    assert (copy.path / "watch.jsonl").read_bytes() == before and len(evaluated) == count


def test_unpublished_snapshot_is_not_read(copy):
    newest = copy.snapshots[-1]
    mark = newest.path / steps.COMMIT_MARKER
    content = mark.read_bytes()
    mark.unlink()
    list(watch(copy, once=True))
    assert max(step for _, step in previews(copy)) == 20
    mark.write_bytes(content)
    assert len(list(watch(copy, once=True))) == 2
    assert previews(copy) == pytest.approx(trainer_previews(copy), rel=1e-6)


def test_snapshots_published_while_waiting_are_evaluated(copy, monkeypatch):
    hidden = copy.path / "hidden"
    (copy.path / "snapshots").rename(hidden)
    steps = iter(tiny.SNAPSHOTS)

    def publish_one(seconds):
        assert seconds == 5.0
        (copy.path / "snapshots").mkdir(exist_ok=True)
        step = str(next(steps))
        (hidden / step).rename(copy.path / "snapshots" / step)

    monkeypatch.setattr(watching.time, "sleep", publish_one)
    assert len(list(watch(copy))) == 9
    assert previews(copy) == pytest.approx(trainer_previews(copy), rel=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_snapshot_removed_by_retention_is_skipped_and_reported(copy, monkeypatch, when):
    read = snapshots.restore_params

    def deleting(snapshot, abstract):
        if snapshot.step != 12:
            return read(snapshot, abstract)
        params = None if when == "before" else read(snapshot, abstract)
        shutil.rmtree(snapshot.path)
        return read(snapshot, abstract) if params is None else params

    monkeypatch.setattr(snapshots, "restore_params", deleting)
    lines = list(watch(copy))
    reports = [line for line in lines if line.startswith("skipped: ")]
    assert len(reports) == 1 and str(copy.path / "snapshots" / "12") in reports[0] and "\n" not in reports[0]
    # No merge spans the gap.
    assert list(previews(copy)) == [("sma:2", 8), ("sma:2", 20), ("sma:2", 24), ("sma:3", 24)]
    for key, loss in previews(copy).items():
        assert loss == pytest.approx(trainer_previews(copy)[key], rel=1e-6)


def test_snapshot_removed_before_it_was_listed_leaves_a_gap_too(copy):
    shutil.rmtree(copy.path / "snapshots" / "12")
    list(watch(copy))
    assert list(previews(copy)) == [("sma:2", 8), ("sma:2", 20), ("sma:2", 24), ("sma:3", 24)]


def test_snapshot_already_in_memory_may_be_removed(copy, monkeypatch):
    hidden = copy.path / "hidden"
    (copy.path / "snapshots").rename(hidden)
    steps = iter(tiny.SNAPSHOTS)

    def publish_one_and_keep_it_alone(_):
        shutil.rmtree(copy.path / "snapshots", ignore_errors=True)
        (copy.path / "snapshots").mkdir()
        step = str(next(steps))
        (hidden / step).rename(copy.path / "snapshots" / step)

    monkeypatch.setattr(watching.time, "sleep", publish_one_and_keep_it_alone)
    list(watch(copy))
    assert previews(copy) == pytest.approx(trainer_previews(copy), rel=1e-6)


def test_corrupt_last_snapshot_does_not_block_the_watch(copy):
    for path in copy.snapshots[-1].path.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
            path.mkdir()
    lines = list(watch(copy))
    assert lines[-1].startswith("skipped: ") and max(step for _, step in previews(copy)) == 20


@pytest.mark.slow
def test_block_means_and_start_tokens(copy):
    tiny.write_block_means(copy)
    text = (copy.path / "config.json").read_text()
    changed = json.loads(text)
    changed["preview"]["start_tokens"] = 3072
    (copy.path / "config.json").write_text(json.dumps(changed))
    run = open_run(copy.path)
    list(watch(run, "wma", [3], "block_mean"))
    means = run.of_kind("block_mean")
    assert list(previews(run)) == [("block/wma:3", 20), ("block/wma:3", 24)]
    expected = tiny.loss_of_sum(run, [tiny.named(tiny.read(s)) for s in means[-3:]], recipes.wma(3))
    assert previews(run)["block/wma:3", 24] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.mesh
def test_resumed_run_keeps_watch_records_separate(copy):
    list(watch(copy))
    watched = (copy.path / "watch.jsonl").read_bytes()
    with MetricsLog(copy, 2048, is_writer=True):
        pass
    own = read_metric_records(copy.path / "metrics.jsonl")
    assert own and all("by" not in r and r["tokens"] <= 2048 for r in own)
    assert (copy.path / "watch.jsonl").read_bytes() == watched
    assert len(copy.metrics) == len(own) + 9


def test_recipe_that_refuses_a_window_is_refused_before_reading(copy):
    with pytest.raises(ValueError, match="at least 3 checkpoints"):
        list(watch(copy, "lagfree:order=2", [2, 3]))
    assert not (copy.path / "watch.jsonl").exists()


@pytest.mark.slow
def test_three_watchers_write_each_preview_once(copy, finished):
    watchers = [watch(copy, once=True) for _ in range(3)]
    lines = []
    while watchers:  # take turns: each evaluates what the others have not written when it lists the snapshots
        for watcher in list(watchers):
            line = next(watcher, None)
            watchers.remove(watcher) if line is None else lines.append(line)
    assert previews(copy).keys() == trainer_previews(finished).keys()
    assert len(lines) == len(previews(copy)), "each preview is reported by the watcher that wrote it"
