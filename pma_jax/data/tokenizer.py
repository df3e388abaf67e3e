"""Tokenizers: UTF-8 bytes, a BPE trained on the corpus, or any Hugging Face tokenizer.json.

Each is a frozen `Tokenizer`, which can be saved as a Hugging Face tokenizer.json and exported with a model. The text of
a special token in a document, such as `<|endoftext|>`, is encoded as ordinary text and does not end the document.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

from pma_jax.config.errors import UserError, first_line
from pma_jax.storage.paths import as_path, expand_user, is_bucket, read_file

END_OF_DOCUMENT = "<|endoftext|>"
# The first of these that a tokenizer.json has is its end-of-document token.
END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>")
_NUM_BYTE_VALUES = 256
_MAX_FILE_BYTES = 2**28  # the largest known tokenizer.json has about 40 MB


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """An immutable mapping between text and ids in [0, vocabulary_size)."""

    name: str  # "bytes", "bpe" or the name of the file that it was loaded from
    vocabulary_size: int  # one more than the largest id
    end_of_document: int  # the id that follows each document
    digest: str  # SHA-256 (hex) of the tokenizer as compact JSON; `save` writes indented JSON
    backend: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)
    is_bytes: bool = False  # ids are byte values, so encoding does not need the backend

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode each text as an int32 array of ids; no special token is added.

        The results of all texts are held in memory.
        """
        if self.is_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def count_bytes(self, ids_T: np.ndarray) -> int:
        """Return the number of UTF-8 bytes of the text of these ids."""
        return (
            ids_T.size
            if self.is_bytes
            else len(self.backend.decode(ids_T.tolist(), skip_special_tokens=False).encode())
        )

    def save(self, path: str | Path) -> None:
        """Write a Hugging Face tokenizer.json; `load_tokenizer` reads it back."""
        Path(path).write_text(self.backend.to_str(pretty=True) + "\n", encoding="utf-8")


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose ids are byte values; id 0 ends a document (`data.corpus` removes NUL characters)."""
    alphabet = _byte_alphabet()
    vocabulary = {END_OF_DOCUMENT: 0} | {alphabet[value]: value for value in range(1, _NUM_BYTE_VALUES)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END_OF_DOCUMENT])
    return dataclasses.replace(_make_tokenizer("bytes", backend), is_bytes=True)


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE with at most `vocabulary_size` ids; training is deterministic.

    Texts are streamed: memory holds only the counts of distinct words.

    Raises:
        UserError: `vocabulary_size` is too small for the 256 bytes and the end-of-document token.
    """
    minimum_size = _NUM_BYTE_VALUES + 1
    if vocabulary_size < minimum_size:
        raise UserError(f"data.bpe_vocabulary_size must be {minimum_size} or more (256 bytes and {END_OF_DOCUMENT})")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _make_tokenizer("bpe", backend)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a Hugging Face tokenizer.json, written by `Tokenizer.save` or by another library.

    Raises:
        UserError: The file does not exist, is not a tokenizer, or has none of `END_OF_DOCUMENT_NAMES`.
    """
    path = as_path(path) if is_bucket(path) else expand_user(path)
    if not path.is_file():
        raise UserError(f"no tokenizer file {path}: data.tokenizer is bytes, bpe, or a path to a tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_file(path, _MAX_FILE_BYTES))
    except (OSError, UserError):
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{path} is not a Hugging Face tokenizer.json: {first_line(error)}") from error
    loaded = _make_tokenizer(path.name, backend)
    return byte_tokenizer() if loaded.digest == byte_tokenizer().digest else loaded


def _make_tokenizer(name: str, backend: tokenizers.Tokenizer) -> Tokenizer:
    """Wrap `backend`; change it in place to neither truncate nor pad, and to encode special tokens as ordinary text."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    vocabulary = backend.get_vocab(with_added_tokens=True)
    end_ids = [vocabulary[token] for token in END_OF_DOCUMENT_NAMES if token in vocabulary]
    if not end_ids:
        raise UserError(
            f"tokenizer {name} has no end-of-document token: add one of {', '.join(END_OF_DOCUMENT_NAMES)} to it"
        )
    digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
    return Tokenizer(name, max(vocabulary.values()) + 1, end_ids[0], digest, backend)


def _byte_alphabet() -> list[str]:
    """Return the printable character that represents each byte value in GPT-2's vocabulary."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(character for character in alphabet if ord(character) >= _NUM_BYTE_VALUES))
    return [chr(value) if chr(value) in alphabet else next(others) for value in range(_NUM_BYTE_VALUES)]
