"""Each method against a loop over explicit workers in NumPy, in float64; and the identities between methods."""

import functools

import jax
import numpy as np
import optax
import oracles
import pytest
from oracle_models import DECODER, LINEAR, RATE, linear_loss, to_flat, to_tree

from pma_jax.config import MeshConfig
from pma_jax.runtime.mesh import make_mesh

STEPS = 20
CASES = {
    "periodic": {},
    "diloco": {},
    "diloco without Nesterov": {"diloco_nesterov": False, "diloco_rate": 0.4},
    "diloco, one worker": {"count": 1},
    "streaming": {"streaming_fragments": 2},
    "streaming, delayed": {"streaming_fragments": 4, "streaming_delay_tokens": 32},
    "streaming, int8": {"streaming_fragments": 2, "streaming_dtype": "int8"},
    "streaming, int8 with feedback": {
        "streaming_fragments": 2,
        "streaming_dtype": "int8",
        "streaming_error_feedback": True,
    },
    "streaming, int4": {"streaming_fragments": 2, "streaming_dtype": "int4"},
    "streaming, e3m0": {"streaming_fragments": 2, "streaming_dtype": "e3m0"},
    "streaming, int4 with feedback": {
        "streaming_fragments": 2,
        "streaming_dtype": "int4",
        "streaming_error_feedback": True,
        "streaming_delay_tokens": 16,
    },
    "streaming, e3m0 with feedback": {
        "streaming_fragments": 1,
        "streaming_dtype": "e3m0",
        "streaming_error_feedback": True,
    },
    "sparta": {"sparta_share": 0.1},
    "sparta with diloco": {"sparta_share": 0.1, "sparta_diloco": True},
    "noloco": {},
    "noloco with another pull": {"noloco_pull": 1.0, "noloco_momentum": 0.3},
}
QUICK = ("diloco", "streaming, int4 with feedback", "sparta with diloco", "noloco")
# Without values that are rounded: where one is between two levels, the float32 of the decoder's gradients decides.
DECODER_CASES = {"periodic with moments": {"periodic_moments": True}}
DECODER_CASES |= {name: CASES[name] for name in ("diloco", "streaming, delayed", "sparta with diloco", "noloco")}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
MESHES = [
    pytest.param(MeshConfig(data=1), id="1"),
    pytest.param(MeshConfig(replica=4, data=2), id="4x2", marks=pytest.mark.mesh),
]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def mesh_of(sizes):
    """Return a mesh; a test of one device also runs where several are simulated."""
    if sizes == MeshConfig(data=1) and jax.device_count() > 1:
        sizes = MeshConfig()
    return make_mesh(sizes)


def prepare(name, model=LINEAR, **changes):
    case = (CASES if model is LINEAR else DECODER_CASES)[name]
    config = oracles.make_config(method=name.split()[0].strip(","), **case | changes)
    rng = np.random.default_rng(1)
    return config, model.start(rng), model.inputs(rng, STEPS, config.replicas.count)


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in CASES])
def test_method_equals_a_loop_over_workers(name, sizes):
    config, theta, x = prepare(name)
    if config.replicas.count == 1 and sizes.replica > 1:
        pytest.skip("one worker is on one device")
    assert_equal_to_oracle(config, theta, x, mesh_of(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODER_CASES)
def test_method_equals_a_loop_over_workers_that_train_a_decoder_by_adam(name):
    config, theta, x = prepare(name, DECODER)
    assert_equal_to_oracle(config, theta, x, mesh_of(MeshConfig(data=1)), DECODER, uses_adam=True)


def assert_equal_to_oracle(config, theta, x, mesh, model=LINEAR, uses_adam=False):
    history, shared = oracles.run_package(config, theta, x, mesh, model, uses_adam)
    inner_steps = oracles.InnerSteps(model, uses_adam)
    expected, expected_shared = oracles.ORACLES[config.replicas.method](config.replicas, theta, x, inner_steps)
    for step, (ours, theirs) in enumerate(zip(history, expected, strict=True), 1):
        for leaf in theta:
            stacked = np.stack([worker[leaf] for worker in theirs])
            np.testing.assert_allclose(ours[leaf], stacked, rtol=0, atol=1e-6, err_msg=f"step {step}, {leaf}")
    for leaf in theta:
        np.testing.assert_allclose(shared[leaf], expected_shared[leaf], rtol=0, atol=1e-6, err_msg=leaf)
        assert np.abs(shared[leaf] - theta[leaf]).max() > 0.01, "the workers have moved"


def assert_equal_histories(one, other, theta, atol=1e-12):
    for ours, theirs in zip(one[0], other[0], strict=True):
        for leaf in theta:
            np.testing.assert_allclose(ours[leaf], theirs[leaf], rtol=0, atol=atol)
    for leaf in theta:
        np.testing.assert_allclose(one[1][leaf], other[1][leaf], rtol=0, atol=atol)


IDENTITIES = {
    "diloco with rate 1 and no momentum is periodic averaging": (
        {"method": "diloco", "diloco_rate": 1.0, "diloco_momentum": 0.0},
        {"method": "periodic"},
    ),
    "one fragment without delay and mixing is diloco": (
        {"method": "streaming", "streaming_fragments": 1, "streaming_rate": 0.7, "streaming_mixing": 0.0},
        {"method": "diloco"},
    ),
    "sparta of all parameters is periodic averaging at each step": (
        {"method": "sparta", "sparta_share": 1.0},
        {"method": "periodic", "interval_tokens": 16},
    ),
    "noloco of one pair without momentum, at rate 1, is periodic averaging": (
        {"method": "noloco", "count": 2, "noloco_rate": 1.0, "noloco_momentum": 0.0, "noloco_pull": 1.0},
        {"method": "periodic", "count": 2},
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name.startswith(("sparta", "noloco")) else name
        for name in IDENTITIES
    ],
)
def test_identities(name):
    one, other = (oracles.make_config(**changes) for changes in IDENTITIES[name])
    rng = np.random.default_rng(2)
    theta, x = LINEAR.start(rng), LINEAR.inputs(rng, STEPS, one.replicas.count)
    assert_equal_histories(
        *(oracles.run_package(config, theta, x, mesh_of(MeshConfig(data=1))) for config in (one, other)), theta
    )


def test_periodic_averaging_of_sgd_at_each_step_is_data_parallel():
    config, theta, x = prepare("periodic", interval_tokens=16)
    history, _ = oracles.run_package(config, theta, x, mesh_of(MeshConfig(data=1)))
    model = theta
    for ours, x_K in zip(history, x, strict=True):
        slopes = to_flat(jax.grad(linear_loss)(to_tree(model), x_K.reshape(-1, *x_K.shape[2:])))
        model = {name: leaf - RATE * slopes[name] for name, leaf in model.items()}
        for leaf in theta:
            np.testing.assert_allclose(ours[leaf], np.stack([model[leaf]] * 4), rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_is_the_sgd_of_optax_on_outer_gradients(nesterov):
    config, theta, x = prepare("diloco", diloco_nesterov=nesterov)
    history, shared = oracles.run_package(config, theta, x, mesh_of(MeshConfig(data=1)))
    optimizer = optax.sgd(0.7, 0.9, nesterov)
    state, outer, inner = optimizer.init(theta), theta, [theta] * 4
    inner_steps = oracles.InnerSteps()
    for step, x_K in enumerate(x, 1):
        inner = inner_steps(inner, x_K)
        if step % 4 == 0:
            change = jax.tree.map(lambda a, b: a - b, outer, oracles.mean(inner))
            updates, state = optimizer.update(change, state)
            outer = optax.apply_updates(outer, updates)
            inner = [outer] * 4
    for leaf in theta:
        np.testing.assert_allclose(shared[leaf], outer[leaf], rtol=0, atol=1e-12)
        np.testing.assert_allclose(history[-1][leaf][2], outer[leaf], rtol=0, atol=1e-12)
