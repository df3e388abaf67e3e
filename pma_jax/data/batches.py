"""Batches of token windows; the position in the data is one integer, the sequences consumed so far.

Window i of the train stream is its tokens [i*L, i*L + L + 1): inputs and targets are the same row, shifted by one, and
every token is predicted once an epoch. Each epoch visits all windows in an order of its own, and the order depends on
the seed only: not on the number of processes, nor on where a run was interrupted.

Shapes: B sequences a step over all processes, b = B / processes, L sequence length in tokens.
"""

import hashlib
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
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[np.ndarray]:
    """One process's rows of each global batch, from `position` on, without end: int32 [b, L+1].

    Args:
        tokens: The prepared corpus.
        training: Batch size, sequence length, seed.
        position: Sequences consumed before, over all processes: steps * B. Any value; nothing is replayed.
        process_index: Process p reads rows [p*b, (p+1)*b) of every global batch.
        process_count: Processes that read together; divides B.

    Raises:
        ValueError: The train split is shorter than one window, or `process_count` does not divide the batch.
    """
    assert position >= 0, position
    length = training.sequence_length_tokens
    rows = _rows_per_process(training.batch_size_sequences, process_index, process_count)
    windows = windows_per_epoch(tokens, length)

    def gather(windows_b: np.ndarray) -> np.ndarray:
        return read_windows(tokens.train, windows_b * length, length + 1)

    # Indices are shuffled and batched, then one call gathers a batch: a third of the cost of a Grain source of windows.
    order = grain.MapDataset.range(windows).shuffle(seed=_order_seed(training.seed)).repeat(None)
    # Dropping the remainder of an endless order drops nothing, but keeps Grain's length an exact integer.
    batches = order[position:].batch(rows, drop_remainder=True, batch_fn=np.asarray)
    # Every process_count-th batch of b rows: consecutive rows of each global batch.
    return iter(batches[process_index::process_count].map(gather).to_iter_dataset(_READ))


def validation_batches(
    tokens: shards.TokenSet,
    *,
    sequence_length_tokens: int,
    tokens_wanted: int,
    batch_size_sequences: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The first `tokens_wanted` predictions of the held-out stream: int32 [b, L+1] and a bool mask [b, L] of targets.

    Always the same tokens in the same order. The masks of all processes together select exactly `tokens_wanted`
    targets; every process gets as many batches, of one shape. For bits per byte, a target stands for
    `tokens.validation.bytes_per_token` bytes: exact for the bytes tokenizer, the split's average for others.

    Raises:
        ValueError: There are fewer held-out tokens, or `process_count` does not divide the batch.
    """
    available = tokens.validation.tokens - 1
    if not 0 < tokens_wanted <= available:
        raise ValueError(
            f"evaluation.tokens is {tokens_wanted} but the held-out split can predict {available}: lower it, or raise "
            "data.held_out_percent"
        )
    rows = _rows_per_process(batch_size_sequences, process_index, process_count)
    batches = -(-tokens_wanted // (sequence_length_tokens * batch_size_sequences))

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in range(batches):
            first = batch * batch_size_sequences + process_index * rows
            starts_b = np.arange(first, first + rows) * sequence_length_tokens
            targets_bxL = starts_b[:, None] + np.arange(sequence_length_tokens)
            yield read_windows(tokens.validation, starts_b, sequence_length_tokens + 1), targets_bxL < tokens_wanted

    return read()


def read_windows(split: shards.Split, starts_b: np.ndarray, window_tokens: int) -> np.ndarray:
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


def _rows_per_process(batch_size_sequences: int, process_index: int, process_count: int) -> int:
    assert 0 <= process_index < process_count, (process_index, process_count)
    if batch_size_sequences % process_count:
        raise ValueError(f"a batch of {batch_size_sequences} sequences does not divide over {process_count} processes")
    return batch_size_sequences // process_count


def _order_seed(seed: int) -> int:
    # Grain adds the epoch to the seed: without a hash, seed 1 would begin with the second epoch of seed 0.
    return int.from_bytes(hashlib.sha256(f"data order {seed}".encode()).digest()[:4], "big")
