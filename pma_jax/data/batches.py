"""Batches of token windows. The position in the data is one integer: the number of sequences (windows) consumed so far.

Window i holds tokens [i*L, i*L + L + 1) of the train stream: inputs and targets are the same row, shifted by one. Each
target is predicted once per epoch; the tokens after the last complete window are not used. Each epoch visits all
windows in a different order, which depends only on the seed, not on the number of processes or on interruptions of the
run.

Suffixes of array names give their shapes, such as windows_bxW [b, W]: B sequences per step over all processes, b
sequences that one process reads, L sequence length in tokens, W window length in tokens.
"""

import hashlib
import sys
from collections.abc import Iterator

import grain
import numpy as np

from pma_jax import config
from pma_jax.config.errors import UserError
from pma_jax.data import shards
from pma_jax.data.bucket_ids import BucketIds

_READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # elements are batches


def train_windows_per_epoch(corpus: shards.TokenSet, sequence_length_tokens: int) -> int:
    """Return the number of training windows in one epoch.

    Raises:
        UserError: The train split is shorter than one window.
    """
    window_count = (corpus.train.tokens - 1) // sequence_length_tokens
    if window_count < 1:
        raise UserError(
            f"the train split has {corpus.train.tokens} tokens, fewer than one window of {sequence_length_tokens} + 1: "
            "add more text or lower training.sequence_length_tokens"
        )
    return window_count


def train_batches(
    corpus: shards.TokenSet,
    training: config.TrainingConfig,
    *,
    consumed_sequences: int,
    rows: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Iterate endlessly over this process's rows of the global batches, from `consumed_sequences` on.

    Args:
        corpus: The tokenised corpus.
        training: Batch size, sequence length and seed.
        consumed_sequences: Number of sequences consumed so far over all processes (steps * B). Earlier batches are
            skipped without being read, so resuming takes constant time.
        rows: Indices of the rows to read from each global batch, integers [b]; all rows by default.

    Returns:
        An iterator over int32 arrays [b, L+1].

    Raises:
        UserError: The train split is shorter than one window.
    """
    assert consumed_sequences >= 0, consumed_sequences
    length = training.sequence_length_tokens
    B = training.batch_size_sequences
    rows_b = np.arange(B) if rows is None else rows
    window_count = train_windows_per_epoch(corpus, length)
    order = grain.MapDataset.range(window_count).shuffle(seed=_order_seed(training.seed)).repeat(None)

    # Reading a batch in one call is three times as fast as a Grain source that returns single windows. Only the rows of
    # this process are looked up, because the lookup in the shuffled order takes most of the time.
    def read_batch(batch_index: int) -> np.ndarray:
        window_indices_b = np.array([order[consumed_sequences + batch_index * B + row] for row in rows_b.tolist()])
        return read_windows(corpus.train, window_indices_b * length, length + 1)

    return iter(grain.MapDataset.range(sys.maxsize).map(read_batch).to_iter_dataset(_READ_OPTIONS))


def read_windows(split: shards.TokenStream, starts_b: np.ndarray, window_tokens: int) -> np.ndarray:
    """Read tokens [start, start + window_tokens) for each start; all lie inside the stream.

    Args:
        split: The token stream to read.
        starts_b: Offset of the first token of each window in the stream, integers [b].
        window_tokens: Number of tokens per window, W.

    Returns:
        int32 [b, W].
    """
    if isinstance(split.ids, BucketIds):
        return split.ids.read_windows(starts_b, window_tokens).astype(np.int32)
    windows_bxW = np.empty((len(starts_b), window_tokens), np.int32)
    for window_W, start in zip(windows_bxW, starts_b.tolist(), strict=True):
        window_W[:] = split.ids[start : start + window_tokens]
    return windows_bxW


def _order_seed(seed: int) -> int:
    # Grain adds the epoch to the seed: without a hash, epoch 0 of seed 1 would have the order of epoch 1 of seed 0.
    return int.from_bytes(hashlib.sha256(f"data order {seed}".encode()).digest()[:4], "big")
