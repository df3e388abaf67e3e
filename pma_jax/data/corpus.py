"""Corpora: documents with stable names, streamed in a fixed order.

`open_corpus` opens a corpus, which can then be read any number of times. At most one document, or one block of rows, is
in memory at a time. Invalid user data raises a ValueError with a one-line message.

The split of a document is decided by a hash of its name, which does not depend on the location of the corpus: the path
of the file below the fixed part of its glob, and a row number for formats with rows. Training documents whose text
equals a held-out text are dropped (`split_documents`), so that repeated texts, such as licence headers and empty
packages, do not leak from training into validation.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pma_jax import config
from pma_jax.data.pairs import extract_function_pairs
from pma_jax.runtime.errors import first_line
from pma_jax.storage.paths import find, is_bucket, locate

if TYPE_CHECKING:
    import pyarrow as pa

TRAIN, VALIDATION = "train", "validation"
SUFFIXES = (".txt", ".jsonl", ".parquet")
_BLOCK_ROWS = 1024  # rows of a Parquet file or a hub dataset in memory at a time


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and the name that decides its split. Documents that share a name belong to the same split."""

    name: str
    text: str
    prompt: str = ""  # precedes the text and is excluded from the loss

    @property
    def full_text(self) -> str:
        """The prompt followed by the text."""
        return self.prompt + self.text


@dataclasses.dataclass(frozen=True)
class Corpus:
    """An opened source. `read()` starts a new pass over the documents, always in the same order."""

    digest: str  # SHA-256 (hex) of all names and contents of the source
    read: Callable[[], Iterator[Document]]


@dataclasses.dataclass(frozen=True)
class CorpusScan:
    """The totals of one pass over a corpus."""

    documents: int
    utf8_bytes: int
    held_out_texts: frozenset[bytes]  # SHA-256 of every held-out text


@dataclasses.dataclass(frozen=True)
class _File:
    name: str
    path: Path


def open_corpus(data: config.DataConfig) -> Corpus:
    """Find the documents of `data` and compute the digest of their content (about one second per gigabyte).

    NUL characters are removed from texts, because byte 0 ends a document, and empty documents are dropped; a null field
    counts as an empty document. If `data.task` is "functions", each function pair of a document becomes a document
    with the name of its source.

    Raises:
        ValueError: The source is missing or cannot be read. An invalid row raises ValueError when `read` reaches it.
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
        return Corpus(digest, lambda: _make_function_documents(_remove_nuls(read()), data.pair_bytes))
    return Corpus(digest, lambda: _remove_nuls(read()))


def is_held_out(name: str, percent: float) -> bool:
    """Return whether the document `name` belongs to the `percent` of documents held out for validation."""
    fraction = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
    return 100 * fraction < percent


def scan_corpus(corpus: Corpus, held_out_percent: float, advance: Callable[[int], None] = lambda _: None) -> CorpusScan:
    """Count documents and bytes, and collect the hashes of the held-out texts (32 bytes each).

    Args:
        corpus: The corpus to read.
        held_out_percent: Percentage of documents held out for validation.
        advance: Called with the UTF-8 bytes of each document after it is read.
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


def split_documents(corpus: Corpus, held_out_percent: float, scan: CorpusScan) -> Iterator[tuple[str, Document]]:
    """Yield (split, document) for each document, except training documents that repeat a held-out text."""
    for document in corpus.read():
        if is_held_out(document.name, held_out_percent):
            yield VALIDATION, document
        elif hashlib.sha256(document.full_text.encode()).digest() not in scan.held_out_texts:
            yield TRAIN, document


def _remove_nuls(documents: Iterator[Document]) -> Iterator[Document]:
    """Remove NUL characters from each text, and drop documents without text."""
    for document in documents:
        text = document.text.replace("\0", "")
        if text:
            yield Document(document.name, text)


def _make_function_documents(documents: Iterator[Document], limit_bytes: int) -> Iterator[Document]:
    """Yield one document for each function pair of each Python source."""
    for document in documents:
        for prompt, body in extract_function_pairs(document.text, limit_bytes):
            yield Document(document.name, body, prompt)


def _digest_files(files: list[_File]) -> str:
    total = hashlib.sha256()
    for file in files:
        with _report_read_errors(file.path), file.path.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").digest()
        # The length of the name distinguishes (ab, c) from (a, bc); the digest of the content has a fixed length.
        name = os.fsencode(file.name)
        total.update(len(name).to_bytes(8, "big") + name + content)
    return total.hexdigest()


@contextlib.contextmanager
def _report_read_errors(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {path}: {first_line(error)}") from error


# --- Packaged: the standard library of Python, or the sources of an installed package ---------------------------------


def _packaged_files(package: str) -> list[_File]:
    root = _package_folder(package) if package else Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in ("site-packages", "dist-packages", "__pycache__")]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files += [_File(path.relative_to(root).as_posix(), path) for path in paths]
    if not files:
        raise ValueError(
            f"no .py files in {root}: this Python installation has no sources to train on; set data.source=files"
        )
    return sorted(files, key=lambda file: file.name)


def _package_folder(package: str) -> Path:
    # find_spec would import the parent package of a dotted name.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"data.package: no package {package!r} is installed in this Python: install it or name another"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _read_packaged(files: list[_File]) -> Iterator[Document]:
    for file in files:
        with _report_read_errors(file.path):
            content = file.path.read_bytes()
        # The standard library's tests contain files in other encodings. Skipping depends only on the content, so every
        # machine with this Python version skips the same files.
        with contextlib.suppress(UnicodeDecodeError):
            yield Document(file.name, content.decode())


# --- Files: globs of text, JSONL and Parquet --------------------------------------------------------------------------


def _match_files(patterns: tuple[str, ...]) -> list[_File]:
    """Return the files of all globs without duplicates, ordered by glob and then by name."""
    if not patterns:
        raise ValueError("data.source=files needs data.files: set it to globs of .txt, .jsonl or .parquet files")
    matches: dict[Path, _File] = {}
    for pattern in patterns:
        files = _match_glob(pattern)
        for file in files:
            if file.path.suffix not in SUFFIXES:
                raise ValueError(f"{file.path} is not a {', '.join(SUFFIXES)} file: narrow data.files or convert it")
            matches.setdefault(file.path.resolve(), file)
    return list(matches.values())


def _match_glob(pattern: str) -> list[_File]:
    expanded = locate(pattern) if is_bucket(pattern) else Path(pattern).expanduser()
    if expanded.is_dir():
        raise ValueError(f"data.files: {pattern} is a folder: write a glob such as {expanded / '**' / '*.txt'}")
    if expanded.exists():
        return [_File(expanded.name, expanded)]
    if not glob.has_magic(pattern):
        raise ValueError(f"data.files: no file {pattern}: check the path")
    fixed = next(index for index, part in enumerate(expanded.parts) if glob.has_magic(part))
    root = type(expanded)(*expanded.parts[:fixed])
    # Path.glob would also match hidden files, such as an editor's backup copies.
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
        with _report_read_errors(file.path):
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
                raise ValueError(f"{where} is not JSON: {first_line(error)}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where} is not a JSON object: each line must be one, with the field {field!r}")
            if field not in record:
                raise ValueError(_missing_field_message(where, field, list(record)))
            yield Document(f"{file.name}:{row}", _check_text(record[field], where, field))


def _check_text(value: Any, where: str, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: the field {field!r} is {type(value).__name__}, not text: set data.text_field")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: the field {field!r} has half a surrogate pair, which is not valid text") from error
    return value


def _read_parquet(file: _File, field: str) -> Iterator[Document]:
    import pyarrow as pa  # imported in functions: it takes 0.3 s, and most corpora do not need it
    import pyarrow.parquet as pq

    try:
        with file.path.open("rb") as stream, pq.ParquetFile(stream) as table:
            _check_column(table.schema_arrow, str(file.path), field)
            yield from _read_rows(file.name, table.iter_batches(batch_size=_BLOCK_ROWS, columns=[field]))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file.path}: {first_line(error)}") from error


def _read_rows(name: str, blocks: Iterable[Any]) -> Iterator[Document]:
    """Yield a document for each row of Arrow tables with one column, the text."""
    texts = (text for block in blocks for text in block.column(0).to_pylist())
    for row, text in enumerate(texts, start=1):
        yield Document(f"{name}:{row}", text or "")


def _check_column(schema: "pa.Schema", where: str, field: str) -> None:
    import pyarrow as pa

    if field not in schema.names:
        raise ValueError(_missing_field_message(where, field, schema.names))
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ValueError(f"{where}: the column {field!r} is {kind}, not text: set data.text_field")


def _missing_field_message(where: str, field: str, present: list[str]) -> str:
    return f"{where} has no field {field!r}: set data.text_field to one of {', '.join(map(str, present)) or '(none)'}"


# --- Hub: a Hugging Face dataset --------------------------------------------------------------------------------------


def _load_hub(data: config.DataConfig) -> Any:
    """Load the dataset (memory-mapped by `datasets`) with its text column only."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("data.source=hub needs the package datasets: run pip install 'pma-jax[hub]'") from error
    if not data.hub_name:
        raise ValueError("data.source=hub needs data.hub_name: set it to the name of a dataset or a local path")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    where = f"dataset {data.hub_name!r}"
    try:
        table = datasets.load_dataset(data.hub_name, data.hub_subset or None, split=data.hub_split)
    except Exception as error:  # the network, the dataset builder and the files raise many types
        raise ValueError(f"cannot load {where}, split {data.hub_split!r}: {first_line(error)}") from error
    _check_column(table.features.arrow_schema, where, data.text_field)
    return table.select_columns([data.text_field]).with_format("arrow")


def _read_hub(data: config.DataConfig, table: Any) -> Iterator[Document]:
    return _read_rows(data.hub_split, table.iter(batch_size=_BLOCK_ROWS))


def _digest_rows(data: config.DataConfig, table: Any) -> str:
    total = hashlib.sha256(f"hub {data.hub_split}".encode())
    for document in _read_hub(data, table):
        text_bytes = document.text.encode()
        total.update(len(text_bytes).to_bytes(8, "big") + text_bytes)
    return total.hexdigest()
