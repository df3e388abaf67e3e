"""The chunked loss: sums and gradients of float64 numpy on any mesh, and never all logits at once."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pma_jax.config import Config, ModelConfig, TrainingConfig
from pma_jax.model.cross_entropy import cross_entropy
from pma_jax.model.decoder import graph_definition
from pma_jax.runtime.mesh import AXES, RULES
from pma_jax.training.state import abstract_state
from pma_jax.training.step import make_train_step

B, L, D, V, WEIGHT = 8, 7, 8, 16, 0.05
RNG = np.random.default_rng(0)
X, HEAD = RNG.standard_normal((B, L, D)).astype(np.float32), RNG.standard_normal((D, V)).astype(np.float32)
TARGETS = RNG.integers(-1, V, (B, L)).astype(np.int32)


def reference():
    """Return the objective, nats, and the objective's gradients with respect to x and head, in float64."""
    x, head, targets = X.reshape(-1, D).astype(np.float64), HEAD.astype(np.float64), TARGETS.reshape(-1)
    logits = x @ head
    log_z = np.log(np.exp(logits).sum(axis=1))
    counted = targets >= 0
    hit = np.arange(V) == targets[:, None]
    nats = (log_z - (logits * hit).sum(axis=1))[counted].sum()
    softmax = np.exp(logits - log_z[:, None])
    d_logits = (softmax * (1 + 2 * WEIGHT * log_z)[:, None] - hit) * counted[:, None]
    return nats + WEIGHT * (log_z**2)[counted].sum(), nats, (d_logits @ head.T).reshape(X.shape), x.T @ d_logits


@pytest.mark.mesh
@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_sums_and_gradients_equal_numpys(sizes, chunk_tokens):
    mesh = jax.make_mesh((1, *sizes, 1), AXES, devices=jax.devices()[: int(np.prod(sizes))])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, RULES.spec("batch", None, None))
        head = jax.device_put(HEAD, RULES.spec("width", "vocabulary"))
        targets = jax.device_put(TARGETS, RULES.spec("batch", None))

        @jax.jit
        def run(x, head, targets):
            alone = cross_entropy(x, head, targets, WEIGHT, chunk_tokens)
            both = jax.value_and_grad(
                lambda x, head: cross_entropy(x, head, targets, WEIGHT, chunk_tokens), argnums=(0, 1), has_aux=True
            )
            return alone, both(x, head)

        alone, ((objective, nats), (d_x, d_head)) = jax.device_get(run(x, head, targets))
    expected = reference()
    np.testing.assert_allclose((*alone, objective, nats), (*expected[:2], *expected[:2]), rtol=1e-6)
    np.testing.assert_allclose(d_x, expected[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_head, expected[3], rtol=1e-5, atol=1e-5)


def test_cotangent_scales_the_gradient():
    with jax.set_mesh(jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1])):
        d_x = jax.grad(lambda x: 3.0 * cross_entropy(x, jnp.asarray(HEAD), jnp.asarray(TARGETS), WEIGHT, 5)[0])(X)
    np.testing.assert_allclose(d_x, 3 * reference()[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_that_of_one_chunk(dtype):
    rows, width, vocabulary, chunk = 16, 8, 4096, 128
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((rows, 256, width), (width, vocabulary))]
    targets = jax.ShapeDtypeStruct((rows, 256), jnp.int32)

    def temporaries(chunk_tokens):
        gradient = jax.grad(lambda x, head, t: cross_entropy(x, head, t, 0.0, chunk_tokens)[0], argnums=(0, 1))
        with jax.set_mesh(jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1])):
            return jax.jit(gradient).lower(*shapes, targets).compile().memory_analysis().temp_size_in_bytes

    every_logit = 4 * rows * 256 * vocabulary
    assert temporaries(rows * 256) >= every_logit
    assert temporaries(chunk) < every_logit / 8


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_no_array_of_a_compiled_train_step_contains_all_logits(sizes, tied):
    """Check logits and their gradient, in any dtype: no array has as many numbers as a device's share of them."""
    model = ModelConfig(512, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, hidden=32, logits_chunk_tokens=64)
    config = Config(
        model=dataclasses.replace(model, tie_embeddings=tied),
        training=TrainingConfig(sequence_length_tokens=64, batch_size_sequences=16),
    )
    devices = int(np.prod(sizes))
    mesh = jax.make_mesh((1, *sizes, 1), AXES, devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        step = make_train_step(config, graph_definition(config.model))
        sharding = jax.NamedSharding(mesh, RULES.spec("batch", None))
        tokens = jax.ShapeDtypeStruct((16, 65), np.int32, sharding=sharding)
        text = step.lower(abstract_state(config, mesh), tokens, 1e-3).compile().as_text()
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
    largest = max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)
    assert 64 * 512 / sizes[2] <= largest < 16 * 64 * 512 / devices, "only one chunk's logits are materialised"
