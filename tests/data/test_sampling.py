"""Samples of held-out text: parts, windows, nesting; and the standard error, against float64 numpy and 200 salts."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.data import shards
from pma_jax.data.sampling import ALL, FIT, PADDING_ID, PARTS, REPORT, SELECT, estimate, sample_text

L = 16
STRANGE = 2**14  # ids from here on are those of strange documents


def tokens_of(lengths_D, keys_D=None, strange_D=None):
    """Return a token set whose held-out split has documents of these lengths; each ends with id 0."""
    rng, documents = np.random.default_rng(1), []
    for d, length in enumerate(lengths_D):
        ids = rng.integers(1, 200, length) + (STRANGE if strange_D is not None and strange_D[d] else 0)
        documents.append(np.append(ids[:-1], 0))
    keys_D = np.random.default_rng(2).integers(0, 2**63, len(lengths_D)) if keys_D is None else keys_D
    index = np.array(list(zip(np.cumsum(lengths_D), keys_D, strict=True)), shards.DOCUMENT_DTYPE)
    split = shards.TokenStream(len(lengths_D), sum(lengths_D), 0, np.concatenate(documents).astype(np.uint16))
    return shards.TokenSet(Path(), "d", "c", "t", 2**16, 0, split, split, index)


def distinct_tokens(lengths_D, keys_D=None):
    """Return a token set in which each id occurs once, so that targets can be told apart."""
    tokens = tokens_of(lengths_D, keys_D)
    ids = np.arange(1, tokens.validation.tokens + 1, dtype=np.uint16)
    split = shards.TokenStream(len(lengths_D), len(ids), 0, ids)
    return shards.TokenSet(Path(), "d", "c", "t", 2**16, 0, split, split, tokens.held_out_documents)


def targets(sample):
    """Return the counted targets of a sample."""
    return sample.windows[:, 1:][sample.documents >= 0].tolist()


lengths = st.lists(st.integers(1, 70), min_size=3, max_size=40)


@given(lengths, st.integers(0, 5))
def test_parts_are_disjoint_and_cover_all_documents(lengths_D, salt):
    tokens, seen = distinct_tokens(lengths_D), []
    for part in PARTS:
        wanted = int(sum(lengths_D))
        try:
            sample = sample_text(tokens, part, wanted, L, salt)
        except ValueError as error:
            wanted = int(str(error).split("only ")[1].split()[0])
            sample = sample_text(tokens, part, wanted, L, salt)
        assert len(targets(sample)) == wanted and sample.part_documents in (
            len(lengths_D) // 3,
            -(-len(lengths_D) // 3),
        )
        seen += targets(sample)
    assert sorted(seen) == tokens.validation.ids.tolist()
    assert sorted(targets(sample_text(tokens, ALL, len(seen), L, salt))) == sorted(seen)


@given(lengths, st.data())
def test_a_larger_sample_contains_the_smaller_with_the_same_context(lengths_D, data):
    tokens, total = distinct_tokens(lengths_D), int(sum(lengths_D))
    large = data.draw(st.integers(1, total))
    small = data.draw(st.integers(1, large))
    one, two = (sample_text(tokens, ALL, wanted, L) for wanted in (small, large))
    assert targets(two)[:small] == targets(one) and len(targets(two)) == large
    rows = len(one.windows)
    is_same = one.windows == two.windows[:rows]
    assert (is_same | (one.windows == PADDING_ID)).all() and is_same[:, 0].all()


@given(lengths)
def test_windows_are_slices_of_whole_documents_one_after_another(lengths_D):
    tokens = distinct_tokens(lengths_D)
    sample = sample_text(tokens, ALL, int(sum(lengths_D)), L)
    ends = set(tokens.held_out_documents["end"].tolist())
    starts = {1, *(end + 1 for end in ends)} - {tokens.validation.tokens + 1}
    for window in sample.windows.tolist():
        for before, after in itertools.pairwise(window):
            if after != PADDING_ID:
                assert after == before + 1 if after not in starts else before in {*ends, tokens.end_of_document}
    counts = dict(enumerate(sample.counts_D))
    assert sorted(counts.values()) == sorted(map(float, lengths_D))


def test_documents_with_one_key_are_one_document():
    tokens = distinct_tokens([20] * 12, keys_D=[1, 2, 3, 4, 5, 6] * 2)
    samples = [sample_text(tokens, part, 80, L) for part in PARTS]
    assert [sample.part_documents for sample in samples] == [2, 2, 2]
    assert all(sample.counts_D.tolist() == [40, 40] for sample in samples)


def test_documents_and_names_decide_the_parts_not_their_order():
    keys = np.arange(30) * 7919
    one = distinct_tokens([10] * 30, keys)
    again = distinct_tokens([10] * 30, keys[::-1])
    mirrored = 301 - np.array(targets(sample_text(one, REPORT, 100, 10)))
    assert sorted((mirrored - 1) // 10) == sorted((np.array(targets(sample_text(again, REPORT, 100, 10))) - 1) // 10)


def test_too_many_tokens_are_one_clear_line():
    tokens = tokens_of([100] * 30)
    with pytest.raises(ValueError, match=r"tokens is 1001 but the part 'select' .* only 1000 tokens in 10 doc"):
        sample_text(tokens, SELECT, 1001, L)
    with pytest.raises(ValueError, match=r"part 'fit' .* only 0 tokens in 0 documents"):
        sample_text(tokens_of([100]), FIT, 10, L)


def test_masked_targets_are_not_counted():
    tokens = distinct_tokens([40] * 6)
    prompts = np.where(np.arange(240) % 40 < 15, ~tokens.validation.ids.astype(np.int32), tokens.validation.ids)
    split = shards.TokenStream(6, 240, 0, prompts)
    masked = shards.TokenSet(Path(), "d", "c", "t", 2**16, 0, split, split, tokens.held_out_documents)
    sample = sample_text(masked, ALL, 240, L)
    assert sample.counts_D.tolist() == [25.0] * 6 and sample.describe()["tokens"] == 150


def test_digests_tell_samples_apart():
    tokens = tokens_of([90] * 30)
    samples = [sample_text(tokens, *how) for how in ((SELECT, 500, L), (REPORT, 500, L), (SELECT, 501, L))]
    samples += [sample_text(tokens, SELECT, 500, 17), sample_text(tokens, SELECT, 500, L, 1)]
    assert len({sample.digest for sample in samples}) == 5
    assert sample_text(tokens, SELECT, 500, L).digest == samples[0].digest and len(samples[0].digest) == 16


def test_standard_error_is_that_of_the_jackknife_over_documents():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 500, 40).astype(float)
    nats = counts * rng.normal(2, 0.5, 40)
    found = estimate(nats, counts)
    ratio = nats.sum() / counts.sum()
    leave_one_out = [np.delete(nats, d).sum() / np.delete(counts, d).sum() for d in range(40)]
    expected = np.sqrt(39 / 40 * np.square(leave_one_out - np.mean(leave_one_out)).sum())
    assert (found.loss, found.standard_error) == (pytest.approx(ratio), pytest.approx(expected, rel=1e-12))
    # About the same by linearisation, which is another theory.
    linearised = np.sqrt(np.var(nats - ratio * counts, ddof=1) * 40) / counts.sum()
    assert found.standard_error == pytest.approx(linearised, rel=0.1)
    assert estimate(nats[:1], counts[:1]).standard_error is None
    # A document with most of the text hardly differs from the mean, yet decides it.
    counts, nats = np.array([900.0, *[20.0] * 5]), np.array([900.0, *[40.0] * 5])
    ratio, without_largest = nats.sum() / 1000, 2.0
    assert estimate(nats, counts).standard_error > 0.7 * (without_largest - ratio)


# Nats by id: the strange documents are far worse, as those of 15% of a corpus that sort first.
NATS = np.where(np.arange(2**16) < STRANGE, 1.0, 15.0) + np.random.default_rng(3).exponential(0.5, 2**16)


@pytest.mark.parametrize(
    ("documents", "part", "wanted", "window", "tail"),
    [
        (40, ALL, 32_768, 256, 1.0),
        (300, REPORT, 32_768, 64, 1.0),
        (300, REPORT, 8_192, 256, 1.0),
        (300, ALL, 32_768, 1024, 1.0),
        (30, ALL, 32_768, 256, 2.0),  # lengths from 20 to 40,000
        (300, ALL, 32_768, 256, 2.0),
    ],
)
def test_losses_on_samples_lie_within_two_standard_errors_of_that_on_all_text(documents, part, wanted, window, tail):
    rng = np.random.default_rng(4)
    lengths_D = rng.lognormal(np.log(800), tail, documents).astype(int) + 20
    lengths_D[0] = max(lengths_D[0], 40_000 - lengths_D.sum())
    tokens = tokens_of(lengths_D.tolist(), strange_D=np.arange(documents) < 0.15 * documents)
    true_loss = NATS[tokens.validation.ids].mean()
    found = []
    for salt in range(200):
        sample = sample_text(tokens, part, wanted, window, salt)
        assert len(targets(sample)) == wanted
        found.append(sample.estimate(NATS[sample.windows[:, 1:]]))
    errors = np.array([evaluated.loss for evaluated in found]) - true_loss
    standard_errors = np.array([evaluated.standard_error for evaluated in found])
    assert (abs(errors) <= 2 * standard_errors).sum() >= 180
    # No bias, and standard errors of the right size: the text is finite, so errors are smaller rather than larger.
    assert abs(errors.mean()) < 3 * errors.std() / np.sqrt(200) + 0.02
    assert errors.std() < 1.15 * np.sqrt(np.mean(np.square(standard_errors)))
