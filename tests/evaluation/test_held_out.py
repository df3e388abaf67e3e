"""Evaluate many batches on a CPU that simulates two devices, in a separate process."""

import subprocess

import pytest
import tiny

EVALUATE = """
import jax, numpy as np
from pma_jax.config import MeshConfig, ModelConfig
from pma_jax.model.loss import evaluate
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.model.decoder import graph_definition, init_params
model = ModelConfig(vocabulary_size=32, width=32, layers=2, heads=2, kv_heads=2, head_dim=16, hidden=64)
mesh = make_mesh(MeshConfig())
with jax.set_mesh(mesh):
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    tokens_KxBxM = np.random.default_rng(0).integers(0, 32, (200, 4, 33)).astype(np.int32)
    batches = [put_batch(mesh, tokens_BxM) for tokens_BxM in tokens_KxBxM]
    graph = graph_definition(model)
    each = np.mean([evaluate(graph, params, [batch]) for batch in batches])
    print(jax.device_count(), evaluate(graph, params, batches), each)
"""


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.timeout(300)
def test_more_batches_than_xla_keeps_in_flight():
    done = subprocess.run(
        tiny.python(EVALUATE), capture_output=True, text=True, env=tiny.environment(devices=2), check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    devices, complete, each = done.stdout.split()
    assert devices == "2" and float(complete) == pytest.approx(float(each), rel=1e-6)
