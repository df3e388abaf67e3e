"""From documents to ids: the tokenizer that a configuration names, and blocks of documents that it encodes at once."""

from collections.abc import Iterator

import numpy as np
from rich import progress as bars

from pma_jax import config
from pma_jax.config.errors import UserError
from pma_jax.data import documents
from pma_jax.data import tokenizer as tokenizing

_ENCODE_BYTES = 2**22  # bytes of documents per call of the tokenizer
Named = tuple[str, documents.Document]  # a document and its split


def select_tokenizer(
    data: config.DataConfig, source: documents.Corpus, scan: documents.CorpusScan, bar: bars.Progress
) -> tokenizing.Tokenizer:
    """Return the tokenizer that `data` names; train it on the training documents if it is a BPE.

    Raises:
        UserError: It cannot be read, or is to be trained on tokens.
    """
    if data.tokenizer == "bytes":
        return tokenizing.byte_tokenizer()
    if data.tokenizer != "bpe":
        return tokenizing.load_tokenizer(data.tokenizer)
    if data.source == "tokens":
        raise UserError("data.tokenizer=bpe needs text: name the tokenizer.json that the tokens were written with")
    task = bar.add_task("training a tokenizer", total=scan.content_bytes)

    def train_texts() -> Iterator[str]:
        for split, document in documents.split_documents(source, data.held_out_percent, scan):
            if split == documents.TRAIN:
                bar.advance(task, len(document.full_text.encode()))
                yield document.full_text

    return tokenizing.train_bpe(train_texts(), data.bpe_vocabulary_size)


def group_documents(split: Iterator[Named]) -> Iterator[list[Named]]:
    """Yield blocks of consecutive documents, each of at least `_ENCODE_BYTES` except the last."""
    block, size = [], 0
    for document in split:
        block.append(document)
        size += len(document[1].content)
        if size >= _ENCODE_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def encode_texts(tokenizer: tokenizing.Tokenizer, block: list[Named]) -> list[np.ndarray]:
    """Return the ids of each document's text; those of a document that was tokenised before, if the tokenizer has them.

    Raises:
        UserError: An id is outside the tokenizer's vocabulary.
    """
    if block[0][1].ids is None:
        return tokenizer.encode_many([document.text for _, document in block])
    end = tokenizer.end_of_document
    all_ids = [document.ids for _, document in block if document.ids is not None]
    ids = [ids_T[: -1 if ids_T[-1] == end else None] for ids_T in all_ids]
    for (_, document), ids_T in zip(block, ids, strict=True):
        if ids_T.size and ids_T.max() >= tokenizer.vocabulary_size:
            raise UserError(
                f"{document.name} has the id {ids_T.max()}, and the {tokenizer.name} tokenizer has "
                f"{tokenizer.vocabulary_size:,} ids: set data.tokenizer to the one that the files were written with"
            )
    return ids
