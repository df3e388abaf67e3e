"""Snapshots of each worker (`checkpoint.kinds=point,replica`): saved, evaluated, kept, merged, and written again."""

import jax
import numpy as np
import pytest
import tiny
from test_training import assert_close, cut, make_config, mean, read_state

from pma_jax.config.errors import UserError
from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.sweep import Cell
from pma_jax.evaluation.trajectory import evaluate_pairs
from pma_jax.merging import inspect, verify
from pma_jax.planning.disk import estimate_storage_bytes
from pma_jax.runs.snapshots import read_snapshot
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.loop import train
from pma_jax.training.state import abstract_state

KINDS = ("point", "replica")


@pytest.mark.slow
def test_each_worker_is_saved_and_evaluated(workspace, tmp_path):
    run = train(make_config(workspace, "periodic", checkpoint__kinds=KINDS), tmp_path / "run")
    assert run.worker_kinds == [f"worker_{k}" for k in range(4)]
    for point in run.snapshots:
        of_workers = [tiny.read(read_snapshot(run.path / f"worker_{k}" / str(point.step))) for k in range(4)]
        assert_close(tiny.read(point), mean(jax.tree.map(lambda *leaves: np.stack(leaves), *of_workers)))
        if point.step in tiny.STATES:
            rows = read_state(run, point.step).params
            for k in range(4):
                tiny.assert_equal(of_workers[k], jax.tree.map(lambda leaf, k=k: leaf[k], rows))
    recorded = {(r["worker"], r["tokens"]): r["loss"] for r in run.metrics if r["kind"] == "worker"}
    assert len(recorded) == 4 * len(run.snapshots)
    last = read_snapshot(run.path / "worker_2" / str(run.snapshots[-1].step))
    assert recorded[2, last.tokens] == last.loss
    assert tiny.losses(run.config, [tiny.read(last)]) == pytest.approx([last.loss], abs=1e-6)
    described = inspect.inspect(run.path)
    assert [len(steps) for steps in described["workers"].values()] == [len(run.snapshots)] * 4
    assert "6 snapshots of worker_3, 1,024 to 6,144 tokens" in inspect.format_description(described)
    assert verify.verify(run.path) == []


@pytest.mark.slow
def test_a_worker_is_merged_over_time(workspace, tmp_path):
    run = train(make_config(workspace, "periodic", checkpoint__kinds=KINDS), tmp_path / "run")
    folder = run.path / "worker_1"
    options = ("--kind", "worker_1", "--last", "3", "--out", str(tmp_path / "merged"))
    done = tiny.pma("merge", str(run.path), *options)
    assert done.returncode == 0, done.stderr
    assert tiny.pma("merge", str(folder), "--last", "3", "--out", str(tmp_path / "same")).returncode == 0
    newest = [tiny.read(read_snapshot(folder / str(step))) for step in tiny.SNAPSHOTS[-3:]]
    expected = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), axis=0, dtype=np.float64), *newest)
    assert_close(tiny.read(read_snapshot(tmp_path / "merged")), expected)
    assert_close(tiny.read(read_snapshot(tmp_path / "same")), expected)
    pair = Cell("sma", 3, kind="worker_1"), tiny.HORIZON
    assert evaluate_pairs(run, [pair], SELECT)[pair].loss == pytest.approx(tiny.losses(run.config, [expected])[0])
    wrong = tiny.pma("merge", str(run.path), "--kind", "worker", "--out", str(tmp_path / "none"))
    assert wrong.returncode == 2 and "choose point, block_mean or worker_<k>" in wrong.stderr


@pytest.mark.slow
def test_a_resumed_run_writes_equal_snapshots_of_workers(workspace, tmp_path):
    config = make_config(workspace, "diloco", checkpoint__kinds=KINDS)
    whole = train(config, tmp_path / "whole")
    resumed = train(config, cut(whole, tmp_path / "cut", 8))
    for k in range(4):
        one, other = (x.read_steps(f"worker_{k}") for x in (whole, resumed))
        assert [s.step for s in one] == [s.step for s in other] == tiny.SNAPSHOTS
        for a, b in zip(one, other, strict=True):
            assert a.loss == b.loss
            tiny.assert_equal(tiny.read(a), tiny.read(b))


@pytest.mark.long
def test_workers_that_a_run_no_longer_has_keep_their_snapshots(workspace, tmp_path):
    run = train(make_config(workspace, "diloco", checkpoint__kinds=KINDS), tmp_path / "run")
    path = cut(run, tmp_path / "cut", 8)
    resumed = train(make_config(workspace, "diloco", 2, checkpoint__kinds=KINDS), path)
    steps_of = [[s.step for s in resumed.read_steps(folder)] for folder in resumed.worker_kinds]
    assert steps_of == [tiny.SNAPSHOTS, tiny.SNAPSHOTS, [4, 8], [4, 8]]


@pytest.mark.slow
def test_retention_and_plans_count_each_worker(workspace, tmp_path):
    config = make_config(workspace, "diloco", checkpoint__kinds=KINDS, checkpoint__keep_windows=1)
    run = train(config, tmp_path / "run")
    assert {len(run.read_steps(folder)) for folder in (*run.worker_kinds, "snapshots")} == {3}
    abstract = abstract_state(config, make_mesh(config.mesh))
    disk = estimate_storage_bytes(config, abstract)
    states = disk["states_kept"] * disk["state_bytes"]
    assert disk["bytes_at_the_end"] == states + 3 * 5 * disk["snapshot_bytes"]


def test_replica_alone_is_refused(workspace):
    with pytest.raises(UserError, match="begins with replica: begin with the kind that previews merge"):
        make_config(workspace, "diloco", checkpoint__kinds=("replica",))
    with pytest.raises(UserError, match=r"replicas\.method is none: there are no workers to save"):
        tiny.config(workspace, checkpoint__kinds=KINDS)
