import dataclasses
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax import config
from pma_jax.data import batches, sampling, shards

L, B = 16, 8
TRAINING = config.TrainingConfig(sequence_length_tokens=L, batch_size_sequences=B)


def split_of(ids):
    """Return a split that contains `ids`."""
    return shards.TokenStream(1, len(ids), 2 * len(ids), np.asarray(ids, np.uint16))


def tokens_of(train):
    documents = np.array([(1000, 0)], shards.DOCUMENT_DTYPE)
    return shards.TokenSet(Path(), "d", "c", "t", 2**16, 0, split_of(train), split_of(range(1000)), documents)


# 101 windows: neither the batch nor the process count divides it, and its tail of 5 tokens is no window.
TOKENS = tokens_of(np.arange(101 * L + 6))


def take(count, position=0, tokens=TOKENS, training=TRAINING, **processes):
    made = batches.train_batches(tokens, training, consumed_sequences=position, **processes)
    return list(itertools.islice(made, count))


def test_inputs_and_targets_are_shifted_by_one():
    for batch in take(5):
        assert batch.shape == (B, L + 1) and batch.dtype == np.int32
        starts = batch[:, :1]
        assert (starts % L == 0).all() and (batch == starts + np.arange(L + 1)).all()


def test_each_epoch_reads_every_window_once_in_its_own_order():
    rows = np.concatenate(take(3 * 101 // B + 1))[:, 0] // L
    epochs = [rows[i * 101 : (i + 1) * 101] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(101))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tuple(epochs[0]) != tuple(range(101))


def test_seeds_differ_and_do_not_share_epochs():
    other = dataclasses.replace(TRAINING, seed=1)
    rows = [np.concatenate(take(26, training=training))[:, 0] for training in (TRAINING, other)]
    assert not (rows[0][:101] == rows[1][:101]).all()
    assert not (rows[0][101:202] == rows[1][:101]).all(), "seed 1 is not seed 0 one epoch later"
    assert (np.concatenate(take(26)) == np.concatenate(take(26))).all()


@pytest.mark.parametrize("position", [0, 1, B, 5 * B + 3, 101, 101 * B, 1_000_003])
def test_starting_at_a_position_skips_that_many_sequences(position):
    skipped, first = divmod(position, B)
    if position < 10_000:
        rows = np.concatenate(take(skipped + 4))[first + skipped * B :][: 2 * B]
    else:
        rows = np.concatenate(take(4, position=skipped * B))[first:][: 2 * B]
    assert (np.concatenate(take(2, position=position)) == rows).all()


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("position", [0, 13 * B])
def test_processes_together_read_what_one_reads(count, position):
    alone = take(20, position=position)
    parts = [take(20, position=position, rows=rows) for rows in np.split(np.arange(B), count)]
    for step in range(20):
        assert (np.concatenate([part[step] for part in parts]) == alone[step]).all()


def test_rows_need_not_be_contiguous():
    rows = np.array([1, 2, 6])
    for part, complete in zip(take(20, position=13, rows=rows), take(20, position=13), strict=True):
        assert (part == complete[rows]).all()


def test_fork_with_another_batch_size_continues_with_unseen_windows():
    before = np.concatenate(take(5))
    after = take(1, position=5 * B, training=dataclasses.replace(TRAINING, batch_size_sequences=61))[0]
    assert sorted(np.concatenate([before, after])[:, 0] // L) == list(range(101))


@given(st.data())
def test_windows_are_slices_of_the_stream(data):
    size = data.draw(st.integers(1, 60))
    ids = np.arange(1, size + 1)
    window = data.draw(st.integers(1, size))
    starts = np.array(data.draw(st.lists(st.integers(0, size - window), max_size=4)), np.int64)
    read = batches.read_windows(split_of(ids), starts, window)
    assert read.dtype == np.int32 and read.shape == (len(starts), window)
    assert (read == np.array([ids[s : s + window] for s in starts]).reshape(len(starts), window)).all()


def test_impossible_requests_are_one_clear_line():
    short = tokens_of(np.arange(L))
    with pytest.raises(ValueError, match=f"has {L} tokens, fewer than one window of {L} \\+ 1"):
        take(1, tokens=short)
    assert len(take(1, tokens=tokens_of(np.arange(L + 1)))) == 1, "one window is enough"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    data = config.DataConfig(cache_dir=str(tmp_path_factory.mktemp("cache")))
    return data, shards.prepare_tokens(data, progress=False)


def test_packaged_corpus_trains_and_holds_out(packaged):
    data, tokens = packaged
    assert tokens.train.tokens > 5_000_000 and tokens.validation.tokens > 65_536
    assert 0.05 < tokens.validation.tokens / tokens.train.tokens < 0.3
    assert tokens.validation.bytes_per_token == 1
    assert shards.prepare_tokens(data, progress=False).digest == tokens.digest
    batch = take(1, tokens=tokens, position=10**9)[0]
    assert re.search(r"\w", bytes(batch[0].tolist()).decode(errors="replace"))


def test_no_held_out_document_is_in_the_train_stream(packaged):
    _, tokens = packaged
    train, validation = (split.ids.tobytes() for split in (tokens.train, tokens.validation))
    documents = set(train.split(b"\0"))
    held_out = validation.split(b"\0")[:-1]
    assert len(held_out) == tokens.validation.documents > 10
    assert not documents & set(held_out)


def test_packaged_corpus_gives_each_part_ten_documents(packaged):
    _, tokens = packaged
    samples = [sampling.sample_text(tokens, part, 65_536, 256) for part in sampling.PARTS]
    assert all(sample.part_documents >= 10 and len(sample.counts_D) >= 10 for sample in samples)
