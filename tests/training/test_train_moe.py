"""Train a mixture of experts: the router bias and its rule, meshes, and a run from start to merge."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest
import tiny

from pma_jax.config import Config, MeshConfig, ModelConfig, TrainingConfig
from pma_jax.model import moe
from pma_jax.model.decoder import graph_definition
from pma_jax.runs import states
from pma_jax.runs.directory import open_run
from pma_jax.runtime.mesh import AXES, make_mesh, put_batch
from pma_jax.training.loop import train
from pma_jax.training.optimizer import decay_mask
from pma_jax.training.state import abstract_state, init_state_from_seed
from pma_jax.training.step import make_train_step

V, L, B = 32, 16, 16
MODEL = ModelConfig(
    vocabulary_size=V,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=4,
    experts_per_token=2,
    expert_hidden=16,
    shared_experts=1,
    router_scores="sigmoid",
)
WEIGHTS = {"router_bias_rate": 0.01, "balance_loss_weight": 0.01, "router_z_loss_weight": 1e-3}
BIAS = f"blocks/moe/{moe.ROUTER_BIAS}"


def make_config(mesh=None, **training):
    sizes = TrainingConfig(sequence_length_tokens=L, batch_size_sequences=B, **WEIGHTS | training)
    return Config(model=MODEL, training=sizes, mesh=mesh or MeshConfig())


def batch(seed):
    return np.random.default_rng(seed).integers(0, V, (B, L + 1), dtype=np.int32)


def submesh(*shape):
    return jax.make_mesh((1, *shape), AXES, devices=jax.devices()[: np.prod(shape)])


@functools.cache
def fresh_state():
    with jax.set_mesh(submesh(1, 1, 1, 1)):
        return jax.tree.map(np.asarray, init_state_from_seed(make_config()))


def steps(config, mesh, count=3):
    """Return the last state as numpy arrays, the metrics of every step, and the bias after each."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    with jax.set_mesh(mesh):
        state = jax.device_put(fresh_state(), shardings)
        train_step = make_train_step(config, graph_definition(config.model))
        metrics, biases = [], []
        for seed in range(count):
            state, actual = train_step(state, put_batch(mesh, batch(seed)), 1e-2)
            metrics.append({name: float(value) for name, value in actual.items() if name != "spike"})
            biases.append(np.array(state.params["blocks"]["moe"][moe.ROUTER_BIAS]))
        return jax.tree.map(np.asarray, state), metrics, biases


@functools.cache
def on_one_device():
    return steps(make_config(), submesh(1, 1, 1, 1))


@pytest.mark.slow
def test_bias_moves_by_its_rate_and_the_optimizer_skips_it():
    state, metrics, biases = on_one_device()
    before = np.zeros_like(biases[0])
    for bias in biases:
        moved = np.abs(bias - before)
        assert (
            np.isclose(moved, 0.01, atol=1e-7).sum() > 4 and (np.isclose(moved, 0.01, atol=1e-7) | (moved == 0)).all()
        )
        before = bias
    assert not tiny.named(decay_mask(state.params))[BIAS]
    moments = {name: leaf for name, leaf in tiny.named(state.optimizer).items() if moe.ROUTER_BIAS in name}
    assert len(moments) == 2 and not any(leaf.any() for leaf in moments.values())
    for m in metrics:
        assert m["dropped"] == 0
        assert m["load_max_violation"] > 0 > m["load_min_violation"] >= -1


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize(
    ("shape", "microbatches"),
    [*(pytest.param((n, 1, 1, 8 // n), 2, marks=pytest.mark.long) for n in (8, 2)), ((1, 2, 2, 2), 1)],
    ids=str,
)
def test_any_mesh_and_microbatches_equal_one_device(shape, microbatches):
    """Compare parameters, which the auxiliary losses affect, and the bias, which the load of the full batch moves."""
    state, metrics, _ = steps(make_config(accumulation_steps=microbatches), submesh(*shape))
    expected, expected_metrics, _ = on_one_device()
    tiny.assert_close(state, expected, rtol=5e-4, atol=2e-5)
    for actual, requested in zip(metrics, expected_metrics, strict=True):
        assert actual == pytest.approx(requested, rel=1e-4)


@pytest.mark.slow
def test_auxiliary_losses_affect_the_gradient_but_not_the_reported_loss():
    _, metrics, _ = on_one_device()
    plain = make_config(balance_loss_weight=0.0, router_z_loss_weight=0.0)
    _, without, _ = steps(plain, submesh(1, 1, 1, 1), count=1)
    assert metrics[0]["loss"] == pytest.approx(without[0]["loss"], rel=1e-6)
    assert metrics[0]["gradient_norm"] != pytest.approx(without[0]["gradient_norm"], rel=1e-4)


# --- A run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(workspace, tmp_path_factory):
    """Train a tiny mixture to its horizon on 8 devices, with experts split over 4."""
    config = tiny.config(
        workspace,
        model__experts=4,
        model__experts_per_token=2,
        model__expert_hidden=16,
        model__shared_experts=1,
        model__router_scores="sigmoid",
        training__router_bias_rate=0.01,
        mesh__data=2,
        mesh__expert=4,
    )
    return train(config, tmp_path_factory.mktemp("mixture") / "run")


@pytest.mark.long
@pytest.mark.mesh
def test_run_learns_and_records_its_load(mixture):
    records = [r for r in mixture.metrics if r["kind"] == "train"]
    assert len(records) == 24
    assert records[-1]["loss"] < records[0]["loss"] - 1
    assert all(r["dropped"] == 0 and r["load_max_violation"] >= 0 >= r["load_min_violation"] for r in records)
    assert [r["recipe"] for r in mixture.metrics if r["kind"] == "preview"][-2:] == ["sma:2", "sma:3"]


@pytest.mark.slow
@pytest.mark.mesh
def test_snapshots_contain_the_bias(mixture):
    stored = [tiny.named(tiny.read(s)) for s in mixture.snapshots]
    assert all(leaves[BIAS].shape == (2, 4) and leaves[BIAS].any() for leaves in stored)
    assert not np.array_equal(stored[0][BIAS], stored[-1][BIAS])


@pytest.mark.slow
@pytest.mark.mesh
def test_merge_averages_the_bias_with_the_coefficients_of_the_parameters(mixture, tmp_path):
    from pma_jax.cli import main

    out = tmp_path / "merged"
    assert main(["merge", str(mixture.path), "--recipe", "weights:0.25,0.75", "--last", "2", "--out", str(out)]) == 0
    old, new = (tiny.named(tiny.read(s)) for s in mixture.snapshots[-2:])
    snapshot = dataclasses.replace(mixture.snapshots[-1], path=out)
    merged = tiny.named(tiny.read(snapshot))
    assert BIAS in merged
    for name in merged:
        expected = 0.25 * old[name].astype(np.float64) + 0.75 * new[name].astype(np.float64)
        np.testing.assert_allclose(merged[name], expected, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.slow
@pytest.mark.mesh
def test_previews_are_the_loss_of_the_averaged_model_including_the_bias(mixture):
    stored = [tiny.named(tiny.read(s)) for s in mixture.snapshots[-3:]]
    (preview,) = (
        r["loss"] for r in mixture.metrics if r["kind"] == "preview" and r["step"] == 24 and r["recipe"] == "sma:3"
    )
    assert preview == pytest.approx(tiny.loss_of_sum(mixture, stored, [1 / 3] * 3), rel=1e-5)


@pytest.mark.slow
@pytest.mark.mesh
def test_resume_is_bitwise_equal_to_uninterrupted_run(mixture, tmp_path):
    shutil.copytree(mixture.path, tmp_path / "run")
    copy = open_run(tmp_path / "run")
    for saved in copy.snapshots + copy.states:
        if saved.step > 9:
            saved.path.rmtree()
    resumed = train(copy.config, copy.path)
    assert tiny.numbers(resumed) == tiny.numbers(mixture)
    for a, e in zip(resumed.snapshots, mixture.snapshots, strict=True):
        tiny.assert_equal(tiny.read(a), tiny.read(e))
    abstract = abstract_state(copy.config, make_mesh(copy.config.mesh))
    tiny.assert_equal(*(states.restore_state(run.states[-1], abstract) for run in (resumed, mixture)))
