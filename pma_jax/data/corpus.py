"""Corpora: documents with stable names, streamed in a fixed order, from files, installed packages and the hub.

`open_corpus` opens a corpus, which can then be read any number of times. At most one document, or one batch of rows, is
in memory at a time. Invalid user data raises a ValueError with a one-line message.

The name of a document is the path of the file, relative to the directory before the first wildcard, plus the number of
the row in JSONL, Parquet and hub data, and of the document in files of tokens. It does not depend on where the corpus
is stored.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pma_jax import config
from pma_jax.config.errors import UserError, first_line
from pma_jax.data import packaged, token_files
from pma_jax.data.documents import Corpus, Document
from pma_jax.data.pairs import extract_function_pairs
from pma_jax.runtime.failures import as_read_error
from pma_jax.storage.matching import match_files
from pma_jax.storage.paths import (
    as_path,
    expand_user,
    is_bucket,
    list_objects,
    open_regular_file,
    read_file,
)

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".txt", ".jsonl", ".parquet")
MAX_DOCUMENT_BYTES = 2**30  # of a .txt file or a line of a .jsonl file; a document is held in memory
_BATCH_ROWS = 1024  # rows of a Parquet file or a hub dataset in memory at a time


@dataclasses.dataclass(frozen=True)
class _File:
    name: str
    path: Path


def open_corpus(data_config: config.DataConfig) -> Corpus:
    """Find the documents of the corpus and compute the digest of their content (about one second per gigabyte).

    NUL characters are removed from texts, because byte 0 is the byte tokenizer's end-of-document token. Empty documents
    are dropped; a null field counts as an empty document. If `data.task` is "functions", each (prompt, body) pair
    extracted from a document becomes a document that keeps the name of the original.

    Raises:
        UserError: The corpus is missing or cannot be read. An invalid row raises ValueError when `read` reaches it.
    """
    if data_config.source == "tokens" and data_config.task != "text":
        raise UserError(f"data.task={data_config.task} needs text: use data.source=files")
    if data_config.source == "hub":
        table = _load_hub(data_config)
        digest, read = _digest_rows(data_config, table), lambda: _read_hub(data_config, table)
    elif data_config.source == "files":
        files = _match_files(data_config, SUFFIXES)
        digest, read = _digest_files(files), lambda: _read_files(files, data_config.text_field)
    elif data_config.source == "tokens":
        files = _match_files(data_config, token_files.SUFFIXES)
        parts = [_File(file.name, path) for file in files for path in token_files.parts(file.path)]
        return Corpus(_digest_files(parts), lambda: _read_tokens(files))
    else:
        assert data_config.source == "packaged", data_config.source
        files, digest = _find_package_files(data_config.package)
        read = functools.partial(_read_package_files, files)
    if data_config.task == "functions":
        return Corpus(digest, lambda: _make_function_documents(_remove_nuls(read()), data_config.pair_bytes))
    return Corpus(digest, lambda: _remove_nuls(read()))


def _remove_nuls(documents: Iterator[Document]) -> Iterator[Document]:
    """Remove NUL characters from each text, and drop documents without text."""
    for document in documents:
        text = document.text.replace("\0", "")
        if text:
            yield Document(document.name, text)


def _make_function_documents(documents: Iterator[Document], limit_bytes: int) -> Iterator[Document]:
    """Yield one document for each (prompt, body) pair of each document, under the name of the original."""
    for document in documents:
        for prompt, body in extract_function_pairs(document.text, limit_bytes):
            yield Document(document.name, body, prompt)


@functools.lru_cache(maxsize=8)
def _find_package_files(package: str) -> tuple[list[_File], str]:
    """Return the files of an installed package and their digest, which a process computes once."""
    files = [_File(name, path) for name, path in packaged.list_files(package).items()]
    return files, _digest_files(files)


def _digest_files(files: list[_File]) -> str:
    hasher = hashlib.sha256()
    for file in files:
        with _convert_os_errors(file.path), open_regular_file(file.path) as stream:
            content = hashlib.file_digest(stream, "sha256").digest()
        # The length of the name distinguishes (ab, c) from (a, bc); the digest of the content has a fixed length.
        name = os.fsencode(file.name)
        hasher.update(len(name).to_bytes(8, "big") + name + content)
    return hasher.hexdigest()


@contextlib.contextmanager
def _convert_os_errors(path: Path) -> Iterator[None]:
    """Convert an OSError of the block to a DamageError (the file is absent) or a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        raise as_read_error(error, f"cannot read {path}: {first_line(error)}") from error


# --- Packaged: the sources of Python and of installed packages --------------------------------------------------------


def _read_package_files(files: list[_File]) -> Iterator[Document]:
    for file in files:
        with _convert_os_errors(file.path):
            content = read_file(file.path, MAX_DOCUMENT_BYTES)
        # The standard library's tests contain files in other encodings. Skipping depends only on the content, so every
        # machine with this Python version skips the same files.
        with contextlib.suppress(UnicodeDecodeError):
            yield Document(file.name, content.decode())


# --- Files: globs of text, JSONL and Parquet --------------------------------------------------------------------------


def _match_files(data: config.DataConfig, suffixes: tuple[str, ...]) -> list[_File]:
    """Return the files of all globs without duplicates, ordered by glob and then by name."""
    kinds = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
    if not data.files:
        raise UserError(f"data.source={data.source} needs data.files: set it to globs of {kinds} files")
    matches: dict[Path, _File] = {}
    for pattern in data.files:
        files = _match_glob(pattern)
        for file in files:
            if file.path.suffix not in suffixes:
                raise UserError(f"{file.path} is not a {kinds} file: narrow data.files or convert it")
            with _convert_os_errors(file.path):
                _check_start(file.path)
            matches.setdefault(Path(os.path.realpath(file.path)), file)
    return list(matches.values())


def _check_start(path: Path) -> None:
    """Refuse what is no document before all files are read for the digest: a special file, or one without an end."""
    with open_regular_file(path, MAX_DOCUMENT_BYTES if path.suffix == ".txt" else None) as stream:
        start = stream.read(2**16)
        if path.suffix == ".parquet":
            stream.seek(-min(4, len(start)), os.SEEK_END)
            if not start.startswith(b"PAR1") or stream.read() != b"PAR1":
                raise UserError(f"cannot read {path}: a complete Parquet file begins and ends with PAR1")
        if path.suffix == ".jsonl":
            stream.seek(-len(start), os.SEEK_END)
            if b"\0" in start or b"\0" in stream.read(len(start)):  # UTF-16, or a file system's after a power failure
                raise UserError(f"{path} is not JSON: it contains NUL bytes; write it again, as UTF-8")


def _match_glob(pattern: str) -> list[_File]:
    expanded = as_path(pattern) if is_bucket(pattern) else expand_user(pattern)
    if expanded.is_dir():
        raise UserError(f"data.files: {pattern} is a folder: write a glob such as {expanded / '**' / '*.txt'}")
    if expanded.exists():
        return [_File(expanded.name, expanded)]
    if not glob.has_magic(pattern):
        raise UserError(f"data.files: no file {pattern}: check the path")
    wildcard_index = next(index for index, part in enumerate(expanded.parts) if glob.has_magic(part))
    root = type(expanded)(*expanded.parts[:wildcard_index])
    if is_bucket(pattern):  # hidden files, such as an editor's backup copies, are no documents
        paths = [path for path in list_objects(pattern) if not _is_hidden(path.relative_to(root))]
    else:
        paths = list(match_files(root, "/".join(expanded.parts[wildcard_index:]), with_hidden=False))
    files = [_File(path.relative_to(root).as_posix(), path) for path in dict.fromkeys(paths) if path.is_file()]
    if not files:
        raise UserError(f"data.files: {pattern} matches no file: check the glob")
    return sorted(files, key=lambda file: file.name)


def _is_hidden(path: PurePath) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_files(files: list[_File], field: str) -> Iterator[Document]:
    readers = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for file in files:
        with _convert_os_errors(file.path):
            yield from readers[file.path.suffix](file, field)


def _read_tokens(files: list[_File]) -> Iterator[Document]:
    for file in files:
        with _convert_os_errors(file.path):
            for number, ids_T in enumerate(token_files.read_documents(file.path), start=1):
                if ids_T.size:
                    yield Document(f"{file.name}:{number}", "", ids=ids_T)


def _read_text(file: _File, field: str) -> Iterator[Document]:
    del field
    try:
        yield Document(file.name, read_file(file.path, MAX_DOCUMENT_BYTES).decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{file.path} is not UTF-8 (byte {error.start}): convert it first") from error


def _read_jsonl(file: _File, field: str) -> Iterator[Document]:
    with open_regular_file(file.path) as stream:
        for row, line in enumerate(iter(lambda: stream.readline(MAX_DOCUMENT_BYTES + 1), b""), start=1):
            where = f"{file.path} line {row}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise UserError(f"{where} has more than {MAX_DOCUMENT_BYTES:,} bytes: split it into documents")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where} is not JSON: {first_line(error)}") from error
            if not isinstance(record, dict):
                raise UserError(f"{where} is not a JSON object: each line must be one, with the field {field!r}")
            if field not in record:
                raise UserError(_missing_field_message(where, field, list(record)))
            yield Document(f"{file.name}:{row}", _parse_text(record[field], where, field))


def _parse_text(value: Any, where: str, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: the field {field!r} is {type(value).__name__}, not text: set data.text_field")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the field {field!r} has a lone surrogate, which UTF-8 cannot encode") from error
    return value


def _read_parquet(file: _File, field: str) -> Iterator[Document]:
    import pyarrow as pa  # imported in functions: it takes 0.3 s, and most corpora do not need it
    import pyarrow.parquet as pq

    try:
        with open_regular_file(file.path) as stream, pq.ParquetFile(stream) as table:
            _check_column(table.schema_arrow, str(file.path), field)
            yield from _read_rows(file.name, table.iter_batches(batch_size=_BATCH_ROWS, columns=[field]))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file.path}: {first_line(error)}") from error


def _read_rows(name: str, batches: Iterable[Any]) -> Iterator[Document]:
    """Yield a document for each row of Arrow record batches with one column, the text."""
    texts = (text for batch in batches for text in batch.column(0).to_pylist())
    for row, text in enumerate(texts, start=1):
        yield Document(f"{name}:{row}", text or "")


def _check_column(schema: "pa.Schema", where: str, field: str) -> None:
    import pyarrow as pa

    if field not in schema.names:
        raise UserError(_missing_field_message(where, field, schema.names))
    arrow_type = schema.field(field).type
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    text_checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_text(arrow_type) for is_text in text_checks):
        raise UserError(f"{where}: the column {field!r} is {arrow_type}, not text: set data.text_field")


def _missing_field_message(where: str, field: str, present: list[str]) -> str:
    names = ", ".join(map(str, present)) or "the fields of another file: this one has none"
    return f"{where} has no field {field!r}: set data.text_field to one of {names}"


# --- Hub: a Hugging Face dataset --------------------------------------------------------------------------------------


def _load_hub(data_config: config.DataConfig) -> Any:
    """Load the dataset (memory-mapped by `datasets`) with its text column only."""
    try:
        import datasets
    except ImportError as error:
        raise UserError("data.source=hub needs the package datasets: run pip install 'pma-jax[hub]'") from error
    if not data_config.hub_name:
        raise UserError("data.source=hub needs data.hub_name: set it to the name of a dataset or a local path")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    where = f"dataset {data_config.hub_name!r}"
    try:
        table = datasets.load_dataset(data_config.hub_name, data_config.hub_subset or None, split=data_config.hub_split)
    except Exception as error:  # the network, the dataset builder and the files raise many types
        raise UserError(f"cannot load {where}, split {data_config.hub_split!r}: {first_line(error)}") from error
    _check_column(table.features.arrow_schema, where, data_config.text_field)
    return table.select_columns([data_config.text_field]).with_format("arrow")


def _read_hub(data_config: config.DataConfig, table: Any) -> Iterator[Document]:
    return _read_rows(data_config.hub_split, table.iter(batch_size=_BATCH_ROWS))


def _digest_rows(data_config: config.DataConfig, table: Any) -> str:
    hasher = hashlib.sha256(f"hub {data_config.hub_split}".encode())
    for document in _read_hub(data_config, table):
        text_bytes = document.text.encode()
        hasher.update(len(text_bytes).to_bytes(8, "big") + text_bytes)
    return hasher.hexdigest()
