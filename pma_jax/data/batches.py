"""Batches of token windows; the position in the data is one integer, the sequences consumed so far.

Window i of the train stream is its tokens [i*L, i*L + L + 1): inputs and targets are the same row, shifted by one, and
every token is predicted once an epoch. Each epoch visits all windows in an order of its own, and the order depends on
the seed only: not on the number of processes, nor on where a run was interrupted.

Shapes: B sequences a step over all processes, b those that one process reads, L sequence length in tokens.
"""

import hashlib
import sys
from collections.abc import Iterator

import grain
import numpy as np

from pma_jax import config
from pma_jax.data import shards

_READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # batches read ahead, in background threads


def windows_per_epoch(tokens: shards.TokenSet, sequence_length_tokens: int) -> int:
    """Training windows in one epoch. Raises ValueError when the train split is shorter than one window."""
    windows = (tokens.train.tokens - 1) // sequence_length_tokens
    if windows < 1:
        raise ValueError(
            f"the train split has {tokens.train.tokens} tokens, less than one window of {sequence_length_tokens} + 1: "
            "give more text or lower training.sequence_length_tokens"
        )
    return windows


def train_batches(
    tokens: shards.TokenSet,
    training: config.TrainingConfig,
    *,
    position: int,
    rows: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Rows of each global batch, from `position` on, without end: int32 [b, L+1].

    Args:
        tokens: The prepared corpus.
        training: Batch size, sequence length, seed.
        position: Sequences consumed before, over all processes: steps * B. Any value; nothing is replayed.
        rows: Which rows of every global batch, integers [b]; all of them by default.

    Raises:
        ValueError: The train split is shorter than one window.
    """
    assert position >= 0, position
    length = training.sequence_length_tokens
    B = training.batch_size_sequences
    rows_b = np.arange(B) if rows is None else rows
    windows = windows_per_epoch(tokens, length)
    order = grain.MapDataset.range(windows).shuffle(seed=_order_seed(training.seed)).repeat(None)

    # One call gathers a batch, a third of the cost of a Grain source of windows; and of its own rows only, as looking
    # up the order is what costs.
    def gather(step: int) -> np.ndarray:
        windows_b = np.array([order[position + step * B + row] for row in rows_b.tolist()])
        return read_windows(tokens.train, windows_b * length, length + 1)

    return iter(grain.MapDataset.range(sys.maxsize).map(gather).to_iter_dataset(_READ))


def validation_batches(
    tokens: shards.TokenSet,
    *,
    sequence_length_tokens: int,
    tokens_wanted: int,
    batch_size_sequences: int,
    rows: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The first `tokens_wanted` predictions of the held-out stream: int32 [b, L+1] and a bool mask [b, L] of targets.

    Always the same tokens in the same order: of each batch those in `rows` (integers [b]), by default all. The masks of
    all rows together select exactly `tokens_wanted` targets; whatever the rows, there are as many batches, of one
    shape. For bits per byte, a target stands for `tokens.validation.bytes_per_token` bytes: exact for the bytes
    tokenizer, the split's average for others.

    Raises:
        ValueError: There are fewer held-out tokens.
    """
    available = tokens.validation.tokens - 1
    if not 0 < tokens_wanted <= available:
        raise ValueError(
            f"evaluation.tokens is {tokens_wanted} but the held-out split can predict {available}: lower it, or raise "
            "data.held_out_percent"
        )
    rows_b = np.arange(batch_size_sequences) if rows is None else rows
    batches = -(-tokens_wanted // (sequence_length_tokens * batch_size_sequences))

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in range(batches):
            starts_b = (batch * batch_size_sequences + rows_b) * sequence_length_tokens
            targets_bxL = starts_b[:, None] + np.arange(sequence_length_tokens)
            yield read_windows(tokens.validation, starts_b, sequence_length_tokens + 1), targets_bxL < tokens_wanted

    return read()


def read_windows(split: shards.TokenStream, starts_b: np.ndarray, window_tokens: int) -> np.ndarray:
    """Tokens [start, start + window_tokens) for each start: int32 [b, window_tokens], zeros past the stream's end."""
    ends = np.cumsum([shard.size for shard in split.shards])
    windows_bxW = np.zeros((len(starts_b), window_tokens), np.int32)
    for window_W, first in zip(windows_bxW, starts_b.tolist(), strict=True):
        filled = 0
        index = int(np.searchsorted(ends, first, side="right"))
        while filled < window_tokens and index < len(split.shards):
            shard = split.shards[index]
            offset = first + filled - (int(ends[index]) - shard.size)
            part_W = shard[offset : offset + window_tokens - filled]
            window_W[filled : filled + part_W.size] = part_W
            filled += part_W.size
            index += 1
    return windows_bxW


def _order_seed(seed: int) -> int:
    # Grain adds the epoch to the seed: without a hash, seed 1 would begin with the second epoch of seed 0.
    return int.from_bytes(hashlib.sha256(f"data order {seed}".encode()).digest()[:4], "big")
