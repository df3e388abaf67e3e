import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pma_jax.config import MeshConfig, ModelConfig
from pma_jax.data.sampling import PADDING_ID
from pma_jax.model import loss
from pma_jax.runtime.mesh import AXES, RULES, make_mesh, put_batch

V = 16
RNG = np.random.default_rng(0)
LOGITS = (3 * RNG.standard_normal((8, 6, V))).astype(np.float32)
TOKENS = RNG.integers(0, V, (8, 7)).astype(np.int32)


class Table:
    """A model whose hidden states are its parameters, a table of logits: only the loss is computed."""

    config = ModelConfig(logits_chunk_tokens=5)  # No chunk divides it.

    def __init__(self, logits):
        self.logits = logits

    def hidden_states(self, tokens_BxL):
        assert tokens_BxL.shape == self.logits.shape[:2]
        return jnp.where(
            (tokens_BxL < 0)[..., None], jnp.nan, self.logits
        ), {}  # A negative index would read another row.

    def head(self):
        return jax.device_put(jnp.eye(V), RULES.spec(None, "vocabulary"))


@pytest.fixture(autouse=True)
def given_logits(monkeypatch):
    monkeypatch.setattr(loss, "make_decoder", lambda graph, params: Table(jnp.asarray(params)))
    with jax.set_mesh(jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1])):
        yield


def reference(logits, tokens, weight=0.0):
    """Return objective, nats and count in float64, one token at a time."""
    objective = nats = count = 0.0
    for row in range(tokens.shape[0]):
        for position in range(tokens.shape[1] - 1):
            target = tokens[row, position + 1]
            if target < 0:
                continue
            values = logits[row, position].astype(np.float64)
            log_z = values.max() + math.log(np.exp(values - values.max()).sum())
            nats += log_z - values[target]
            objective += log_z - values[target] + weight * log_z**2
            count += 1
    return objective, nats, count


def test_loss_equals_float64_and_optax():
    objective, sums = loss.loss_sums(None, LOGITS, TOKENS)
    expected, nats, count = reference(LOGITS, TOKENS)
    assert float(objective) == pytest.approx(expected, rel=1e-6)
    assert float(sums["nats"]) == pytest.approx(nats, rel=1e-6)
    assert float(sums["count"]) == count == 8 * 6
    oracle = optax.softmax_cross_entropy(LOGITS, jax.nn.one_hot(TOKENS[:, 1:], V)).sum()
    assert float(objective) == pytest.approx(float(oracle), rel=1e-6)


def test_z_loss_is_added_to_the_objective_only():
    objective, sums = loss.loss_sums(None, LOGITS, TOKENS, z_loss_weight=0.25)
    expected, nats, _ = reference(LOGITS, TOKENS, weight=0.25)
    assert float(objective) == pytest.approx(expected, rel=1e-6)
    assert float(sums["nats"]) == pytest.approx(nats, rel=1e-6)


def test_padding_is_not_counted():
    padded = TOKENS.copy()
    padded[0, 3:] = PADDING_ID
    padded[5] = PADDING_ID
    objective, sums = jax.jit(lambda t: loss.loss_sums(None, LOGITS, t, 0.1))(padded)
    expected, nats, count = reference(LOGITS, padded, weight=0.1)
    assert float(objective) == pytest.approx(expected, rel=1e-6)
    assert float(sums["nats"]) == pytest.approx(nats, rel=1e-6)
    assert float(sums["count"]) == count == 8 * 6 - 4 - 6


def test_uncounted_tokens_are_still_inputs():
    tokens = np.array([[3, ~5, ~0, 7, -1]], np.int32)
    np.testing.assert_array_equal(loss.decode_masked_ids(jnp.asarray(tokens)), [[3, 5, 0, 7, 0]])


def test_padding_has_no_gradient():
    padded = TOKENS.copy()
    padded[1, 4:] = PADDING_ID
    gradient = jax.grad(lambda x: loss.loss_sums(None, x, padded, 0.1)[0])(LOGITS)
    assert not np.asarray(gradient[1, 3:]).any()
    assert np.abs(gradient[1, :3]).max() > 0


def test_sums_of_ragged_batches_add_up():
    padded = TOKENS.copy()
    padded[6:, 2:] = PADDING_ID
    _, complete = loss.loss_sums(None, LOGITS, padded)
    parts = [loss.loss_sums(None, LOGITS[i : i + 2], padded[i : i + 2])[1] for i in range(0, 8, 2)]
    assert float(sum(p["nats"] for p in parts)) == pytest.approx(float(complete["nats"]), rel=1e-6)
    assert float(sum(p["count"] for p in parts)) == float(complete["count"])


def test_large_logits_stay_finite():
    objective, _ = loss.loss_sums(None, LOGITS * 1e4, TOKENS)
    assert float(objective) == pytest.approx(reference(LOGITS * 1e4, TOKENS)[0], rel=1e-6)


@pytest.mark.mesh
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 2, 4)], ids=str)
def test_split_vocabulary_does_not_change_the_result(sizes):
    mesh = jax.make_mesh((1, *sizes, 1), AXES)
    with jax.set_mesh(mesh):
        table = jax.device_put(LOGITS, jax.NamedSharding(mesh, RULES.spec("batch", None, "vocabulary")))
        objective, sums = jax.jit(lambda x, t: loss.loss_sums(None, x, t, 0.1))(table, put_batch(mesh, TOKENS))
        assert float(objective) == pytest.approx(reference(LOGITS, TOKENS, 0.1)[0], rel=1e-6)
        assert float(sums["count"]) == 48


def test_evaluate_returns_the_loss_of_each_target():
    padded = TOKENS.copy()
    padded[4:, 2:] = PADDING_ID
    jax.clear_caches()  # The evaluation step may have been traced with a real model.
    nats_RxL = loss.evaluate(None, LOGITS[:4], [padded[:4], padded[4:]])
    assert nats_RxL.shape == TOKENS[:, 1:].shape and nats_RxL.dtype == np.float32
    for part, rows in ((padded[:4], nats_RxL[:4]), (padded[4:], nats_RxL[4:])):
        log_p = np.float64(LOGITS[:4]) - np.log(np.exp(np.float64(LOGITS[:4])).sum(axis=-1, keepdims=True))
        targets = part[:, 1:]
        expected = -np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], axis=-1)[..., 0] * (targets >= 0)
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
        assert rows.sum() == pytest.approx(reference(LOGITS[:4], part)[1], rel=1e-6)


def test_units_are_converted():
    assert loss.perplexity(math.log(7.0)) == pytest.approx(7.0)
    assert loss.bits_per_byte(math.log(2.0), 1.0) == pytest.approx(1.0)
    assert loss.bits_per_byte(4 * math.log(2.0), 4.0) == pytest.approx(1.0)


def test_gradient_is_softmax_minus_one_hot():
    gradient = jax.grad(lambda x: loss.loss_sums(None, x, TOKENS)[0])(LOGITS)
    expected = jax.nn.softmax(LOGITS) - jax.nn.one_hot(TOKENS[:, 1:], V)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_graph_definitions_compare_equal():
    """Prevent a recompilation by a second run of the same model: graph definitions are jit's static arguments."""
    from pma_jax.model.decoder import graph_definition

    config = ModelConfig(width=8, layers=1, heads=1, kv_heads=1, head_dim=4, hidden=8)
    with jax.set_mesh(make_mesh(MeshConfig())):
        first, second = graph_definition(config), graph_definition(config)
    assert isinstance(first, nnx.GraphDef)
    assert first == second
    assert hash(first) == hash(second)
