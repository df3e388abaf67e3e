"""Tokenised corpora: token shards in a directory named by a digest of all that determines the ids.

    CACHE_DIR/KEY/meta.json                   counts, dtype, digests
                  tokenizer.json              Hugging Face format
                  train.bin, validation.bin   little-endian ids
                  validation-documents.bin    the end and the key of each held-out document (DOCUMENT_DTYPE)

The ids of each document are followed by the tokenizer's end-of-document id. In data with prompts, ids are signed, and
an id t of a prompt is stored as -t - 1, so that it is no target of training (model/loss.py). A directory is published
atomically: it is written under a temporary name, synced and renamed. The ids are memory-mapped.

In a bucket, the files are KEY/NAME/…, and KEY/meta.json, which is written last, has NAME as its "folder". So what one
process has published is complete, also if another publishes the same tokens at the same time. Ranges of the ids are
read as they are needed.

Shapes: T tokens, P tokens of a prompt.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
from rich import progress as bars

from pma_jax import config
from pma_jax.config.errors import DamageError, StorageError, UserError
from pma_jax.data import corpus, documents, encoding
from pma_jax.data import tokenizer as tokenizing
from pma_jax.data.bucket_ids import BucketIds
from pma_jax.storage import atomic, locks
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.matching import match_files
from pma_jax.storage.paths import as_path, exists, expand_user, file_system, is_bucket, name_file, write_object

FORMAT = 1  # of the ids; part of their digest
LAYOUT = 2  # of the directory; part of its name
# `end`: offset after the document's last token in its split. `key`: `documents.document_key` of its name, or of the
# first held-out document with the same text.
DOCUMENT_DTYPE = np.dtype([("end", "<u8"), ("key", "<u8")])
_STORED_FIELDS = ("digest", "corpus_digest", "tokenizer", "vocabulary_size", "end_of_document")  # in meta.json
META_FILE = "meta.json"
_DOCUMENTS_FILE = "validation-documents.bin"


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """The token stream of one split: its documents, one after another."""

    documents: int
    tokens: int  # T, including one end-of-document token per document
    utf8_bytes: int  # of the text, plus one per document for its end-of-document token
    ids: np.ndarray | BucketIds  # read-only [T]: the smallest unsigned dtype; signed with prompts

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per token, averaged over the split; exactly 1 for the bytes tokenizer."""
        return self.utf8_bytes / self.tokens


@dataclasses.dataclass(frozen=True)
class TokenSet:
    """A tokenised corpus."""

    directory: Path  # or its address in a bucket
    digest: str  # SHA-256 (hex) of all that determines the ids: corpus, split, tokenizer, format
    corpus_digest: str
    tokenizer: str  # "bytes", "bpe" or a file name
    vocabulary_size: int  # one more than the largest id that can occur
    end_of_document: int
    train: TokenStream
    validation: TokenStream
    held_out_documents: np.ndarray  # read-only [D] of DOCUMENT_DTYPE: the documents of `validation`, in its order


def prepare_tokens(data: config.DataConfig, *, progress: bool = True) -> TokenSet:
    """Open the tokens of the corpus in `data.cache_dir`; tokenise the corpus if they are not cached there.

    The corpus is always read once to compute its digest (about one second per gigabyte). If its tokens are not cached,
    it is read twice more, to count and to encode it, and a third time to train a BPE. Memory is bounded by the largest
    document. A process that is killed leaves no incomplete entry in the cache. If several processes prepare the same
    tokens, one works and the others wait for it.

    Args:
        data: Determines the source of the text and the tokenizer.
        progress: Whether to report on stderr: a progress bar if it is a terminal, and one line at the end.

    Raises:
        UserError: The corpus or the tokenizer cannot be read, a split has no document, or the cache cannot be written.
    """
    source = corpus.open_corpus(data)
    key = _cache_key(data, source.digest)
    console = rich.console.Console(stderr=True, quiet=not progress, highlight=False, soft_wrap=True)
    if is_bucket(data.cache_dir):
        return _prepare_in_bucket(as_path(data.cache_dir) / key, data, source, console)
    cache = expand_user(data.cache_dir)
    target = cache / key
    if not target.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _lock_cache_entry(cache, key, console):
                if not target.exists():
                    _prepare_directory(target, data, source, console)
        except StorageError:  # the text cannot be read
            raise
        except OSError as error:
            raise UserError(f"cannot write tokens to data.cache_dir {cache}: {error}") from error
    return open_tokens(target)


def open_tokens(directory: str | Path) -> TokenSet:
    """Open the tokens that `prepare_tokens` wrote to `directory`.

    Raises:
        DamageError: The tokens are missing or corrupt.
        OSError: They cannot be read.
    """
    directory = as_path(directory)
    try:
        meta = read_json_object(directory / META_FILE)
        return TokenSet(
            directory=directory,
            **{field: meta[field] for field in _STORED_FIELDS},
            train=_open_split(directory, documents.TRAIN, meta),
            validation=(validation := _open_split(directory, documents.VALIDATION, meta)),
            held_out_documents=_open_file(directory / _DOCUMENTS_FILE, DOCUMENT_DTYPE, validation.documents)[:],
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise DamageError(f"the tokens in {directory} are corrupt ({error}): delete it and run again") from error


def find_cached_tokenizer(data: config.DataConfig, digest: str) -> Path | None:
    """Return the path of the tokenizer.json of the cached tokens with this digest, or None if they are not cached."""
    cache = as_path(data.cache_dir) if is_bucket(data.cache_dir) else expand_user(data.cache_dir)
    for path in sorted(match_files(cache, f"*/{META_FILE}")):
        with contextlib.suppress(UserError, KeyError, FileNotFoundError):  # of another version, or corrupt
            meta = read_json_object(path)
            if meta["digest"] == digest:
                return path.parent / meta.get("folder", "") / "tokenizer.json"
    return None


def check_tokens_match_model(tokens: TokenSet, model: config.ModelConfig) -> None:
    """Check that the model can use the ids of the tokens.

    Raises:
        UserError: The tokenizer has ids outside the model's vocabulary, or `model.separator_token` is set and is not
            the tokenizer's end-of-document id.
    """
    if tokens.vocabulary_size > model.vocabulary_size:
        raise UserError(
            f"the {tokens.tokenizer} tokenizer has ids up to {tokens.vocabulary_size - 1} but model.vocabulary_size is "
            f"{model.vocabulary_size}: set it to {tokens.vocabulary_size} or more"
        )
    if model.separator_token not in (-1, tokens.end_of_document):
        raise UserError(
            f"model.separator_token is {model.separator_token}, but the {tokens.tokenizer} tokenizer ends documents "
            f"with {tokens.end_of_document}: set it to that, or to -1 to let packed documents attend to each other"
        )


def _cache_key(data: config.DataConfig, corpus_digest: str) -> str:
    """Return the name of the cache directory. A BPE, which may not be trained yet, is identified by its settings."""
    tokenizer = data.tokenizer
    if tokenizer == "bpe":
        tokenizer = f"bpe {data.bpe_vocabulary_size}"
    elif tokenizer != "bytes":
        tokenizer = f"file {tokenizing.load_tokenizer(tokenizer).digest}"
    parts = f"{_tokens_digest(data, corpus_digest, tokenizer)} layout {LAYOUT}"
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _tokens_digest(data: config.DataConfig, corpus_digest: str, tokenizer: str) -> str:
    field = "" if data.source == "packaged" else data.text_field
    parts = (FORMAT, data.source, corpus_digest, field, data.held_out_percent, tokenizer)
    if data.task != "text":
        parts += (data.task, data.pair_bytes)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextlib.contextmanager
def _lock_cache_entry(cache: Path, key: str, console: rich.console.Console) -> Iterator[None]:
    """Hold the lock of `key`, which the kernel releases if the process dies, and remove abandoned directories."""

    def report_waiting(_: object) -> None:
        console.print("waiting for another process to prepare the same tokens")

    with locks.locked(cache / f".{key}.lock", report_waiting) as (_, is_locked):
        # On file systems without locks, several processes may do the same work; the rename is still atomic.
        for abandoned in match_files(cache, f".{key}.*.tmp") if is_locked else ():
            shutil.rmtree(abandoned)
        yield


def _prepare_directory(
    target: Path, data: config.DataConfig, source: documents.Corpus, console: rich.console.Console
) -> None:
    """Tokenise the corpus into a temporary directory and publish it as `target`."""
    temporary = target.parent / f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
    temporary.mkdir()
    try:
        columns = (bars.BarColumn(), bars.DownloadColumn(), bars.TimeRemainingColumn())
        named, is_hidden = bars.TextColumn("{task.description}"), console.quiet or not sys.stderr.isatty()
        progress = bars.Progress(named, *columns, console=console, transient=True, disable=is_hidden)
        with atomic.remove_if_stopped(temporary), progress as bar:
            meta = _write_tokens(temporary, data, source, bar)
        if corpus.open_corpus(data).digest != source.digest:
            raise UserError("the corpus changed while it was being tokenised: run again")
        atomic.write_text(temporary / META_FILE, json.dumps(meta, indent=2, sort_keys=True) + "\n")
        try:
            atomic.publish_directory(temporary, target)
        except OSError:
            # Another process that did not see the lock published first; its tokens are the same.
            if not target.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    counts = {name: meta["splits"][name]["tokens"] for name in (documents.TRAIN, documents.VALIDATION)}
    console.print(f"prepared {counts['train']:,} train and {counts['validation']:,} validation tokens in {target}")


def _prepare_in_bucket(
    target: Path, data: config.DataConfig, source: documents.Corpus, console: rich.console.Console
) -> TokenSet:
    """Open the tokens that KEY/meta.json names; without one, tokenise the corpus on the local disk and upload it.

    A killed upload leaves objects that nothing reads.
    """
    pointer = target / META_FILE
    try:
        if not exists(pointer):
            with tempfile.TemporaryDirectory() as scratch:
                _prepare_directory(Path(scratch) / "tokens", data, source, console)
                folder = os.urandom(8).hex()
                system, key = file_system(str(target / folder))
                for path in sorted((Path(scratch) / "tokens").iterdir()):
                    system.put_file(str(path), f"{key}/{path.name}")
                meta = read_json_object(Path(scratch) / "tokens" / META_FILE) | {"folder": folder}
            write_object(pointer, json.dumps(meta, indent=2, sort_keys=True).encode())
            console.print(f"uploaded them to {target}")
    except StorageError:
        raise
    except OSError as error:
        raise UserError(f"cannot write tokens to data.cache_dir {data.cache_dir}: {error}") from error
    return open_tokens(target / read_json_object(pointer)["folder"])


def _write_tokens(
    folder: Path, data: config.DataConfig, source: documents.Corpus, bar: bars.Progress
) -> dict[str, Any]:
    """Write the token files and tokenizer.json; return the content of meta.json."""
    read_task = bar.add_task("reading", total=None)
    scan = documents.scan_corpus(source, data.held_out_percent, lambda size: bar.advance(read_task, size))
    if not scan.document_count:
        raise UserError(f"the {data.source} corpus has no text: every document is empty")
    bar.remove_task(read_task)
    tokenizer = encoding.select_tokenizer(data, source, scan, bar)
    tokenizer.save(folder / "tokenizer.json")

    # With prompts the dtype must also hold -t - 1. One-byte dtypes ignore the byte order.
    vocabulary_size = tokenizer.vocabulary_size
    dtype = np.min_scalar_type(vocabulary_size - 1 if data.task == "text" else -vocabulary_size).newbyteorder("<")
    names = (documents.TRAIN, documents.VALIDATION)
    splits = {name: {"documents": 0, "tokens": 0, "utf8_bytes": 0} for name in names}
    encode_task = bar.add_task("tokenising", total=scan.content_bytes)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(_token_path(folder, name).open("wb")) for name in names}
        held_out = stack.enter_context((folder / _DOCUMENTS_FILE).open("wb"))
        for block in encoding.group_documents(documents.split_documents(source, data.held_out_percent, scan)):
            prompts = tokenizer.encode_many([document.prompt for _, document in block])
            ids = encoding.encode_texts(tokenizer, block)
            for (name, document), prompt_P, ids_T in zip(block, prompts, ids, strict=True):
                document_T = np.concatenate([~prompt_P, ids_T, [tokenizer.end_of_document]])
                files[name].write(document_T.astype(dtype).tobytes())
                size = len(document.content) if document.ids is None else tokenizer.count_bytes(ids_T)
                splits[name]["documents"] += 1
                splits[name]["tokens"] += document_T.size
                splits[name]["utf8_bytes"] += size + 1
                if name == documents.VALIDATION:
                    key = scan.held_out_keys[documents.hash_content(document)]
                    held_out.write(struct.pack("<QQ", splits[name]["tokens"], key))
                bar.advance(encode_task, len(document.content))
    for name, split in splits.items():
        if not split["documents"]:
            raise UserError(
                f"no document is in the {name} split ({scan.document_count} documents, "
                f"data.held_out_percent={data.held_out_percent}): change the percentage or add more documents"
            )
    return {
        "format": FORMAT,
        "digest": _tokens_digest(data, source.digest, tokenizer.digest),
        "corpus_digest": source.digest,
        "tokenizer": tokenizer.name,
        "vocabulary_size": tokenizer.vocabulary_size,
        "end_of_document": tokenizer.end_of_document,
        "dtype": dtype.str,
        "splits": splits,
    }


def _token_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def _open_split(folder: Path, name: str, meta: dict[str, Any]) -> TokenStream:
    counts = meta["splits"][name]
    ids = _open_file(_token_path(folder, name), np.dtype(meta["dtype"]), counts["tokens"])
    return TokenStream(counts["documents"], counts["tokens"], counts["utf8_bytes"], ids)


def _open_file(path: Path, dtype: np.dtype, count: int) -> Any:
    size = path.stat().st_size
    if size != count * dtype.itemsize:
        raise UserError(f"{path.name} has {size} bytes instead of {count * dtype.itemsize}")
    if is_bucket(path):
        return BucketIds(path, dtype, count)
    # np.asarray: slicing a np.memmap takes several times longer than slicing a plain array over it.
    with name_file(path):
        return np.asarray(np.memmap(path, dtype, mode="r"))
