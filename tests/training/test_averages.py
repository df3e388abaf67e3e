"""Block means: means of the weights since the last mark, against float64 means of the recorded trajectory.

The dense run has a mark every 6 steps, adds every 2nd step (3 per block) and saves a state every 4 steps: at 8 and 20
the block contains one step of the interval, at 4 and 16 two; at 12 and 24 the mark was just saved.
"""

import dataclasses
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P

import pma_jax as pma
from pma_jax.config import MeshConfig, resolve
from pma_jax.merging.inspect import format_description, inspect
from pma_jax.runs import states
from pma_jax.runs.directory import newest_snapshot, open_run
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training import averages
from pma_jax.training.averages import RunningMean
from pma_jax.training.fork import fork
from pma_jax.training.loop import train
from pma_jax.training.state import abstract_state, init_state_from_seed

BOTH = ("point", "block_mean")
STEP = tiny.BATCH_TOKENS
MARKS = [6, 12, 18, 24]
DENSE = {
    "checkpoint__kinds": BOTH,
    "checkpoint__block_every_steps": 2,
    "checkpoint__interval_tokens": 6 * STEP,
    "checkpoint__state_interval_tokens": 4 * STEP,
    "checkpoint__keep_states": 10,
    "preview__windows": (2,),
}


def mean64(weights, steps):
    """Return the float64 mean of the weights after these steps."""
    return jax.tree.map(lambda *leaves: np.mean(np.float64(leaves), axis=0), *[weights[step] for step in steps])


def assert_mean(snapshot, weights, steps):
    # Each of 3 additions rounds three times, by half a unit in the last place of values up to 1.
    tiny.assert_close(tiny.read(snapshot), mean64(weights, steps), rtol=3e-7, atol=3e-7)


def everything(run):
    """Return the numbers, the snapshots of both kinds and the newest state, for a bitwise comparison."""
    snapshots = {
        kind: [(s.step, s.tokens, s.loss, s.kind, tiny.named(tiny.read(s))) for s in run.of_kind(kind)] for kind in BOTH
    }
    return tiny.numbers(run), snapshots, tiny.named(state(run, run.states[-1].step))


def assert_same_run(actual, expected):
    np.testing.assert_equal(everything(actual), everything(expected))


def state(run, step):
    (saved,) = [s for s in run.states if s.step == step]
    return states.restore_state(saved, abstract_state(run.config, make_mesh(run.config.mesh)))


def interrupt(run, step):
    """Remove what a run interrupted after `step` would not have published."""
    for saved in run.of_kind("point") + run.of_kind("block_mean") + run.states:
        if saved.step > step:
            saved.path.rmtree()


@pytest.fixture(scope="module")
def recorded(workspace, tmp_path_factory):
    return tiny.train_and_record(tiny.config(workspace, **DENSE), tmp_path_factory.mktemp("dense") / "run")


@pytest.fixture(scope="module")
def dense(recorded):
    return recorded[0]


@pytest.fixture(scope="module")
def weights(recorded):
    return recorded[1]


@pytest.fixture
def copy(dense, tmp_path):
    shutil.copytree(dense.path, tmp_path / "run")
    return open_run(tmp_path / "run")


# --- The mean itself --------------------------------------------------------------------------------------------------


def block_of(rows):
    block = averages.empty({"w": jnp.zeros(rows.shape[1:])})
    for row in rows:
        block = averages.add_to_block_mean(block, {"w": jnp.asarray(row)})
    return block


@pytest.mark.parametrize("count", [12, 300, 3000])
def test_rounding_error_grows_with_the_square_root_of_the_count(count):
    noise = np.random.default_rng(0).normal(size=(count, 256))
    rows = np.float32(np.linspace(0.1, 10, 256) * (1 + 1e-2 * noise))
    block, mean = block_of(rows), np.mean(np.float64(rows), axis=0)
    assert int(block.count) == count and block.mean["w"].dtype == np.float32
    error = (np.asarray(block.mean["w"]) - mean) / (2.0**-24 * mean)  # in roundings
    assert np.sqrt(np.mean(error**2)) < 0.4 * np.sqrt(count)


def test_mean_of_equal_weights_is_exact():
    row = np.float32(np.random.default_rng(0).normal(size=64))
    np.testing.assert_array_equal(block_of(np.tile(row, (1000, 1))).mean["w"], row)


def test_first_weights_after_a_mark_replace_the_block():
    stale = RunningMean({"w": jnp.array([jnp.nan, jnp.inf, 3.0])}, jnp.int32(5))
    block = averages.add_to_block_mean(averages.restart(stale), {"w": jnp.array([0.1, 0.2, 0.3])})
    np.testing.assert_array_equal(block.mean["w"], np.float32([0.1, 0.2, 0.3]))
    assert int(block.count) == 1


def test_empty_block_holds_the_weights_at_its_mark():
    params = {"w": jnp.array([0.1, 0.2])}
    alone = averages.block_mean_or_params(averages.empty(params), params)
    np.testing.assert_array_equal(alone.mean["w"], params["w"])
    kept = averages.block_mean_or_params(block_of(np.float32([[1, 3], [3, 5]])), params)
    np.testing.assert_array_equal(kept.mean["w"], [2, 4])


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_mean_of_equal_blocks_is_the_dense_mean(blocks, count, seed):
    rows = np.random.default_rng(seed).normal(size=(blocks, count, 8)).astype(np.float32)
    means = [block_of(block).mean["w"] for block in rows]
    dense = np.mean(np.float64(rows), axis=(0, 1))
    np.testing.assert_allclose(np.mean(np.float64(means), axis=0), dense, rtol=0, atol=2e-6)


# --- On the mesh ------------------------------------------------------------------------------------------------------


@pytest.mark.mesh
@pytest.mark.parametrize(
    "sizes", [pytest.param(MeshConfig(1, 8, 1), marks=pytest.mark.slow), MeshConfig(2, 2, 2)], ids=str
)
def test_add_runs_in_place_without_communication(workspace, sizes):
    config = tiny.config(workspace, **DENSE)
    mesh = make_mesh(sizes)
    with jax.set_mesh(mesh):
        state = init_state_from_seed(config)
        block, params = state.block, state.params
        for mean, p in zip(jax.tree.leaves(block.mean), jax.tree.leaves(params), strict=True):
            assert (mean.shape, mean.dtype) == (p.shape, np.float32)
            assert mean.sharding.is_equivalent_to(p.sharding, p.ndim)
        assert block.mean["blocks"]["gate_DxF"].sharding.spec == P(None, "fsdp", "tensor")
        text = averages.add_to_block_mean.lower(block, params).compile().as_text()
        places = pointers(block.mean)
        added = averages.add_to_block_mean(block, params)
    assert not re.findall(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective", text)
    aliased = re.findall(r"(?:may|must)-alias", text.partition("\n")[0])
    assert len(aliased) == len(jax.tree.leaves(block)), "every leaf of the block is updated in place"
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(block))
    assert pointers(added.mean) == places
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    tiny.assert_equal(added.mean, params)


def pointers(tree):
    return [s.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]


@pytest.mark.slow
@pytest.mark.mesh
def test_adds_marks_and_resume_compile_once(workspace, dense):
    config = dataclasses.replace(dense.config, mesh=MeshConfig(2, 2, 2))
    mesh = make_mesh(config.mesh)
    restored = states.restore_state(dense.states[0], abstract_state(config, mesh))
    with jax.set_mesh(mesh):
        averages.add_to_block_mean.clear_cache()
        fresh = init_state_from_seed(config)
        block = averages.add_to_block_mean(averages.add_to_block_mean(fresh.block, fresh.params), fresh.params)
        averages.add_to_block_mean(averages.restart(block), fresh.params)
        averages.add_to_block_mean(restored.block, restored.params)
    assert averages.add_to_block_mean._cache_size() == 1


def test_run_without_block_means_has_no_extra_leaves(workspace):
    def leaves(kinds):
        config = tiny.config(workspace, **DENSE | {"checkpoint__kinds": kinds})
        abstract = abstract_state(config, make_mesh(config.mesh))
        return {jax.tree_util.keystr(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(abstract)}

    without, with_ = leaves(("point",)), leaves(BOTH)
    params = [name for name in without if name.startswith(".params")]
    more = {f".block.mean{name.removeprefix('.params')}" for name in params} | {".block.count"}
    assert with_.keys() - without.keys() == more and with_.keys() > without.keys()


# --- What a run writes ------------------------------------------------------------------------------------------------


def test_block_means_equal_means_of_the_trajectory(dense, weights):
    assert [s.step for s in dense.of_kind("point")] == MARKS
    assert [(s.step, s.tokens, s.kind) for s in dense.of_kind("block_mean")] == [
        (m, m * STEP, "block_mean") for m in MARKS
    ]
    for point, block in zip(dense.of_kind("point"), dense.of_kind("block_mean"), strict=True):
        m = block.step
        tiny.assert_equal(tiny.read(point), weights[m])
        assert_mean(block, weights, [m - 4, m - 2, m])
        moved = tiny.read(block)["embedding_VxD"] - tiny.read(point)["embedding_VxD"]
        assert np.abs(moved).max() > 1e-3, "the mean differs from the point"


def test_windows_of_block_means_equal_dense_means(dense, weights):
    merged = pma.average(dense.of_kind("block_mean")[-3:], pma.recipes.sma(3))
    tiny.assert_close(merged, mean64(weights, range(8, 25, 2)), rtol=3e-7, atol=3e-7)


def test_losses_of_both_kinds_are_recorded(dense):
    for kind, record in (("point", "evaluation"), ("block_mean", "block_mean")):
        result = [r for r in dense.metrics if r["kind"] == record]
        assert [(r["tokens"], r["step"], r["loss"]) for r in result] == [
            (s.tokens, s.step, s.loss) for s in dense.of_kind(kind)
        ]
        assert {r["text"] for r in result} == {dense.metadata["evaluation"]}
        assert all(0 < r["standard_error"] < 0.5 for r in result)
    config = dense.config
    losses = tiny.losses(config, [tiny.read(s) for s in dense.of_kind("block_mean")])
    assert losses == pytest.approx([s.loss for s in dense.of_kind("block_mean")], rel=1e-6)


@pytest.mark.slow
def test_training_is_unchanged_by_block_means(dense, workspace, tmp_path):
    plain = train(tiny.config(workspace, **DENSE | {"checkpoint__kinds": ("point",)}), tmp_path / "plain")
    assert tiny.numbers(plain) == [r for r in tiny.numbers(dense) if r["kind"] != "block_mean"]
    assert not (plain.path / "block_means").exists()
    for a, e in zip(plain.snapshots, dense.of_kind("point"), strict=True):
        tiny.assert_equal(tiny.read(a), tiny.read(e))


@pytest.mark.slow
def test_run_with_block_means_only(dense, workspace, tmp_path):
    config = tiny.config(workspace, **DENSE | {"checkpoint__kinds": ("block_mean",)})
    alone = train(config, tmp_path / "alone")
    assert not (alone.path / "snapshots").exists()
    assert [s.kind for s in alone.snapshots] == ["block_mean"] * 4
    for a, e in zip(alone.snapshots, dense.of_kind("block_mean"), strict=True):
        tiny.assert_equal(tiny.read(a), tiny.read(e))
    # Points are evaluated even so; only the previews differ, because they merge saved snapshots.
    assert [r for r in tiny.numbers(alone) if r["kind"] != "preview"] == [
        r for r in tiny.numbers(dense) if r["kind"] != "preview"
    ]
    previews = [r["loss"] for r in alone.metrics if r["kind"] == "preview"]
    merged = [pma.average(alone.snapshots[i : i + 2], [0.5, 0.5]) for i in range(3)]
    assert previews == pytest.approx(tiny.losses(config, merged), rel=1e-6)
    uninterrupted = everything(alone)
    interrupt(alone, 16)
    np.testing.assert_equal(everything(train(config, alone.path)), uninterrupted)


@pytest.mark.parametrize(
    ("interval", "every", "total", "added"),
    [
        # Every 2nd step since the mark: 5 steps add two, whatever the step numbers are.
        pytest.param(5 * STEP, 2, 15 * STEP, {5: [2, 4], 10: [7, 9], 15: [12, 14]}, marks=pytest.mark.slow),
        # Marks between steps: intervals of 6, 5 and 5 steps.
        (1300, 3, 16 * STEP, {6: [3, 6], 11: [9], 16: [14]}),
        # The horizon truncates the last interval: it has 2 steps, no 3rd, so the mean is the point itself.
        (4 * STEP, 3, 10 * STEP, {4: [3], 8: [7], 10: [10]}),
        pytest.param(4 * STEP, 1, 6 * STEP, {4: [1, 2, 3, 4], 6: [5, 6]}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_which_steps_are_added(workspace, tmp_path, interval, every, total, added):
    keys = {"interval_tokens": interval, "block_every_steps": every, "state_interval_tokens": 100 * STEP}
    changes = {f"checkpoint__{key}": value for key, value in keys.items()}
    config = tiny.config(workspace, **DENSE | changes | {"training__total_tokens": total, "preview__windows": ()})
    run, weights = tiny.train_and_record(config, tmp_path / "run")
    assert [s.step for s in run.of_kind("block_mean")] == list(added)
    for snapshot in run.of_kind("block_mean"):
        assert_mean(snapshot, weights, added[snapshot.step])


# --- Resuming and retention -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 8, 12, 20])
def test_resume_is_bitwise_equal_to_uninterrupted_run(dense, copy, step):
    interrupt(copy, step)
    count = {4: 2, 8: 1, 12: 0, 20: 1}[step]
    assert int(state(copy, step).block.count) == count, "the fixture saves a state at this step"
    train(copy.config, copy.path)
    assert_same_run(copy, dense)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["point", "block_mean"])
def test_state_without_its_snapshot_of_either_kind_is_not_resumed(dense, copy, kind):
    interrupt(copy, 20)
    assert copy.newest_resumable_state.step == 20
    next(s for s in copy.of_kind(kind) if s.step == 18).path.rmtree()
    assert copy.newest_resumable_state.step == 16
    train(copy.config, copy.path)
    assert_same_run(copy, dense)


@pytest.mark.slow
def test_retention_applies_to_each_kind(workspace, tmp_path):
    keep = {"checkpoint__window": 2, "checkpoint__keep_windows": 1}
    run = train(tiny.config(workspace, **DENSE | keep), tmp_path / "run")
    assert [s.step for s in run.of_kind("point")] == [s.step for s in run.of_kind("block_mean")] == [18, 24]


# --- Forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fork_copies_the_block(dense, tmp_path):
    run = fork(dense, 8 * STEP, dense.config, tmp_path / "fork")
    run = train(run.config, run.path)
    for a, e in zip(run.of_kind("block_mean"), dense.of_kind("block_mean")[1:], strict=True):
        tiny.assert_equal(tiny.read(a), tiny.read(e))
    tiny.assert_equal(state(run, 24), state(dense, 24))


@pytest.mark.slow
def test_fork_may_add_more_often(dense, weights, tmp_path):
    config = resolve(dense.config, ["checkpoint.block_every_steps=1"])
    run = train(config, fork(dense, 8 * STEP, config, tmp_path / "fork").path)
    first, second, _ = run.of_kind("block_mean")
    assert_mean(first, weights, [8, 9, 10, 11, 12])
    assert_mean(second, weights, range(13, 19))


@pytest.mark.slow
def test_fork_may_disable_block_means(dense, tmp_path):
    config = resolve(dense.config, ["checkpoint.kinds=point"])
    run = train(config, fork(dense, 8 * STEP, config, tmp_path / "fork").path)
    assert not (run.path / "block_means").exists()
    assert state(run, 24).block is None
    tiny.assert_equal(state(run, 24).params, state(dense, 24).params)


@pytest.mark.long
def test_fork_may_enable_block_means(dense, weights, workspace, tmp_path):
    # The parent trains the same weights without a block.
    parent = train(tiny.config(workspace, **DENSE | {"checkpoint__kinds": ("point",)}), tmp_path / "parent")
    config = resolve(parent.config, ["checkpoint.kinds=point,block_mean"])
    run = fork(parent, 8 * STEP, config, tmp_path / "fork")
    started = state(run, 8).block
    assert int(started.count) == 0
    assert started.mean["embedding_VxD"].sharding == state(run, 8).params["embedding_VxD"].sharding
    run = train(config, run.path)
    first, second, _ = run.of_kind("block_mean")
    assert_mean(first, weights, [10, 12])
    assert_mean(second, weights, [14, 16, 18])
    uninterrupted = everything(run)
    interrupt(run, 16)
    np.testing.assert_equal(everything(train(config, run.path)), uninterrupted)


# --- Opening, merging, inspecting -------------------------------------------------------------------------------------


def test_newest_snapshot_of_each_kind(dense):
    points, blocks = dense.of_kind("point"), dense.of_kind("block_mean")
    assert newest_snapshot(dense.path) == points[-1]
    assert newest_snapshot(blocks[0].path) == blocks[0]


def test_kinds_cannot_be_mixed(dense, tmp_path):
    point, block = dense.of_kind("point")[0], dense.of_kind("block_mean")[1]
    message = r"cannot merge .*12 \(block_mean\).*select snapshots of one kind"
    with pytest.raises(ValueError, match=message):
        pma.average([point, block], [0.5, 0.5])
    with pytest.raises(ValueError, match=message):
        pma.merge([point, block], [0.5, 0.5], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merge_of_block_means_is_a_block_mean(dense, tmp_path):
    blocks = dense.of_kind("block_mean")
    merged = pma.merge(blocks[-2:], [0.5, 0.5], tmp_path / "out")
    assert merged.kind == pma.read_snapshot(merged.path).kind == "block_mean"
    with pytest.raises(ValueError, match="snapshots of one kind"):
        pma.merge([merged, dense.of_kind("point")[-1]], [0.5, 0.5], tmp_path / "mixed")
    assert inspect(merged.path)["kind"] == "merged block mean"
    assert inspect(blocks[0].path)["kind"] == "block mean"


def test_inspect_reports_both_kinds(dense):
    facts = inspect(dense.path)
    for key, kind in (("snapshots", "point"), ("block_means", "block_mean")):
        steps = [(s["step"], s["tokens"], s["loss"], s["text"]) for s in facts[key]]
        text = dense.metadata["evaluation"]
        assert steps == [(s.step, s.tokens, s.loss, text) for s in dense.of_kind(kind)]
    newest = dense.of_kind("block_mean")[-1]
    assert f"4 block means, 1,536 to 6,144 tokens, newest held-out loss {newest.loss:.4f}" in format_description(facts)
