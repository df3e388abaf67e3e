"""Where text comes from: documents with stable names, streamed in a fixed order.

A corpus is opened once (`open_corpus`) and may then be read any number of times; no more than one document, or one
block of rows, is in memory at a time. Every mistake in a user's data is a ValueError of one line.

A document's split is decided by a hash of its name, which does not depend on where the corpus lies: the file's path
below its glob's fixed part, and a row number for formats with rows. A training document whose text equals a held-out
one is dropped (`split_documents`): licence headers and empty packages repeat, and must not leak.
"""

import contextlib
import dataclasses
import glob
import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pma_jax import config
from pma_jax.data.pairs import extract_function_pairs
from pma_jax.storage.paths import find, is_bucket, locate

if TYPE_CHECKING:
    import pyarrow as pa

TRAIN, VALIDATION = "train", "validation"
SUFFIXES = (".txt", ".jsonl", ".parquet")
_ROWS_READ = 1024  # rows of a Parquet file or a hub dataset held at once


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and the name that decides its split: several may have the same name, and go to the same split."""

    name: str
    text: str
    prompt: str = ""  # what comes before the text, and is not learned

    @property
    def full_text(self) -> str:
        """The prompt and the text."""
        return self.prompt + self.text


@dataclasses.dataclass(frozen=True)
class Corpus:
    """An opened source. `read()` starts a new pass over the documents, always in the same order."""

    digest: str  # SHA-256 (hex) of every name and content of the source: a changed file changes it
    read: Callable[[], Iterator[Document]]


@dataclasses.dataclass(frozen=True)
class CorpusScan:
    """What one pass over a corpus finds."""

    documents: int
    utf8_bytes: int
    held_out_texts: frozenset[bytes]  # SHA-256 of every held-out text


@dataclasses.dataclass(frozen=True)
class _File:
    name: str
    path: Path


def open_corpus(data: config.DataConfig) -> Corpus:
    """Find the documents of `data` and digest their content (about a second a gigabyte).

    NUL characters are dropped from texts (byte 0 ends a document), and so are documents that are then empty; a null
    field counts as an empty document. With `data.task` functions, each pair of a document is one document, named as
    its source is. Raises ValueError when the source is missing or cannot be read; a bad row raises ValueError when
    `read` reaches it.
    """
    if data.source == "hub":
        table = _load_hub(data)
        digest, read = _digest_rows(data, table), lambda: _read_hub(data, table)
    elif data.source == "files":
        files = _match_files(data.files)
        digest, read = _digest_files(files), lambda: _read_files(files, data.text_field)
    else:
        assert data.source == "packaged", data.source
        files = _packaged_files(data.package)
        digest, read = _digest_files(files), lambda: _read_packaged(files)
    if data.task == "functions":
        return Corpus(digest, lambda: _functions(_cleaned(read()), data.pair_bytes))
    return Corpus(digest, lambda: _cleaned(read()))


def is_held_out(name: str, percent: float) -> bool:
    """Whether the document called `name` belongs to the `percent` that is held out for validation."""
    share = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
    return 100 * share < percent


def scan_corpus(corpus: Corpus, held_out_percent: float, advance: Callable[[int], None] = lambda _: None) -> CorpusScan:
    """Count documents and bytes, and remember the held-out texts by their hashes (32 bytes each).

    `advance` is told the UTF-8 bytes of each document as it is read.
    """
    documents = utf8_bytes = 0
    held_out = set()
    for document in corpus.read():
        text_bytes = document.full_text.encode()
        documents += 1
        utf8_bytes += len(text_bytes)
        advance(len(text_bytes))
        if is_held_out(document.name, held_out_percent):
            held_out.add(hashlib.sha256(text_bytes).digest())
    return CorpusScan(documents, utf8_bytes, frozenset(held_out))


def split_documents(corpus: Corpus, held_out_percent: float, found: CorpusScan) -> Iterator[tuple[str, Document]]:
    """(split, document) of every document, without training documents that repeat a held-out text."""
    for document in corpus.read():
        if is_held_out(document.name, held_out_percent):
            yield VALIDATION, document
        elif hashlib.sha256(document.full_text.encode()).digest() not in found.held_out_texts:
            yield TRAIN, document


def _cleaned(documents: Iterator[Document]) -> Iterator[Document]:
    for document in documents:
        text = document.text.replace("\0", "")
        if text:
            yield Document(document.name, text)


def _functions(documents: Iterator[Document], limit_bytes: int) -> Iterator[Document]:
    for document in documents:
        for prompt, body in extract_function_pairs(document.text, limit_bytes):
            yield Document(document.name, body, prompt)


def _digest_files(files: list[_File]) -> str:
    total = hashlib.sha256()
    for file in files:
        with _reading(file.path), file.path.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").digest()
        # The name's length keeps (ab, c) and (a, bc) apart; the content's digest has a fixed one.
        name = os.fsencode(file.name)
        total.update(len(name).to_bytes(8, "big") + name + content)
    return total.hexdigest()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {path}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# Packaged: Python's standard library, or the sources of an installed package.


def _packaged_files(package: str) -> list[_File]:
    root = _package_folder(package) if package else Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in ("site-packages", "dist-packages", "__pycache__")]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files += [_File(path.relative_to(root).as_posix(), path) for path in paths]
    if not files:
        raise ValueError(f"no .py files in {root}: this Python has no library to train on; set data.source=files")
    return sorted(files, key=lambda file: file.name)


def _package_folder(package: str) -> Path:
    # A dotted name would import its parent.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"data.package: no package {package!r} is installed in this Python: install it or name another"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _read_packaged(files: list[_File]) -> Iterator[Document]:
    for file in files:
        with _reading(file.path):
            content = file.path.read_bytes()
        # The library's own tests hold files in other encodings: which ones is a fact of the content, so every
        # machine with this Python skips the same.
        with contextlib.suppress(UnicodeDecodeError):
            yield Document(file.name, content.decode())


# Files: globs of text, JSONL and Parquet.


def _match_files(patterns: tuple[str, ...]) -> list[_File]:
    """The files of every glob, in the order of the globs, then of names; each file once."""
    if not patterns:
        raise ValueError("data.source=files needs data.files: give globs of .txt, .jsonl or .parquet files")
    found: dict[Path, _File] = {}
    for pattern in patterns:
        files = _match(pattern)
        for file in files:
            if file.path.suffix not in SUFFIXES:
                raise ValueError(f"{file.path} is not a {', '.join(SUFFIXES)} file: narrow data.files or convert it")
            found.setdefault(file.path.resolve(), file)
    return list(found.values())


def _match(pattern: str) -> list[_File]:
    expanded = locate(pattern) if is_bucket(pattern) else Path(pattern).expanduser()
    if expanded.is_dir():
        raise ValueError(f"data.files: {pattern} is a folder: write a glob such as {expanded / '**' / '*.txt'}")
    if expanded.exists():
        return [_File(expanded.name, expanded)]
    if not glob.has_magic(pattern):
        raise ValueError(f"data.files: no file {pattern}: check the path")
    fixed = next(index for index, part in enumerate(expanded.parts) if glob.has_magic(part))
    root = type(expanded)(*expanded.parts[:fixed])
    # Not Path.glob: it takes hidden files, such as an editor's copies, for documents.
    if is_bucket(pattern):
        paths = [path for path in find(pattern) if not _is_hidden(path.relative_to(root))]
    else:
        paths = [Path(path) for path in glob.glob(str(expanded), recursive=True)]  # noqa: PTH207
    files = [_File(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    if not files:
        raise ValueError(f"data.files: {pattern} matches no file: check the glob")
    return sorted(files, key=lambda file: file.name)


def _is_hidden(path: PurePath) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_files(files: list[_File], field: str) -> Iterator[Document]:
    readers = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for file in files:
        with _reading(file.path):
            yield from readers[file.path.suffix](file, field)


def _read_text(file: _File, field: str) -> Iterator[Document]:
    del field
    try:
        yield Document(file.name, file.path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.path} is not UTF-8 (byte {error.start}): convert it first") from error


def _read_jsonl(file: _File, field: str) -> Iterator[Document]:
    with file.path.open("rb") as lines:
        for row, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file.path} line {row}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {_first_line(error)}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where} is not a JSON object: each line must be one, with the field {field!r}")
            if field not in record:
                raise ValueError(_no_field(where, field, list(record)))
            yield Document(f"{file.name}:{row}", _as_text(record[field], where, field))


def _as_text(value: Any, where: str, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: the field {field!r} is {type(value).__name__}, not text: set data.text_field")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: the field {field!r} has half a surrogate pair, which is not text") from error
    return value


def _read_parquet(file: _File, field: str) -> Iterator[Document]:
    import pyarrow as pa  # here and below: 0.3 s to import, and most corpora need none of it
    import pyarrow.parquet as pq

    try:
        with file.path.open("rb") as stream, pq.ParquetFile(stream) as table:
            _check_column(table.schema_arrow, str(file.path), field)
            row = 0
            for block in table.iter_batches(batch_size=_ROWS_READ, columns=[field]):
                for text in block.column(0).to_pylist():
                    row += 1
                    yield Document(f"{file.name}:{row}", text or "")
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file.path}: {_first_line(error)}") from error


def _check_column(schema: "pa.Schema", where: str, field: str) -> None:
    import pyarrow as pa

    if field not in schema.names:
        raise ValueError(_no_field(where, field, schema.names))
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ValueError(f"{where}: the column {field!r} is {kind}, not text: set data.text_field")


def _no_field(where: str, field: str, present: list[str]) -> str:
    return f"{where} has no field {field!r}: set data.text_field to one of {', '.join(map(str, present)) or '(none)'}"


# Hub: a Hugging Face dataset.


def _load_hub(data: config.DataConfig) -> Any:
    """The dataset (memory-mapped by `datasets`), narrowed to its text column."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("data.source=hub needs the package datasets: pip install 'pma-jax[hub]'") from error
    if not data.hub_name:
        raise ValueError("data.source=hub needs data.hub_name: the name of a dataset, or a local path")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    where = f"dataset {data.hub_name!r}"
    try:
        table = datasets.load_dataset(data.hub_name, data.hub_subset or None, split=data.hub_split)
    except Exception as error:  # whatever the network, the builder or the files raise
        raise ValueError(f"cannot load {where}, split {data.hub_split!r}: {_first_line(error)}") from error
    _check_column(table.features.arrow_schema, where, data.text_field)
    return table.select_columns([data.text_field]).with_format("arrow")


def _read_hub(data: config.DataConfig, table: Any) -> Iterator[Document]:
    row = 0
    for block in table.iter(batch_size=_ROWS_READ):
        for text in block.column(data.text_field).to_pylist():
            row += 1
            yield Document(f"{data.hub_split}:{row}", text or "")


def _digest_rows(data: config.DataConfig, table: Any) -> str:
    total = hashlib.sha256(f"hub {data.hub_split}".encode())
    for document in _read_hub(data, table):
        text_bytes = document.text.encode()
        total.update(len(text_bytes).to_bytes(8, "big") + text_bytes)
    return total.hexdigest()
