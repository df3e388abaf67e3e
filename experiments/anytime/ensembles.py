"""The loss of an ensemble of snapshots: the probability of each token is the mean of those of the snapshots.

It costs as many forward passes as it has snapshots, and is no contender. The mean of the weights of the same snapshots
is compared with it.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from pma_jax.config import Config
from pma_jax.evaluation.held_out import make_evaluator, prepare_tokens, read_sample
from pma_jax.evaluation.sweep import snapshots_through
from pma_jax.model.decoder import abstract_params
from pma_jax.model.loss import evaluate
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import restore_params
from pma_jax.runtime.mesh import make_mesh
from pma_jax.studies import run_cache
from pma_jax.studies.study import Study


def ensemble_name(study: Study, config: Config, end: int, count: int, part: str) -> str:
    """Return the name under which the cache has the losses of an ensemble of a run with this configuration."""
    config = dataclasses.replace(
        config, evaluation=dataclasses.replace(config.evaluation, tokens=study.evaluation_tokens)
    )
    digest = read_sample(prepare_tokens(config), config, part).digest
    tokens = end * config.checkpoint.interval_tokens
    return f"nats by document of the ensemble of {count} at {tokens} tokens, text {digest}"


def ensemble_nats(study: Study, run: Run, end: int, count: int, part: str) -> list[float]:
    """Return the summed loss of each document, in nats, of the `count` newest points at unit `end`; cached."""
    evaluation, tokens = study.evaluation_config(run), end * study.unit_tokens(run)

    def measure(run: Run) -> np.ndarray:
        config = dataclasses.replace(run.config, evaluation=evaluation)
        mesh = make_mesh(config.mesh)
        evaluator, abstract = make_evaluator(config, mesh, part), abstract_params(config.model, mesh)
        snapshots = snapshots_through(run.snapshots, tokens, config.batch_tokens)[-count:]
        assert len(snapshots) == count, f"{run.path} has {len(snapshots)} snapshots at {tokens} tokens"
        probabilities: Any = 0.0
        for snapshot in snapshots:
            with jax.set_mesh(mesh):
                nats_RxL = evaluate(evaluator.graph, restore_params(snapshot, abstract), evaluator.batches)
            probabilities = probabilities + np.exp(-nats_RxL.astype(np.float64)) / count
        nats_RxL = -np.log(probabilities)[: len(evaluator.sample.windows)]
        return evaluator.sample.sum_by_document(nats_RxL)

    return run_cache.get_or_read_list(run, ensemble_name(study, run.config, end, count, part), measure)
