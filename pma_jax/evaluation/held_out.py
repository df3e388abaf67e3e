"""The held-out tokens of a configuration, on the mesh, and the loss of any parameters on them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """The first `evaluation.tokens` held-out predictions: int32 [B, L + 1] each, split along the batch axes."""
    rows_b = local_rows(mesh, config.evaluation.batch_size_sequences)
    return [put_batch(mesh, tokens_bxM) for tokens_bxM in _windows(tokens, config, rows_b)]


def evaluation_digest(tokens: shards.TokenSet, config: Config) -> str:
    """SHA-256 (16 hex digits) of the held-out windows: equal digests, comparable losses."""
    digest = hashlib.sha256()
    for tokens_BxM in _windows(tokens, config):
        digest.update(tokens_BxM.tobytes())
    return digest.hexdigest()[:16]


def evaluator(config: Config, mesh: jax.sharding.Mesh) -> Callable[[Sequence[Any]], list[float]]:
    """What gives the held-out nats a token of parameter trees on `mesh`, on the text that `config` names.

    The text is read once, here. Raises ValueError when it cannot be read, or its tokens are past the model's
    vocabulary.
    """
    tokens = shards.prepare_tokens(config.data, progress=hosts.is_first())
    shards.check_tokens_match_model(tokens, config.model)
    with jax.set_mesh(mesh):
        graph = graph_definition(config.model)
        held_out = held_out_batches(tokens, config, mesh)

    def losses(trees: Sequence[Any]) -> list[float]:
        with jax.set_mesh(mesh):
            # Each waits for the one before: with more collectives in flight than threads, XLA on CPU comes to a halt.
            return [evaluate(graph, params, held_out) for params in trees]

    return losses


def evaluate_all(config: Config, trees: Iterable[Any], mesh: jax.sharding.Mesh) -> Iterator[float]:
    """Held-out nats a token of each parameter tree, drawn one at a time; raises as `evaluator` does."""
    losses = evaluator(config, mesh)
    for params in trees:
        yield losses([params])[0]


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
