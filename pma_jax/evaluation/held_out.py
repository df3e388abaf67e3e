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
    return [put_batch(mesh, tokens_bxM) for tokens_bxM in read_held_out_windows(tokens, config, rows_b)]


def held_out_digest(tokens: shards.TokenSet, config: Config) -> str:
    """Return 16 hex digits of the SHA-256 of the held-out windows; losses with equal digests are comparable."""
    digest = hashlib.sha256()
    for tokens_BxM in read_held_out_windows(tokens, config):
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


def read_held_out_windows(
    tokens: shards.TokenSet, config: Config, rows_b: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield windows with the first `evaluation.tokens` predictions of the held-out stream; later targets are PADDING.

    The tokens and their order are always the same, and so are the number of batches and their shape, whatever `rows_b`.
    For bits per byte, divide by `tokens.validation.bytes_per_token`, which is exact for the bytes tokenizer and the
    average over the split for other tokenizers.

    Args:
        tokens: The prepared corpus.
        config: Sequence length, number of predictions and batch size.
        rows_b: Indices of the rows to read from each global batch, integers [b]; all rows by default.

    Yields:
        int32 [b, L+1].

    Raises:
        ValueError: The held-out split has too few targets.
    """
    L, B, wanted = (
        config.training.sequence_length_tokens,
        config.evaluation.batch_size_sequences,
        config.evaluation.tokens,
    )
    available = tokens.validation.tokens - 1
    if not 0 < wanted <= available:
        raise ValueError(
            f"evaluation.tokens is {wanted} but the held-out split has only {available} targets: lower it, or raise "
            "data.held_out_percent"
        )
    rows_b = np.arange(B) if rows_b is None else rows_b
    for first_row in range(0, -(-wanted // L), B):
        starts_b = (first_row + rows_b) * L
        windows_bxM = batches.read_windows(tokens.validation, starts_b, L + 1)
        is_counted_bxL = starts_b[:, None] + np.arange(L) < wanted
        windows_bxM[:, 1:] = np.where(is_counted_bxL, windows_bxM[:, 1:], PADDING)
        yield windows_bxM
