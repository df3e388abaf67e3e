"""Text becomes tokens once: memory-mapped shards of unsigned integers in a folder named by what decides them.

    CACHE_DIR/DIGEST/meta.json              counts, data type, digests
                     tokenizer.json         Hugging Face format
                     train-00000.bin ...    ids, little-endian, of bounded size
                     validation-00000.bin ...

Each document's ids are followed by the tokenizer's end-of-document id. Where prompts come before what is learned, ids
are signed, and a prompt's id t lies there as -t - 1: as a target it does not count (model/loss.py). A folder
appears complete or not at all: it is written under a temporary name, synced and renamed.

Shapes: T tokens, P those of a prompt.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.progress

from pma_jax import config
from pma_jax.data import corpus
from pma_jax.data import tokenizer as tokenizing
from pma_jax.storage import atomic, locks
from pma_jax.storage.paths import is_bucket

FORMAT = 1
SHARD_BYTES = 2**28
_ENCODE_CHARACTERS = 2**22  # text handed to the tokenizer at once


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """One split's token stream: the shards in order, as if concatenated."""

    documents: int
    tokens: int  # T: with one end-of-document token a document
    utf8_bytes: int  # of the text, and one more a document for its end
    shards: tuple[np.ndarray, ...]  # uint8, uint16 or uint32, signed with prompts, [T of the shard], mapped, read-only

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes a token, over the whole split; exactly 1 for the bytes tokenizer."""
        return self.utf8_bytes / self.tokens


@dataclasses.dataclass(frozen=True)
class TokenSet:
    """A prepared corpus."""

    directory: Path
    digest: str  # SHA-256 (hex) of what decides the ids: corpus, split, tokenizer, format
    corpus_digest: str
    tokenizer: str  # bytes | bpe | a file's name
    vocabulary_size: int  # one more than the largest id that can occur
    end_of_document: int
    train: TokenStream
    validation: TokenStream

    def load_tokenizer(self) -> tokenizing.Tokenizer:
        """The tokenizer that made these tokens, from `directory`/tokenizer.json."""
        return tokenizing.load_tokenizer(self.directory / "tokenizer.json")


def prepare_tokens(data: config.DataConfig, *, progress: bool = True, shard_bytes: int = SHARD_BYTES) -> TokenSet:
    """Tokenise the corpus of `data` into `data.cache_dir`, or open what is there already.

    The corpus is read to identify it (about a second a gigabyte), then only when it is new: twice for its survey and
    its tokens, once more to train a BPE. Memory is bounded by the largest document. Safe to kill, and safe to run in
    many processes at once: one works, the others wait for it.

    Args:
        data: Where text comes from and how it becomes tokens.
        progress: Show a bar on a terminal, or one line elsewhere, on stderr.
        shard_bytes: Largest size of a shard.

    Raises:
        ValueError: The corpus or the tokenizer cannot be read, a split has no document, the cache cannot be written.
    """
    if is_bucket(data.cache_dir):
        raise ValueError(f"data.cache_dir: {data.cache_dir}: tokens are mapped into memory, so they lie on a disk")
    source = corpus.open_corpus(data)
    key = _key(data, source.digest)
    cache = Path(data.cache_dir).expanduser()
    target = cache / key
    if not target.exists():
        console = rich.console.Console(stderr=True, quiet=not progress, highlight=False, soft_wrap=True)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _alone(cache, key, console):
                if not target.exists():
                    _prepare_at(target, data, source, console, shard_bytes)
        except OSError as error:
            raise ValueError(f"cannot write tokens to data.cache_dir {cache}: {error}") from error
    return open_tokens(target)


def open_tokens(directory: str | Path) -> TokenSet:
    """Map the tokens that `prepare_tokens` wrote to `directory`. Raises ValueError when they are missing or damaged."""
    directory = Path(directory)
    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        return TokenSet(
            directory=directory,
            digest=meta["digest"],
            corpus_digest=meta["corpus_digest"],
            tokenizer=meta["tokenizer"],
            vocabulary_size=meta["vocabulary_size"],
            end_of_document=meta["end_of_document"],
            train=_open_split(directory, corpus.TRAIN, meta),
            validation=_open_split(directory, corpus.VALIDATION, meta),
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the tokens in {directory} are damaged ({error}): delete it and run again") from error


def find_cached_tokenizer(data: config.DataConfig, digest: str) -> Path | None:
    """The tokenizer.json of the tokens with this digest, if `data.cache_dir` still has them; reads no text."""
    for meta in sorted(Path(data.cache_dir).expanduser().glob("*/meta.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(meta.read_text(encoding="utf-8"))["digest"] == digest:
                return meta.parent / "tokenizer.json"
    return None


def check_tokens_match_model(tokens: TokenSet, model: config.ModelConfig) -> None:
    """Check that the tokenizer and the model agree.

    Raises ValueError when the tokenizer has ids that the model cannot embed, or ends documents with another id than the
    model keeps them apart by.
    """
    if tokens.vocabulary_size > model.vocabulary_size:
        raise ValueError(
            f"the {tokens.tokenizer} tokenizer has ids up to {tokens.vocabulary_size - 1} but model.vocabulary_size is "
            f"{model.vocabulary_size}: set it to {tokens.vocabulary_size} or more"
        )
    if model.separator_token not in (-1, tokens.end_of_document):
        raise ValueError(
            f"model.separator_token is {model.separator_token}, and the {tokens.tokenizer} tokenizer ends documents "
            f"with {tokens.end_of_document}: set it to that, or to -1 to let packed documents see each other"
        )


def _key(data: config.DataConfig, corpus_digest: str) -> str:
    """Names the folder; a BPE is known by its settings, as it is not trained yet."""
    tokenizer = data.tokenizer
    if tokenizer == "bpe":
        tokenizer = f"bpe {data.bpe_vocabulary_size}"
    elif tokenizer != "bytes":
        tokenizer = f"file {tokenizing.load_tokenizer(tokenizer).digest}"
    return _digest(data, corpus_digest, tokenizer)[:32]


def _digest(data: config.DataConfig, corpus_digest: str, tokenizer: str) -> str:
    field = "" if data.source == "packaged" else data.text_field
    parts = (FORMAT, data.source, corpus_digest, field, data.held_out_percent, tokenizer)
    if data.task != "text":
        parts += (data.task, data.pair_bytes)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextlib.contextmanager
def _alone(cache: Path, key: str, console: rich.console.Console) -> Iterator[None]:
    """Hold the lock of `key`; the kernel frees it when the process dies."""

    def say_waiting() -> None:
        console.print("waiting for another process that prepares the same tokens")

    with locks.locked(cache / f".{key}.lock", before_waiting=say_waiting) as (_, is_locked):
        # Without locks (some network file systems) processes repeat each other's work; the rename stays atomic.
        for abandoned in cache.glob(f".{key}.*.tmp") if is_locked else ():
            shutil.rmtree(abandoned)
        yield


def _prepare_at(
    target: Path, data: config.DataConfig, source: corpus.Corpus, console: rich.console.Console, shard_bytes: int
) -> None:
    temporary = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        with _progress_bar(console) as bar:
            meta = _write_tokens(temporary, data, source, bar, shard_bytes)
        if corpus.open_corpus(data).digest != source.digest:
            raise ValueError("the corpus changed while it was being tokenised: run again")
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
        try:
            atomic.publish_directory(temporary, target)
        except OSError:
            # Another process that could not see our lock was first; its tokens are the same.
            if not target.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    counts = {name: meta["splits"][name]["tokens"] for name in (corpus.TRAIN, corpus.VALIDATION)}
    console.print(f"prepared {counts['train']:,} train and {counts['validation']:,} validation tokens in {target}")


def _write_tokens(
    folder: Path, data: config.DataConfig, source: corpus.Corpus, bar: rich.progress.Progress, shard_bytes: int
) -> dict[str, Any]:
    """Write the shards and tokenizer.json of every document; return what meta.json records."""
    surveying = bar.add_task("reading", total=None)
    found = corpus.scan_corpus(source, data.held_out_percent, lambda size: bar.advance(surveying, size))
    if not found.documents:
        raise ValueError(f"the {data.source} corpus holds no text: every document is empty")
    bar.remove_task(surveying)
    tokenizer = _tokenizer(data, source, found, bar)
    tokenizer.save(folder / "tokenizer.json")

    dtype = _dtype(tokenizer.vocabulary_size, signed=data.task != "text")
    writers = {name: _ShardWriter(folder, name, dtype, shard_bytes) for name in (corpus.TRAIN, corpus.VALIDATION)}
    encoding = bar.add_task("tokenising", total=found.utf8_bytes)
    for block in _blocks(corpus.split_documents(source, data.held_out_percent, found)):
        prompts = tokenizer.encode_many([document.prompt for _, document in block])
        ids = tokenizer.encode_many([document.text for _, document in block])
        for (split, document), prompt_P, ids_T in zip(block, prompts, ids, strict=True):
            size = len(document.full_text.encode())
            writers[split].write(np.concatenate([~prompt_P, ids_T, [tokenizer.end_of_document]]), size + 1)
            bar.advance(encoding, size)
    splits = {name: writer.close() for name, writer in writers.items()}
    for name, split in splits.items():
        if not split["documents"]:
            raise ValueError(
                f"no document fell into the {name} split ({found.documents} documents, "
                f"data.held_out_percent={data.held_out_percent}): change the percentage or give more documents"
            )
    return {
        "format": FORMAT,
        "digest": _digest(data, source.digest, tokenizer.digest),
        "corpus_digest": source.digest,
        "tokenizer": tokenizer.name,
        "vocabulary_size": tokenizer.vocabulary_size,
        "end_of_document": tokenizer.end_of_document,
        "dtype": dtype.str,
        "splits": splits,
    }


def _tokenizer(
    data: config.DataConfig, source: corpus.Corpus, found: corpus.CorpusScan, bar: rich.progress.Progress
) -> tokenizing.Tokenizer:
    if data.tokenizer == "bytes":
        return tokenizing.byte_tokenizer()
    if data.tokenizer != "bpe":
        return tokenizing.load_tokenizer(data.tokenizer)
    task = bar.add_task("training a tokenizer", total=found.utf8_bytes)

    def train_texts() -> Iterator[str]:
        for split, document in corpus.split_documents(source, data.held_out_percent, found):
            if split == corpus.TRAIN:
                bar.advance(task, len(document.full_text.encode()))
                yield document.full_text

    return tokenizing.train_bpe(train_texts(), data.bpe_vocabulary_size)


def _blocks(documents: Iterator[tuple[str, corpus.Document]]) -> Iterator[list[tuple[str, corpus.Document]]]:
    """Group documents until a block holds `_ENCODE_CHARACTERS`."""
    block, characters = [], 0
    for document in documents:
        block.append(document)
        characters += len(document[1].full_text)
        if characters >= _ENCODE_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _dtype(vocabulary_size: int, signed: bool = False) -> np.dtype:
    ids = 2 * vocabulary_size if signed else vocabulary_size
    bits = 8 if ids <= 2**8 else 16 if ids <= 2**16 else 32
    return np.dtype(f"<{'i' if signed else 'u'}{bits // 8}")


class _ShardWriter:
    """Appends one split's ids to numbered files of at most `shard_bytes`."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_bytes: int):
        self._folder, self._split, self._dtype = folder, split, dtype
        self._room = shard_bytes // dtype.itemsize
        assert self._room > 0, shard_bytes
        self._shards: list[int] = []  # tokens of each
        self._documents = self._utf8_bytes = 0
        self._stream: Any = None

    def write(self, document_T: np.ndarray, utf8_bytes: int) -> None:
        self._documents += 1
        self._utf8_bytes += utf8_bytes
        ids_T = document_T.astype(self._dtype)
        while ids_T.size:
            if self._stream is None or self._shards[-1] == self._room:
                self._next()
            part_T = ids_T[: self._room - self._shards[-1]]
            self._stream.write(part_T.tobytes())
            self._shards[-1] += part_T.size
            ids_T = ids_T[part_T.size :]

    def close(self) -> dict[str, Any]:
        self._finish()
        return {
            "documents": self._documents,
            "tokens": sum(self._shards),
            "utf8_bytes": self._utf8_bytes,
            "shard_tokens": self._shards,
        }

    def _next(self) -> None:
        self._finish()
        self._stream = _shard(self._folder, self._split, len(self._shards)).open("wb")
        self._shards.append(0)

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _shard(folder: Path, split: str, index: int) -> Path:
    return folder / f"{split}-{index:05d}.bin"


def _open_split(folder: Path, name: str, meta: dict[str, Any]) -> TokenStream:
    counts = meta["splits"][name]
    shards = []
    for index, tokens in enumerate(counts["shard_tokens"]):
        path = _shard(folder, name, index)
        dtype = np.dtype(meta["dtype"])
        if path.stat().st_size != tokens * dtype.itemsize:
            raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {tokens * dtype.itemsize}")
        # A plain array over the map: slicing np.memmap costs several times more.
        shards.append(np.asarray(np.memmap(path, dtype, mode="r")))
    return TokenStream(counts["documents"], counts["tokens"], counts["utf8_bytes"], tuple(shards))


def _progress_bar(console: rich.console.Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=console.quiet or not sys.stderr.isatty(),
    )
