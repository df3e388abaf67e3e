"""The windows of held-out text; and many batches on a CPU that simulates two devices, in a separate process."""

import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny

from pma_jax.config import Config, EvaluationConfig, TrainingConfig
from pma_jax.data import shards
from pma_jax.evaluation.held_out import read_held_out_windows
from pma_jax.model.loss import PADDING_ID

L, B = 16, 8
CONFIG = Config(training=TrainingConfig(sequence_length_tokens=L))
STREAM = shards.TokenStream(1, 1000, 2000, tuple(np.split(np.arange(1000, dtype=np.uint16), [70])))
TOKENS = shards.TokenSet(Path(), "d", "c", "t", 2**16, 0, STREAM, STREAM)


def read_windows(requested, rows=None):
    evaluation = EvaluationConfig(tokens=requested, batch_size_sequences=B)
    return list(read_held_out_windows(TOKENS, dataclasses.replace(CONFIG, evaluation=evaluation), rows))


@pytest.mark.parametrize("requested", [1, L, L * B, L * B + 1, 700, 999])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_exactly_the_first_tokens_are_read_in_order(requested, count):
    parts = [read_windows(requested, rows) for rows in (np.split(np.arange(B), count) if count > 1 else [None])]
    assert len({len(part) for part in parts}) == 1
    targets = []
    for step in range(len(parts[0])):
        for tokens_bxM in (part[step] for part in parts):
            assert tokens_bxM.shape == (B // count, L + 1) and tokens_bxM.dtype == np.int32
            is_counted_bxL = tokens_bxM[:, 1:] != PADDING_ID
            assert (tokens_bxM[:, :-1][is_counted_bxL] == tokens_bxM[:, 1:][is_counted_bxL] - 1).all()
            targets += tokens_bxM[:, 1:][is_counted_bxL].tolist()
    assert targets == list(range(1, requested + 1))


def test_too_many_tokens_are_one_clear_line():
    with pytest.raises(ValueError, match=r"evaluation\.tokens is 1000 but the held-out split has only 999 targets"):
        read_windows(1000)


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
