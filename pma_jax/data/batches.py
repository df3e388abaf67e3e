"""Batches of token windows. The position in the data is one integer: the number of sequences consumed so far.

Window i of the train stream holds its tokens [i*L, i*L + L + 1): inputs and targets are the same row, shifted by one,
and every token is predicted once per epoch. Each epoch visits all windows in a different order, which depends only on
the seed, not on the number of processes or on interruptions of the run.

Shapes: B sequences per step over all processes, b sequences that one process reads, L sequence length in tokens, W
window length in tokens.
"""

import hashlib
import sys
from collections.abc import Iterator

import grain
import numpy as np

from pma_jax import config
from pma_jax.data import shards

_READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # prefetched batches, read in background threads


def windows_per_epoch(tokens: shards.TokenSet, sequence_length_tokens: int) -> int:
    """Return the number of training windows in one epoch.

    Raises:
        ValueError: The train split is shorter than one window.
    """
    windows = (tokens.train.tokens - 1) // sequence_length_tokens
    if windows < 1:
        raise ValueError(
            f"the train split has {tokens.train.tokens} tokens, less than one window of {sequence_length_tokens} + 1: "
            "add more text or lower training.sequence_length_tokens"
        )
    return windows


def train_batches(
    tokens: shards.TokenSet,
    training: config.TrainingConfig,
    *,
    position: int,
    rows: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Return an endless iterator over the global batches from `position` on.

    Args:
        tokens: The prepared corpus.
        training: Batch size, sequence length and seed.
        position: Number of sequences consumed so far over all processes (steps * B). Starting at any position takes
            the same time: earlier batches are not read.
        rows: Indices of the rows to read from each global batch, integers [b]; all rows by default.

    Returns:
        An iterator over int32 arrays [b, L+1].

    Raises:
        ValueError: The train split is shorter than one window.
    """
    assert position >= 0, position
    length = training.sequence_length_tokens
    B = training.batch_size_sequences
    rows_b = np.arange(B) if rows is None else rows
    windows = windows_per_epoch(tokens, length)
    order = grain.MapDataset.range(windows).shuffle(seed=_order_seed(training.seed)).repeat(None)

    # Gathering a batch in one call costs a third of a Grain source of single windows. Only this process's rows are
    # looked up, because the lookup in the shuffled order dominates the cost.
    def gather(step: int) -> np.ndarray:
        windows_b = np.array([order[position + step * B + row] for row in rows_b.tolist()])
        return read_windows(tokens.train, windows_b * length, length + 1)

    return iter(grain.MapDataset.range(sys.maxsize).map(gather).to_iter_dataset(_READ))


def read_windows(split: shards.TokenStream, starts_b: np.ndarray, window_tokens: int) -> np.ndarray:
    """Read tokens [start, start + window_tokens) for each start.

    Args:
        split: The token stream to read.
        starts_b: First token of each window, integers [b].
        window_tokens: W.

    Returns:
        int32 [b, W], with zeros past the end of the stream.
    """
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
    # Grain adds the epoch to the seed: without a hash, the first epoch of seed 1 would be the second of seed 0.
    return int.from_bytes(hashlib.sha256(f"data order {seed}".encode()).digest()[:4], "big")
