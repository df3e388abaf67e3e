"""Train the same run on meshes of 1, 2, 4 and 8 devices along each axis, alone, in pairs and in triples."""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.model.decoder import graph_definition
from pma_jax.runs.directory import open_run
from pma_jax.runtime.mesh import AXES, check_mesh, put_batch
from pma_jax.training.schedule import learning_rate
from pma_jax.training.state import abstract_state, init_state_from_seed
from pma_jax.training.step import make_train_step

STEPS = 4
SHAPES = [
    (1, *shape)
    for devices in (1, 2, 4, 8)
    for shape in itertools.product((1, 2, 4, 8), repeat=len(AXES) - 1)  # all but `replica`
    if math.prod(shape) == devices
]
# The case that no quick test of a train step covers; all 68 take minutes.
IN_CI = [("tiny_moe", (1, 2, 2, 1, 2))]
CASES = [(name, shape) for name in ("tiny", "tiny_moe") for shape in SHAPES[1:]]


@functools.cache
def shipped(name):
    """Return a shipped configuration with 8 heads, which the tensor axis can split, and a higher initial rate."""
    raw = configuration.load(name)
    changes = ["model.heads=8", "model.kv_heads=8", "model.head_dim=16", "schedule.warmup_tokens=2048"]
    configuration.override(raw, [*changes, "mesh.cpu_devices=0", "model.scan_layers=True"])
    return configuration.resolve(raw)


def batch(config, seed):
    """Return a learnable text: each token is one of the two that may follow the previous one."""
    rng = np.random.default_rng(seed)
    rows, length, V = config.training.batch_size_sequences, config.training.sequence_length_tokens + 1, 256
    steps = rng.integers(0, 2, (rows, length)) * 6 + 1
    return (np.cumsum(steps, axis=1) % V).astype(np.int32)


def submesh(shape):
    return jax.make_mesh(shape, AXES, devices=jax.devices()[: math.prod(shape)])


@functools.cache
def fresh_state(name):
    with jax.set_mesh(submesh((1,) * len(AXES))):
        return jax.tree.map(np.asarray, init_state_from_seed(shipped(name)))


@functools.cache
def losses(name, shape):
    """Return the loss of each step; the last one follows three updates."""
    config, mesh = shipped(name), submesh(shape)
    check_mesh(config, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    with jax.set_mesh(mesh):
        state = jax.device_put(fresh_state(name), shardings)
        step = make_train_step(config, graph_definition(config.model))
        actual = []
        for i in range(STEPS):
            rate = learning_rate(config.schedule, config.training.total_tokens, (i + 1) * config.batch_tokens)
            state, metrics = step(state, put_batch(mesh, batch(config, i)), rate)
            actual.append(float(metrics["loss"]))
    return actual


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(*case, marks=pytest.mark.slow if case in IN_CI else pytest.mark.long) for case in CASES],
    ids=str,
)
def test_losses_equal_those_of_one_device(name, shape):
    expected = losses(name, SHAPES[0])
    assert expected[-1] < expected[0] - 0.3, "the model learns, so a wrong gradient would change the losses"
    np.testing.assert_allclose(losses(name, shape), expected, rtol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(1500)  # Four processes, each with its own time limit.
@pytest.mark.parametrize("experts", [0, 4])
def test_runs_on_1_2_4_and_8_devices_have_equal_losses(experts, tmp_path):
    """Compare complete runs, each in a process with this number of devices."""
    changes = {"model__experts": experts, "model__expert_hidden": 16}
    config = tiny.write_config(tmp_path / "run.py", tmp_path, **changes)
    actual = {}
    for devices in (1, 2, 4, 8):
        done = tiny.pma("train", "--config", config, "--workdir", tmp_path / str(devices), devices=devices)
        assert done.returncode == 0, done.stderr
        records = open_run(tmp_path / str(devices)).metrics
        actual[devices] = [(r["kind"], r["tokens"], r["loss"]) for r in records]
    assert len(actual[1]) > 24
    for devices in (2, 4, 8):
        for (*what, loss), (*requested, expected) in zip(actual[devices], actual[1], strict=True):
            assert what == requested
            assert loss == pytest.approx(expected, rel=1e-4), (devices, *what)
