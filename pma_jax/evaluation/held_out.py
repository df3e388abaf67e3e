"""The held-out tokens of a configuration, placed on the mesh, and the loss of parameters on them.

Dimensions: B sequences, L predictions per sequence, M = L + 1 tokens; lower-case b is this process's share of B.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pma_jax.config import Config
from pma_jax.data import batches, shards
from pma_jax.model.decoder import graph_definition
from pma_jax.model.loss import PADDING, evaluate
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import local_rows, put_batch


def held_out_batches(tokens: shards.TokenSet, config: Config, mesh: jax.sharding.Mesh) -> list[jax.Array]:
    """Return the first `evaluation.tokens` held-out predictions: int32 [B, M] batches, sharded over the batch axes."""
    rows_b = local_rows(mesh, config.evaluation.batch_size_sequences)
    return [put_batch(mesh, tokens_bxM) for tokens_bxM in _windows(tokens, config, rows_b)]


def evaluation_digest(tokens: shards.TokenSet, config: Config) -> str:
    """Return 16 hex digits of the SHA-256 of the held-out windows; losses with equal digests are comparable."""
    digest = hashlib.sha256()
    for tokens_BxM in _windows(tokens, config):
        digest.update(tokens_BxM.tobytes())
    return digest.hexdigest()[:16]


def make_evaluator(config: Config, mesh: jax.sharding.Mesh) -> Callable[[Any], float]:
    """Return a function of parameters on `mesh` that returns their held-out loss in nats per token.

    The held-out text that `config` names is read once, here.

    Raises:
        ValueError: The text cannot be read, or has tokens outside the model's vocabulary.
    """
    tokens = shards.prepare_tokens(config.data, progress=hosts.is_first())
    shards.check_tokens_match_model(tokens, config.model)
    with jax.set_mesh(mesh):
        graph = graph_definition(config.model)
        held_out = held_out_batches(tokens, config, mesh)

    def loss(params: Any) -> float:
        with jax.set_mesh(mesh):
            return evaluate(graph, params, held_out)

    return loss


def _windows(tokens: shards.TokenSet, config: Config, rows_b: np.ndarray | None = None) -> Iterator[np.ndarray]:
    windows = batches.validation_batches(
        tokens,
        sequence_length_tokens=config.training.sequence_length_tokens,
        tokens_wanted=config.evaluation.tokens,
        batch_size_sequences=config.evaluation.batch_size_sequences,
        rows=rows_b,
    )
    for tokens_BxM, counted_BxL in windows:
        targets_BxL = np.where(counted_BxL, tokens_BxM[:, 1:], PADDING)
        yield np.concatenate([tokens_BxM[:, :1], targets_BxL], axis=1)
