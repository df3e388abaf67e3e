"""Training with several workers: batches, snapshots, exact resume, another number of workers, forks, refusals."""

import dataclasses
import itertools
import shutil

import jax
import numpy as np
import processes
import pytest
import tiny

from pma_jax.config.errors import UserError
from pma_jax.model.decoder import abstract_params, graph_definition
from pma_jax.runs import steps
from pma_jax.runs.directory import open_run
from pma_jax.runtime.mesh import check_mesh, make_mesh
from pma_jax.training.fork import fork
from pma_jax.training.initial_state import make_initial_state
from pma_jax.training.loop import train
from pma_jax.training.state import abstract_state, init_state_from_seed
from pma_jax.training.step import make_train_step
from pma_jax.training.worker_count import restore_state

# At step 8, where a state is saved, three steps of an interval are trained, and a fragment is sent but not used.
METHODS = {
    "periodic": {"interval_tokens": 5 * 256, "periodic_moments": True},
    "diloco": {"interval_tokens": 5 * 256},
    "streaming": {
        "interval_tokens": 4 * 256,
        "streaming_fragments": 2,
        "streaming_delay_tokens": 256,
        "streaming_dtype": "e3m0",
        "streaming_error_feedback": True,
    },
    "sparta": {"sparta_share": 0.05},
    "sparta, diloco": {"sparta_share": 0.05, "sparta_diloco": True, "interval_tokens": 5 * 256},
    "noloco": {"interval_tokens": 5 * 256},
    "diloco, one worker": {"count": 1, "interval_tokens": 5 * 256},  # SNOO
}
# Another number of workers for each method; the other one is tried by hand.
OTHER_COUNTS = {"periodic": 2, "diloco": 2, "streaming": 8, "noloco": 2}


def methods(*slow):
    """Return the methods: those of `slow` run with `make slow`, the others by hand."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else pytest.mark.long) for name in METHODS]


def make_config(workspace, name, count=4, **changes):
    keys = {"replicas__count": count} | {f"replicas__{key}": value for key, value in METHODS[name].items()}
    return tiny.config(workspace, replicas__method=name.split(",")[0], **keys | changes)


def read_state(run, step, config=None):
    """Return a saved state, with the number of workers of a configuration."""
    config = config or run.config
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        saved = next(saved for saved in run.states if saved.step == step)
        return jax.tree.map(np.asarray, restore_state(config, saved, abstract_state(config, mesh)))


def cut(run, target, step):
    """Copy a run as if it had been killed after a step."""
    shutil.copytree(run.path, target)
    for path in target.glob("*/[0-9]*"):
        if int(path.name) > step:
            shutil.rmtree(path)
    return target


def mean(leaves):
    return jax.tree.map(lambda leaf: leaf.mean(0), leaves)


def assert_close(one, other, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), one, other)


@pytest.mark.slow
def test_each_worker_trains_on_its_slice_of_the_batch(workspace):
    smooth = {"optimizer__epsilon": 1e-3}  # so that AdamW does not amplify the rounding of gradients near 0
    config = make_config(workspace, "diloco", **smooth)
    single = tiny.config(workspace, training__batch_size_sequences=2, **smooth)
    rows = np.random.default_rng(0).integers(0, 256, (8, 33)).astype(np.int32)
    with jax.set_mesh(make_mesh(config.mesh)):
        step, one = (make_train_step(c, graph_definition(c.model)) for c in (config, single))
        state, metrics = step(init_state_from_seed(config), rows, 1e-2)
        for k in range(4):
            expected, of_one = one(init_state_from_seed(single), rows[2 * k : 2 * k + 2], 1e-2)
            assert_close(jax.tree.map(lambda leaf, k=k: leaf[k], state.params), expected.params, 1e-5)
            np.testing.assert_allclose(metrics["loss"][k], of_one["loss"], rtol=1e-6)


@pytest.mark.parametrize("name", methods("periodic", "streaming", "noloco"))
def test_a_resumed_run_is_bitwise_equal(workspace, tmp_path, name):
    config = make_config(workspace, name, checkpoint__kinds=("point", "block_mean"))
    whole = train(config, tmp_path / "whole")
    resumed = train(config, cut(whole, tmp_path / "cut", 8))
    tiny.assert_equal(read_state(whole, 24), read_state(resumed, 24))
    for kind in config.checkpoint.kinds:
        for one, other in zip(whole.of_kind(kind), resumed.of_kind(kind), strict=True):
            tiny.assert_equal(tiny.read(one), tiny.read(other))


@pytest.mark.slow
def test_a_run_with_workers_that_was_killed_resumes_to_the_same_bits(workspace, tmp_path):
    keys = {f"replicas__{key}": value for key, value in METHODS["streaming"].items()}
    file = tiny.write_config(tmp_path / "config.py", workspace, replicas__method="streaming", replicas__count=4, **keys)
    for count in (12, 11):
        processes.kill_after_steps(count, ["train", "--config", file, "--workdir", tmp_path / "run"])
    run = open_run(tmp_path / "run")
    assert not run.states or run.states[-1].step < 24
    whole, resumed = train(run.config, tmp_path / "whole"), train(run.config, run.path)
    tiny.assert_equal(read_state(whole, 24), read_state(resumed, 24))
    assert tiny.numbers(resumed) == tiny.numbers(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["periodic", "diloco"])
def test_all_workers_of_a_fork_start_from_given_weights(workspace, finished, tmp_path, name):
    run = train(make_config(workspace, name), tmp_path / "run")
    still = make_config(workspace, name, schedule__peak_rate=1e-12)  # so that snapshots show where it started
    weights = finished.snapshots[0]
    forked = train(still, fork(run, 8 * 256, still, tmp_path / "fork", weights=weights.path).path)
    assert_close(tiny.read(forked.snapshots[-1]), tiny.read(weights))
    assert_close(read_state(forked, 24).params, jax.tree.map(lambda x: np.stack([x] * 4), tiny.read(weights)))


@pytest.mark.parametrize("name", methods("noloco", "diloco"))
def test_snapshots_are_the_outer_parameters_or_the_mean_of_the_workers(workspace, tmp_path, name):
    run = train(make_config(workspace, name), tmp_path / "run")
    state, snapshot = read_state(run, 16), next(s for s in run.snapshots if s.step == 16)
    if name in ("periodic", "sparta"):
        expected = mean(state.params)
    else:
        expected = mean(state.outer["params"]) if name == "noloco" else state.outer["params"]
    assert_close(tiny.read(snapshot), expected)
    if run.config.replicas.count > 1:
        distances = jax.tree.map(lambda leaf: np.abs(leaf - leaf[:1]).max(), state.params)
        assert max(jax.tree.leaves(distances)) > 1e-4, "in the middle of an interval, workers differ"
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    averaged = {"streaming": 16, "sparta": 16}.get(name, 15)  # steps
    assert steps.read_metadata(snapshot.path, ())["averaged_at_tokens"] == averaged * tiny.BATCH_TOKENS


@pytest.mark.slow
def test_block_means_are_over_steps_and_workers(workspace, tmp_path):
    config = make_config(workspace, "periodic", replicas__interval_tokens=10**6, checkpoint__kinds=("block_mean",))
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, block_every_steps=2))
    run, after_step = tiny.train_and_record(config, tmp_path / "run")
    for snapshot in run.of_kind("block_mean"):
        each = [mean(after_step[step]) for step in (snapshot.step - 2, snapshot.step)]
        assert_close(tiny.read(snapshot), jax.tree.map(lambda a, b: (a + b) / 2, *each))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=pytest.mark.slow if count == other else pytest.mark.long)
        for (name, other), count in itertools.product(OTHER_COUNTS.items(), (2, 8))
    ],
)
def test_another_number_of_workers_goes_on_from_a_state(workspace, tmp_path, capfd, name, count):
    run = train(make_config(workspace, name), tmp_path / "run")
    path = cut(run, tmp_path / "cut", 8)
    changed = make_config(workspace, name, count)
    there, here = read_state(run, 8), read_state(open_run(path), 8, changed)
    outer = there.outer["params"] if name in ("diloco", "streaming") else None
    if outer is not None:
        assert_close(here.outer["params"], outer, 0)
    shared = outer or mean(there.outer["params"] if name == "noloco" else there.params)
    for k in range(count):
        expected = jax.tree.map(lambda leaf, k=k: leaf[k], there.params) if k < 4 else shared
        assert_close(jax.tree.map(lambda leaf, k=k: leaf[k], here.params), expected)
    capfd.readouterr()
    resumed = train(changed, path)
    said = capfd.readouterr()
    assert f"the state was saved with 4 workers, and goes on with {count} workers" in said.out + said.err
    assert resumed.snapshots[-1].loss < 1.2 * run.snapshots[-1].loss


@pytest.mark.parametrize("name", ["periodic", "diloco", "noloco"])
def test_all_workers_start_from_a_snapshot(workspace, finished, name):
    snapshot = finished.snapshots[-1]
    config = make_config(workspace, name, training__start_from=str(snapshot.path))
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = jax.tree.map(np.asarray, make_initial_state(config, abstract_params(config.model, mesh)))
    expected = tiny.read(snapshot)
    for k in range(4):
        assert_close(jax.tree.map(lambda leaf, k=k: leaf[k], state.params), expected, 0)
    if name == "diloco":
        assert_close(state.outer["params"], expected, 0)
        assert not any(leaf.any() for leaf in jax.tree.leaves(state.outer["momentum"]))
    if name == "noloco":
        assert_close(jax.tree.map(lambda leaf: leaf[3], state.outer["params"]), expected, 0)


@pytest.mark.slow
def test_forks_to_one_model_and_to_another_method(workspace, tmp_path):
    run = train(make_config(workspace, "diloco"), tmp_path / "run")
    there = read_state(run, 8)
    single = tiny.config(workspace)
    alone = fork(run, 8 * 256, single, tmp_path / "alone")
    assert_close(read_state(alone, 8).params, there.outer["params"], 0)
    assert train(single, alone.path).snapshots[-1].tokens == tiny.HORIZON
    streaming = make_config(workspace, "streaming")
    other = fork(run, 8 * 256, streaming, tmp_path / "other")
    assert_close(read_state(other, 8).outer["params"], there.outer["params"], 0)
    assert train(streaming, other.path).snapshots[-1].tokens == tiny.HORIZON
    back = make_config(workspace, "diloco")
    again = fork(train(single, tmp_path / "single"), 8 * 256, back, tmp_path / "again")
    state = read_state(again, 8)
    assert_close(state.outer["params"], jax.tree.map(lambda leaf: leaf[3], state.params), 0)
    assert train(back, again.path).snapshots[-1].tokens == tiny.HORIZON


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # Marks of 1,000 tokens are three or four steps of 256 tokens apart.
        ({"method": "streaming", "streaming_fragments": 1, "interval_tokens": 1000, "streaming_delay_tokens": 768},
         "must be less than the complete steps"),
        ({"method": "diloco", "count": 3}, r"replicas.count \(3\) workers.* must divide training.batch_size"),
        ({"method": "noloco", "count": 1}, "replicas.count must be even, not 1"),
        ({"method": "diloco", "interval_tokens": 100}, r"replicas.interval_tokens \(100\) is less than one step's 256"),
        ({"method": "streaming", "streaming_fragments": 3}, r"streaming_fragments \(3\) is more than the 2 of"),
        ({"method": "diloco", "sparta_share": 0.1}, "sparta_share is a key of replicas.method=sparta, and"),
        ({"method": "sparta", "diloco_rate": 0.1}, "diloco_rate is a key of replicas.method=diloco"),
        ({"count": 2}, "replicas.count is without effect, and replicas.method is none"),
        ({"method": "sparta", "interval_tokens": 1000}, "interval_tokens is without effect"),
        ({"method": "streaming", "streaming_fragments": 1, "streaming_delay_tokens": 10**6}, "must be less than"),
        ({"method": "streaming", "streaming_fragments": 1, "streaming_delay_tokens": 10}, "0 or at least one step"),
        ({"method": "streaming", "streaming_fragments": 1, "streaming_error_feedback": True}, "another repl"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(workspace, keys, message):
    with pytest.raises(UserError, match=message) as refused:
        tiny.config(workspace, **{f"replicas__{key}": value for key, value in keys.items()})
    assert "\n" not in str(refused.value)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("method", "count", "replica", "message"),
    [
        ("diloco", 4, 8, r"mesh.replica \(8\) must divide replicas.count \(4\)"),
        ("noloco", 16, 4, "noloco"),
    ],
)
def test_workers_that_do_not_fit_the_mesh_are_refused(workspace, method, count, replica, message):
    keys = {"mesh__replica": replica, "mesh__data": -1, "training__batch_size_sequences": 16}
    with pytest.raises(UserError, match=message) as refused:
        config = tiny.config(workspace, replicas__method=method, replicas__count=count, **keys)
        check_mesh(config, make_mesh(config.mesh))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mesh__replica", 2, "mesh.replica is 2, and replicas.method is none"),
        ("optimizer__name", "schedule_free_adamw", "does not combine"),
        ("optimizer__ema_half_life_tokens", 1000, "does not combine"),
        ("spikes__attempts", 1, "spikes.attempts does not combine"),
    ],
)
def test_other_sections_that_do_not_fit_are_refused(workspace, key, value, message):
    method = {} if key == "mesh__replica" else {"replicas__method": "diloco"}
    if key.startswith("optimizer__name"):
        method["model__router_bias"] = False
    with pytest.raises(UserError, match=message):
        tiny.config(workspace, **{key: value}, **method)
