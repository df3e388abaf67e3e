"""Documents of a corpus, and their division into training and held-out text.

A hash of a document's name decides its split, and its place in the held-out text (data/sampling.py). Training documents
whose text equals a held-out text are dropped (`split_documents`), so that repeated texts, such as licence files and
boilerplate `__init__.py` files, do not leak from training into validation.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np

TRAIN, VALIDATION = "train", "validation"


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and the name that decides its split. Documents may share a name; they then belong to the same split."""

    name: str
    text: str
    prompt: str = ""  # precedes the text and is excluded from the loss
    # int32 [T], of a document that was tokenised before, without an end-of-document token; its text is empty.
    ids: np.ndarray | None = None

    @property
    def full_text(self) -> str:
        """The prompt followed by the text."""
        return self.prompt + self.text

    @property
    def content(self) -> bytes:
        """The bytes of the full text in UTF-8, or of the ids."""
        return self.full_text.encode() if self.ids is None else self.ids.astype("<i4").tobytes()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """An opened corpus. `read()` starts a new pass over the documents, always in the same order."""

    digest: str  # SHA-256 (hex) of the names and contents of all files, or of all rows
    read: Callable[[], Iterator[Document]]


@dataclasses.dataclass(frozen=True)
class CorpusScan:
    """Counts and hashes of held-out documents from one pass over a corpus."""

    document_count: int
    content_bytes: int
    held_out_keys: Mapping[bytes, int]  # SHA-256 of every held-out content -> `document_key` of its first document


def is_held_out(name: str, percent: float) -> bool:
    """Return whether the document `name` belongs to the `percent` of documents held out for validation."""
    fraction = int.from_bytes(_hash_name(name)[:8], "big") / 2**64
    return 100 * fraction < percent


def document_key(name: str) -> int:
    """Return 64 bits of a hash of the name, independent of those that decide `is_held_out`."""
    return int.from_bytes(_hash_name(name)[8:16], "big")


def hash_content(document: Document) -> bytes:
    """Return the SHA-256 of the document's full text or ids."""
    return hashlib.sha256(document.content).digest()


def scan_corpus(corpus: Corpus, held_out_percent: float, advance: Callable[[int], None] = lambda _: None) -> CorpusScan:
    """Count documents and bytes, and collect the hashes of the held-out documents.

    Args:
        corpus: The corpus to read.
        held_out_percent: Percentage of documents held out for validation.
        advance: Called with the number of bytes of each document after it is read.
    """
    document_count = content_bytes = 0
    held_out: dict[bytes, int] = {}
    for document in corpus.read():
        content = document.content
        document_count += 1
        content_bytes += len(content)
        advance(len(content))
        if is_held_out(document.name, held_out_percent):
            held_out.setdefault(hashlib.sha256(content).digest(), document_key(document.name))
    return CorpusScan(document_count, content_bytes, held_out)


def split_documents(corpus: Corpus, held_out_percent: float, scan: CorpusScan) -> Iterator[tuple[str, Document]]:
    """Yield (split, document) for each document, except training documents that repeat a held-out text."""
    for document in corpus.read():
        if is_held_out(document.name, held_out_percent):
            yield VALIDATION, document
        elif hash_content(document) not in scan.held_out_keys:
            yield TRAIN, document


def _hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
