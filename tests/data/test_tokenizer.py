import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.data import tokenizer

TEXTS = ["the cat sat on the mat\n" * 20, "a dog in the fog\t" * 20, "naïve café €5 😀\n" * 5]
TRICKY = "the 😀 naïve\r\n\tcat  <|endoftext|> </s> \x01 end"


def encode(made, text):
    return made.encode_many([text])[0]


def decode(made, ids):
    return made.backend.decode(list(ids), skip_special_tokens=False)


@pytest.fixture(scope="module")
def bpe():
    return tokenizer.train_bpe(iter(TEXTS), 280)


def test_bytes_are_their_own_ids():
    made = tokenizer.byte_tokenizer()
    assert (made.name, made.vocabulary_size, made.end_of_document) == ("bytes", 256, 0)
    ids = encode(made, "é!")
    assert ids.dtype == np.int32 and ids.tolist() == [0xC3, 0xA9, 0x21]
    assert decode(made, [0xC3, 0x21]) == "\ufffd!", "a partial character does not stop generation"


@given(st.text())
def test_bytes_round_trip(text):
    made = tokenizer.byte_tokenizer()
    assert bytes(encode(made, text).tolist()).decode() == text


def test_saved_bytes_tokenizer_opens_in_tokenizers_with_the_same_ids(tmp_path):
    made = tokenizer.byte_tokenizer()
    made.save(tmp_path / "tokenizer.json")
    foreign = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "naïve €5 😀 \r\n\t" + "".join(map(chr, range(1, 128)))
    assert foreign.encode(text).ids == encode(made, text).tolist()
    assert foreign.decode(encode(made, text).tolist()) == text
    assert foreign.token_to_id("<|endoftext|>") == made.end_of_document
    assert tokenizer.load_tokenizer(tmp_path / "tokenizer.json") == made


def test_bpe_is_deterministic_and_shorter_than_bytes(bpe):
    again = tokenizer.train_bpe(iter(TEXTS), 280)
    assert again.digest == bpe.digest
    assert bpe.vocabulary_size == 280
    assert len(encode(bpe, TEXTS[0])) < len(TEXTS[0]) / 3
    with pytest.raises(ValueError, match="bpe_vocabulary_size must be 257 or more"):
        tokenizer.train_bpe(TEXTS, 256)


def test_special_tokens_in_a_text_are_plain_text(bpe):
    assert bpe.end_of_document not in encode(bpe, TRICKY)
    assert decode(bpe, encode(bpe, TRICKY)) == TRICKY
    assert decode(bpe, [bpe.end_of_document]) == "<|endoftext|>"


def test_encode_many_equals_encode_of_each(bpe):
    for made in (bpe, tokenizer.byte_tokenizer()):
        many = made.encode_many([TRICKY, "", "cat"])
        assert [ids.tolist() for ids in many] == [encode(made, text).tolist() for text in (TRICKY, "", "cat")]


def test_tokenizer_round_trips_through_its_file(bpe, tmp_path):
    bpe.save(tmp_path / "mine.json")
    loaded = tokenizer.load_tokenizer(tmp_path / "mine.json")
    assert (loaded.digest, loaded.name) == (bpe.digest, "mine.json")
    assert (loaded.vocabulary_size, loaded.end_of_document) == (280, 0)
    assert encode(loaded, TRICKY).tolist() == encode(bpe, TRICKY).tolist()


def test_foreign_tokenizer_is_used_without_its_options(tmp_path):
    """Ignore truncation, padding and a begin token in the file."""
    vocabulary = {"<s>": 0, "cat": 1, "dog": 2, "</s>": 7, "<unk>": 3}
    foreign = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    foreign.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    foreign.add_special_tokens(["<s>", "</s>"])
    foreign.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    foreign.enable_truncation(2)
    foreign.enable_padding(length=8)
    foreign.save(str(tmp_path / "tokenizer.json"))
    made = tokenizer.load_tokenizer(tmp_path / "tokenizer.json")
    assert encode(made, "cat dog cat dog").tolist() == [1, 2, 1, 2]
    assert made.end_of_document == 7
    assert made.vocabulary_size == 8, "ids may have gaps: the size includes the largest"


def test_tokenizer_mistakes_are_one_clear_line(tmp_path):
    (tmp_path / "not.json").write_text("{}")
    endless = tokenizers.Tokenizer(tokenizers.models.WordLevel({"cat": 0}, unk_token="cat"))
    endless.save(str(tmp_path / "endless.json"))
    for name, message in [
        ("byte", "no tokenizer file .*byte: data.tokenizer is bytes, bpe, or a path"),
        ("not.json", "not.json is not a Hugging Face tokenizer.json"),
        ("endless.json", "endless.json has no end-of-document token: add one of"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            tokenizer.load_tokenizer(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_file_is_plain_json(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["truncation"] is None and saved["padding"] is None
