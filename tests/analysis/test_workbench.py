import jax
import numpy as np
import pytest
import tiny

from pma_jax.analysis import curvature
from pma_jax.analysis.workbench import open_workbench
from pma_jax.data.sampling import REPORT


@pytest.mark.parametrize("tokens", [0, 37, 300])
def test_loss_of_a_workbench_equals_the_evaluations(finished, workspace, tokens):
    config = finished.config
    bench = open_workbench(config, tokens)
    models = bench.models(finished.snapshots[-2:])
    with jax.set_mesh(bench.mesh):
        actual = [float(jax.jit(bench.loss)(params)) for params in models]
        in_parts = [sum(float(bench.loss_of_batch(params, b)) for b in bench.batches) for params in models]
    evaluated = tiny.config(workspace, evaluation__tokens=tokens or config.evaluation.tokens)
    assert actual == pytest.approx(tiny.losses(evaluated, models, REPORT), rel=1e-5)
    assert in_parts == pytest.approx(actual, rel=1e-5)
    assert all(b.shape[1] == 33 and b.shape[0] % jax.device_count() == 0 for b in bench.batches)


@pytest.mark.slow
def test_loss_and_outputs_have_curvature(finished):
    bench = open_workbench(finished.config, 256)
    first, last = bench.models([finished.snapshots[0], finished.snapshots[-1]])
    delta = jax.tree.map(lambda a, b: a - b, last, first)
    with jax.set_mesh(bench.mesh):
        hessian = curvature.pairwise_curvature(bench.hessian, last, bench.batches, [delta])
        gauss_newton = curvature.pairwise_curvature(bench.gauss_newton, last, bench.batches, [delta]).sum(axis=0)
    assert np.isfinite(hessian).all() and gauss_newton[0, 0] > 0


def test_parts_of_documents_add_up_to_the_evaluations(finished):
    bench = open_workbench(finished.config, 300)
    (params,) = bench.models(finished.snapshots[-1:])
    of_documents, tokens = bench.document_batches(2), bench.text.sample.counts_D.sum()
    with jax.set_mesh(bench.mesh):
        loss = jax.jit(bench.loss_of_batch)
        parts = [sum(float(loss(params, batch)) for batch in batches) for batches in of_documents]
    assert len(parts) > 1
    np.testing.assert_allclose(np.multiply(parts, tokens), bench.text.sum_by_document(params), rtol=1e-5)


def test_more_text_than_available_is_refused(finished):
    with pytest.raises(ValueError, match="held-out split"):
        open_workbench(finished.config, 10**5)
