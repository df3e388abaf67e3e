"""Losses on samples of held-out text; and many batches on a CPU that simulates two devices, in a separate process."""

import dataclasses
import math
import subprocess

import jax
import numpy as np
import pytest
import tiny

from pma_jax.data.sampling import ALL, REPORT, SELECT
from pma_jax.evaluation.held_out import describe_few_documents, make_evaluator, read_sample_of_run
from pma_jax.model.decoder import apply, graph_definition
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.loop import train


def numpy_loss(run, sample, params):
    """Return the loss and its standard error in float64, document by document."""
    mesh = make_mesh(run.config.mesh)
    with jax.set_mesh(mesh):
        inputs = np.maximum(sample.windows[:, :-1], 0)
        rows = -len(inputs) % 8  # the tests' mesh splits the rows over eight devices
        logits = apply(graph_definition(run.config.model), jax.device_put(params), np.pad(inputs, ((0, rows), (0, 0))))
        logits = np.float64(logits)[: len(inputs)]
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    nats = -np.take_along_axis(log_p, np.maximum(sample.windows[:, 1:], 0)[..., None], axis=-1)[..., 0]
    each = [nats[sample.documents == d] for d in range(sample.documents.max() + 1)]
    loss = np.concatenate(each).mean()
    without = [np.concatenate(each[:d] + each[d + 1 :]).mean() for d in range(len(each))]
    return loss, math.sqrt((len(each) - 1) * np.var(without))


@pytest.mark.parametrize(("part", "batch_size"), [(SELECT, 8), (REPORT, 16), (ALL, 64)])
def test_losses_and_standard_errors_are_those_of_numpy_for_any_batch_size(finished, part, batch_size):
    evaluation = dataclasses.replace(finished.config.evaluation, batch_size_sequences=batch_size)
    config = dataclasses.replace(finished.config, evaluation=evaluation)
    evaluator = make_evaluator(config, make_mesh(config.mesh), part)
    assert all(batch.shape == (batch_size, 33) for batch in evaluator.batches)
    params = tiny.read(finished.snapshots[-1])
    evaluated = evaluator(params)
    loss, error = numpy_loss(finished, evaluator.sample, params)
    assert evaluated.loss == pytest.approx(loss, rel=1e-6) and evaluated.standard_error == pytest.approx(
        error, rel=1e-4
    )
    assert evaluator.sample.describe()["tokens"] == finished.config.evaluation.tokens


@pytest.mark.long
@pytest.mark.mesh
def test_a_batch_of_fewer_sequences_than_devices_is_filled(finished):
    evaluation = dataclasses.replace(finished.config.evaluation, batch_size_sequences=3)
    config = dataclasses.replace(finished.config, evaluation=evaluation)
    evaluator = make_evaluator(config, make_mesh(config.mesh), SELECT)
    assert all(batch.shape == (8, 33) for batch in evaluator.batches)
    params = tiny.read(finished.snapshots[-1])
    assert evaluator(params).loss == pytest.approx(numpy_loss(finished, evaluator.sample, params)[0], rel=1e-6)


def test_marks_are_evaluated_on_the_sample_that_the_run_records(finished):
    sample = read_sample_of_run(finished, SELECT, finished.config.evaluation)
    assert finished.metadata["held_out"] == sample.describe()
    assert finished.metadata["evaluation"] == sample.digest
    evaluations = [r for r in finished.metrics if r["kind"] == "evaluation"]
    assert {r["text"] for r in evaluations} == {sample.digest}
    loss, error = numpy_loss(finished, sample, tiny.read(finished.snapshots[-1]))
    assert evaluations[-1]["loss"] == pytest.approx(loss, rel=1e-6)
    assert evaluations[-1]["standard_error"] == pytest.approx(error, rel=1e-4)


def test_few_documents_are_told(tmp_path, capfd):
    tiny.write_corpus(tmp_path / "text", documents=60)
    config = tiny.config(tmp_path, training__total_tokens=1024, preview__windows=(), evaluation__tokens=200)
    run = train(config, tmp_path / "run")
    few = run.metadata["held_out"]["part_documents"]
    assert 1 < few < 10
    (note,) = describe_few_documents(run.metadata["held_out"])
    assert (
        note.startswith(f"the part 'select' of the held-out text has {few} documents")
        and note in capfd.readouterr().err
    )
    assert describe_few_documents({"part": "select", "part_documents": 10}) == []


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
    print(jax.device_count(), evaluate(graph, params, batches).mean(), each)
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
