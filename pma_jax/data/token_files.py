"""Files of tokens: streams of ids in .npy or .bin files with a description, and Megatron-LM's indexed .bin files.

    NAME.npy or NAME.bin, NAME.json     ids of documents, each followed by an end-of-document id
    NAME.bin, NAME.idx                  ids, and the places of the documents; Megatron-LM writes them

NAME.json has `end_of_document`, `vocabulary_size` and, for a .bin file, `dtype`. It is optional beside NAME.idx, where
`end_of_document` is an id that ends documents and is no part of them.
"""

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

import numpy as np

from pma_jax.config.bounds import Range
from pma_jax.config.errors import UserError, first_line
from pma_jax.storage.json_files import read_json
from pma_jax.storage.paths import is_bucket

SUFFIXES = (".npy", ".bin")
_CHUNK_TOKENS = 2**24  # ids in which document ends are looked for at a time
_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, numbers of sequences and of document starts
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Description(TypedDict):
    """Content of NAME.json."""

    dtype: NotRequired[Literal["uint8", "uint16", "uint32", "int32", "int64"]]  # little-endian
    vocabulary_size: Annotated[int, Range(1, 2**31 - 1)]
    end_of_document: Annotated[int, Range(0, 2**31 - 1)]


@dataclasses.dataclass(frozen=True)
class _Index:
    """Megatron-LM's index: sequences, of which each document has one or more."""

    dtype: np.dtype
    lengths: np.ndarray  # int32 [S], tokens of each sequence
    offsets: np.ndarray  # int64 [S], bytes before it
    documents: np.ndarray  # int64 [D + 1], the first sequence of each document, and the end of the last


def parts(path: Path) -> list[Path]:
    """Return the files that belong to a file of tokens, itself first.

    Raises:
        UserError: It lies in a bucket, or has neither a description nor an index.
    """
    if is_bucket(path):
        raise UserError(f"{path}: files of tokens are memory-mapped: copy them to a local or mounted disk")
    beside = [path.with_suffix(".json")] + ([path.with_suffix(".idx")] if path.suffix == ".bin" else [])
    found = [file for file in beside if file.exists()]
    if not found:
        raise UserError(f"{path} has no {' or '.join(file.name for file in beside)} beside it, which describes its ids")
    return [path, *found]


def read_documents(path: Path) -> Iterator[np.ndarray]:
    """Yield the ids of each document, int32 [T], without an end-of-document id; an empty document is an empty array.

    Raises:
        UserError: A file is not what its description or index says, or an id is outside the vocabulary.
    """
    files = {file.suffix: file for file in parts(path)}
    description = read_json(files[".json"], Description) if ".json" in files else None
    if ".idx" in files:
        index = _read_index(files[".idx"])
        documents = _split_by_index(_map_ids(path, index.dtype), index, path)
    else:
        assert description is not None
        ids_T = _load_npy(path) if path.suffix == ".npy" else _map_ids(path, _dtype_of(description, files[".json"]))
        documents = _split_by_end(ids_T, description["end_of_document"])
    high = 2**31 if description is None else description["vocabulary_size"]
    end = None if description is None else description["end_of_document"]
    for number, ids_T in enumerate(documents, start=1):
        if ids_T.size and not (int(ids_T.min()) >= 0 and int(ids_T.max()) < high):
            bad = int(ids_T[(ids_T < 0) | (ids_T >= high)][0])
            raise UserError(f"{path}: document {number} has the id {bad}, outside its vocabulary of {high:,}")
        yield ids_T[: -1 if ids_T.size and ids_T[-1] == end else None].astype(np.int32)


def _dtype_of(description: Description, path: Path) -> np.dtype:
    if "dtype" not in description:
        raise UserError(f'{path} has no dtype, which a .bin file needs: add it, such as "dtype": "uint16"')
    return np.dtype(description["dtype"]).newbyteorder("<")


def _load_npy(path: Path) -> np.ndarray:
    try:
        ids_T = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise UserError(f"{path} is not an .npy file of numbers: {first_line(error)}") from error
    if ids_T.ndim != 1 or ids_T.dtype.kind not in "iu":
        raise UserError(f"{path} has {ids_T.dtype} {list(ids_T.shape)}: it must be a vector of whole numbers")
    return ids_T


def _map_ids(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if not size or size % dtype.itemsize:
        raise UserError(f"{path} has {size:,} bytes, which are not ids of {dtype.name}: check the dtype")
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _split_by_end(ids_T: np.ndarray, end: int) -> Iterator[np.ndarray]:
    start = 0
    for chunk in range(0, len(ids_T), _CHUNK_TOKENS):
        for position in (np.flatnonzero(ids_T[chunk : chunk + _CHUNK_TOKENS] == end) + chunk).tolist():
            yield ids_T[start:position]
            start = position + 1
    if start < len(ids_T):
        yield ids_T[start:]


def _read_index(path: Path) -> _Index:
    content = path.read_bytes()
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise UserError(f"{path} is not an index of Megatron-LM: it does not begin with MMIDIDX")
    _, version, code, sequences, starts = _HEADER.unpack_from(content)
    size = _HEADER.size + 12 * sequences + 8 * starts
    # A byte for each sequence may follow, with its modality.
    if version != 1 or code not in _MEGATRON_DTYPES or len(content) not in (size, size + sequences):
        raise UserError(
            f"{path}: version {version}, dtype {code} and {sequences:,} sequences in {len(content):,} bytes are not "
            "those of an index of whole numbers: write it again with Megatron-LM's preprocess_data.py"
        )
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
    offsets = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(content, "<i8", starts, _HEADER.size + 12 * sequences)
    return _Index(np.dtype(_MEGATRON_DTYPES[code]), lengths, offsets, documents)


def _split_by_index(ids_T: np.ndarray, index: _Index, path: Path) -> Iterator[np.ndarray]:
    firsts, item = index.offsets // index.dtype.itemsize, index.dtype.itemsize
    ends, documents = firsts + index.lengths, index.documents
    is_inside = (index.lengths >= 0) & (firsts >= 0) & (ends <= len(ids_T)) & (index.offsets % item == 0)
    in_order = len(documents) > 1 and documents[0] == 0 and (np.diff(documents) >= 0).all()
    if not is_inside.all() or not in_order or documents[-1] != len(firsts):
        raise UserError(f"{path.with_suffix('.idx')} points outside {path.name}: the two files are not of one data set")
    for first, end in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
        sequences = [ids_T[firsts[i] : ends[i]] for i in range(first, end)]
        yield np.concatenate(sequences) if sequences else ids_T[:0]
