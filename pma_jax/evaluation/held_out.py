"""Held-out batches on the mesh, and a function that evaluates parameters on them.

Dimensions: B sequences per batch, b of which this process reads; L targets per sequence; M = L + 1 tokens.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.data import batches, shards
from pma_jax.model.decoder import graph_definition
from pma_jax.model.loss import PADDING_ID, evaluate
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import local_rows, put_batch


def held_out_batches(tokens: shards.TokenSet, config: Config, mesh: jax.sharding.Mesh) -> list[jax.Array]:
    """Return int32 [B, M] batches with the first `evaluation.tokens` held-out targets, sharded over the batch axes."""
    rows_b = local_rows(mesh, config.evaluation.batch_size_sequences)
    return [put_batch(mesh, tokens_bxM) for tokens_bxM in read_held_out_windows(tokens, config, rows_b)]


def held_out_digest(tokens: shards.TokenSet, config: Config) -> str:
    """Compute the SHA-256 (first 16 hex digits) of the held-out windows.

    Losses on windows with equal digests are comparable.
    """
    digest = hashlib.sha256()
    for tokens_BxM in read_held_out_windows(tokens, config):
        digest.update(tokens_BxM.tobytes())
    return digest.hexdigest()[:16]


def make_evaluator(config: Config, mesh: jax.sharding.Mesh) -> Callable[[Any], float]:
    """Return a function that maps parameters on `mesh` to their held-out loss in nats per token.

    The held-out tokens are read and placed on the mesh here, not at each call. The loss in bits per byte is the loss
    divided by ln(2) * `tokens.validation.bytes_per_token` (`model.loss.bits_per_byte`), where `tokens` is the result of
    `shards.prepare_tokens`. It is exact for the bytes tokenizer; for others, the divisor is an average over the split.

    Raises:
        UserError: The corpus cannot be read, or has tokens outside the model's vocabulary.
    """
    tokens = shards.prepare_tokens(config.data, progress=hosts.is_first_process())
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
    """Yield batches with the first `evaluation.tokens` targets of the held-out split; later targets are PADDING_ID.

    The tokens, their order and the number of batches do not depend on `rows_b`.

    Args:
        tokens: The tokenised corpus.
        config: Determines the sequence length, the number of targets and the batch size.
        rows_b: Rows of each global batch to read, integers [b]; all rows by default.

    Yields:
        int32 [b, M].

    Raises:
        UserError: The held-out split has too few targets.
    """
    L, B = config.training.sequence_length_tokens, config.evaluation.batch_size_sequences
    wanted = config.evaluation.tokens
    available = tokens.validation.tokens - 1
    if not 0 < wanted <= available:
        raise UserError(
            f"evaluation.tokens is {wanted} but the held-out split has only {available} targets: lower it, or raise "
            "data.held_out_percent"
        )
    rows_b = np.arange(B) if rows_b is None else rows_b
    for first_row in range(0, -(-wanted // L), B):
        starts_b = (first_row + rows_b) * L
        windows_bxM = batches.read_windows(tokens.validation, starts_b, L + 1)
        is_counted_bxL = starts_b[:, None] + np.arange(L) < wanted
        windows_bxM[:, 1:] = np.where(is_counted_bxL, windows_bxM[:, 1:], PADDING_ID)
        yield windows_bxM
