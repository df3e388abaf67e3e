import json
import shutil

import processes
import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.checkpoint import open_run, read_records
from pma_jax.evaluation.sweep import sweep
from pma_jax.evaluation.targets import evaluate_targets
from pma_jax.evaluation.watch import watch

B = tiny.BATCH_TOKENS
def assert_same(run, expected, rtol=1e-5):
    """Two runs' numbers and parameters, to what another order of summation leaves of float32."""
    found, wanted = tiny.numbers(run), tiny.numbers(expected)
    assert [(r["kind"], r["tokens"]) for r in found] == [(r["kind"], r["tokens"]) for r in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=rtol), (one, other)
    assert [s.step for s in run.snapshots] == [s.step for s in expected.snapshots]
    assert [s.step for s in run.states] == [s.step for s in expected.states]
    for one, other in zip(run.snapshots, expected.snapshots, strict=True):
        tiny.assert_close(tiny.read(one), tiny.read(other), rtol=1e-4, atol=1e-5)


EVERY_VERB = """
import json, sys
from pathlib import Path
from pma_jax import checkpoint, config
from pma_jax.evaluation.sweep import sweep
from pma_jax.evaluation.targets import evaluate_targets
from pma_jax.evaluation.watch import watch
from pma_jax.training.forking import fork
from pma_jax.training.loop import train
config, fork_config = (config.from_json(Path(path).read_text()) for path in sys.argv[1:3])
workdir, forked = sys.argv[3:5]
run = train(config, workdir)
train(config, workdir)  # complete: nothing is done
lines = list(watch(run, "wma", [2, 3]))
rows = sweep(run, ["sma", "wma"], [2, 4], memory_bytes=1e9 * (1 + hosts.place()[0]))["rows"]
loss = evaluate_targets([workdir], [])[0]["loss"]
fork(run, 4096, fork_config, forked)
train(fork_config, forked)
print(json.dumps([lines, rows, loss]))
"""


def write_configs(folder, **configs):
    """Resolved configurations as files, for processes."""
    paths = []
    for name, made in configs.items():
        (folder / f"{name}.json").write_text(configuration.to_json(made))
        paths.append(folder / f"{name}.json")
    return paths


def test_two_processes_do_what_one_does(finished, tmp_path):
    """Training, snapshots, states, previews, watch, sweep, evaluate and fork, from a corpus that nobody has prepared."""
    fresh = tmp_path / "fresh"
    config = tiny.config(fresh, mesh__data=2, mesh__fsdp=2)
    fork_config = tiny.config(fresh, training__total_tokens=18 * B, mesh__data=2, mesh__fsdp=2)
    configs = write_configs(tmp_path, config=config, fork=fork_config)
    job = processes.script(EVERY_VERB, [*configs, tmp_path / "two", tmp_path / "forked"], 2).check()
    lines, rows, loss = json.loads(job.out(0).splitlines()[-1])
    assert json.loads(job.out(1).splitlines()[-1]) == [lines, rows, loss]
    assert "held-out loss" in job.error(0) and "tokens" not in job.error(1), "one of them says it"
    assert len(list((fresh / "cache").glob("[0-9a-f]*"))) == 1

    two, forked = open_run(tmp_path / "two"), open_run(tmp_path / "forked")
    assert_same(two, finished)
    alone = open_run(shutil.copytree(finished.path, tmp_path / "alone"))
    assert lines == list(watch(alone, "wma", [2, 3]))
    assert len(read_records(two.path / "watch.jsonl")) == len(lines)
    expected = sweep(alone, ["sma", "wma"], [2, 4])["rows"]
    assert rows == [row | {"loss": pytest.approx(row["loss"], rel=1e-5)} for row in expected]
    assert loss == pytest.approx(evaluate_targets([str(alone.path)], [])[0]["loss"], rel=1e-5)
    assert forked.facts["forked_from"]["step"] == 16 and forked.states[-1].step == 18
    trained = {r["step"]: r["loss"] for r in tiny.numbers(finished) if r["kind"] == "train"}
    for record in tiny.numbers(forked):
        if record["kind"] == "train":
            assert record["loss"] == pytest.approx(trained[record["step"]], rel=1e-5)
