"""Files of tokens, written here from documents as nanoGPT and Megatron-LM write them, and read into shards."""

import json
import struct

import numpy as np
import pytest
import tiny

from pma_jax import config
from pma_jax.config.errors import UserError
from pma_jax.data import documents, shards, tokenizer
from pma_jax.training.loop import train

TEXTS = [f"document {i} of {i * 7 % 11} words\n" * (1 + i % 3) for i in range(80)]
BYTES = [np.frombuffer(text.encode(), np.uint8) for text in TEXTS]
END = 0  # of the bytes tokenizer
DESCRIPTION = {"dtype": "uint16", "vocabulary_size": 256, "end_of_document": END}


def write_megatron(path, documents, dtype=np.uint16, code=8, sequences_of=lambda i: 1):
    """Write NAME.bin and NAME.idx in the format of Megatron-LM's IndexedDataset (version 1)."""
    sequences, starts = [], [0]
    for i, ids in enumerate(documents):
        sequences += [part.astype(dtype) for part in np.array_split(ids, sequences_of(i))]
        starts.append(len(sequences))
    path.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in sequences))
    lengths = np.array([len(part) for part in sequences], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1].astype(np.int64) * np.dtype(dtype).itemsize)])
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(starts))
    content = header + lengths.tobytes() + offsets.astype(np.int64).tobytes() + np.array(starts, np.int64).tobytes()
    path.with_suffix(".idx").write_bytes(content)


def write_stream(path, documents, end=END, dtype=np.uint16):
    stream = np.concatenate([np.append(ids.astype(dtype), dtype(end)) for ids in documents])
    if path.suffix == ".npy":
        np.save(path, stream)
    else:
        path.write_bytes(stream.tobytes())
    path.with_suffix(".json").write_text(
        json.dumps(DESCRIPTION | {"end_of_document": end, "dtype": np.dtype(dtype).name})
    )


def prepare(folder, pattern="*.bin", **keys):
    keys = {"held_out_percent": 20.0, "cache_dir": str(folder / "cache")} | keys
    return shards.prepare_tokens(
        config.DataConfig(source="tokens", files=(str(folder / "in" / pattern),), **keys), progress=False
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path


def split_at_end(stream, end):
    return [bytes(part[:-1].astype(np.uint8)) for part in np.split(stream, np.flatnonzero(stream == end) + 1)[:-1]]


@pytest.mark.parametrize("kind", ["npy", "bin", "megatron", "megatron with several sequences"])
def test_each_document_is_in_the_split_of_its_name_once(folder, kind):
    suffix = ".npy" if kind == "npy" else ".bin"
    path = folder / "in" / f"a{suffix}"
    if kind.startswith("megatron"):
        # Megatron-LM's own documents end with the end of document or do not.
        written = [np.append(ids, END) if i % 2 else ids for i, ids in enumerate(BYTES)]
        write_megatron(path, written, sequences_of=lambda i: 1 + i % 4 if "several" in kind else 1)
    else:
        write_stream(path, BYTES)
    tokens = prepare(folder, f"*{suffix}")
    for name, stream in ((documents.TRAIN, tokens.train), (documents.VALIDATION, tokens.validation)):
        is_held_out = [documents.is_held_out(f"a{suffix}:{n}", 20.0) for n in range(1, len(TEXTS) + 1)]
        expected = [text.encode() for text, held in zip(TEXTS, is_held_out, strict=True) if held == (name != "train")]
        assert split_at_end(np.asarray(stream.ids), END) == expected
        assert stream.utf8_bytes == sum(len(text) + 1 for text in expected)
    assert tokens.held_out_documents["end"][-1] == tokens.validation.tokens


def test_ids_of_a_tokenizer_json_have_its_end_of_document_and_the_bytes_of_their_text(folder):
    of_text = tokenizer.train_bpe(TEXTS, 300)
    of_text.save(folder / "mine.json")
    ids = of_text.encode_many(TEXTS)
    write_stream(folder / "in" / "a.bin", ids, end=300)  # no id of the tokenizer
    (folder / "in" / "a.json").write_text(json.dumps(DESCRIPTION | {"vocabulary_size": 301, "end_of_document": 300}))
    tokens = prepare(folder, tokenizer=str(folder / "mine.json"))
    assert tokens.end_of_document == of_text.end_of_document
    assert tokens.train.documents + tokens.validation.documents == len(TEXTS)
    total = tokens.train.utf8_bytes + tokens.validation.utf8_bytes
    assert total == sum(len(text.encode()) + 1 for text in TEXTS)


def test_run_trains_on_tokens(folder):
    keys = tiny.keys(folder)
    texts = sorted((folder / "text").glob("*.txt"))
    write_megatron(folder / "in" / "a.bin", [np.frombuffer(path.read_bytes(), np.uint8) for path in texts])
    keys["data"] |= {"source": "tokens", "files": (str(folder / "in" / "*.bin"),)}
    run = train(config.resolve(keys), folder / "run")
    assert run.snapshots[-1].tokens == tiny.HORIZON
    assert run.snapshots[-1].loss < run.snapshots[0].loss - 1


def break_index(change):
    def write(path):
        write_megatron(path, BYTES)
        index = path.with_suffix(".idx")
        index.write_bytes(change(index.read_bytes()))

    return write


def describe(**changes):
    def write(path):
        write_stream(path, BYTES)
        described = DESCRIPTION | changes
        text = json.dumps({key: value for key, value in described.items() if value is not None})
        path.with_suffix(".json").write_text(text)

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"abcd"), r"a\.bin has no a\.json or a\.idx beside it"),
        (describe(dtype=None), "a.json has no dtype"),
        (describe(dtype="float32"), "a.json: dtype: "),
        (describe(vocabulary_size=100), r"a\.bin: document 1 has the id \d+, outside its vocabulary of 100"),
        (describe(dtype="uint32"), r"a\.bin has 7,462 bytes, which are not ids of uint32"),
        (describe(end_of_document=-1), "a.json: end_of_document: "),
        (lambda path: (write_stream(path, BYTES), path.write_bytes(b"abc")), "3 bytes, which are not ids of uint16"),
        (break_index(lambda content: b"MMIDIDX"), r"a\.idx is not an index of Megatron-LM"),
        (break_index(lambda content: content[:-3]), r"a\.idx: version 1, dtype 8 and 80 sequences in"),
        (break_index(lambda c: c[:9] + struct.pack("<Q", 2) + c[17:]), r"a\.idx: version 2"),
        (break_index(lambda c: c[:34] + b"\xff\xff\xff\x0f" + c[38:]), r"a\.idx points outside a\.bin"),
        (lambda path: write_megatron(path, [*BYTES, np.array([300])]), r"a\.bin:81 has the id 300, and the bytes"),
        (lambda path: write_megatron(path, BYTES, np.float32, 7), r"a\.idx: version 1, dtype 7"),
    ],
)
def test_bad_input_is_one_line(folder, write, message):
    write(folder / "in" / "a.bin")
    with pytest.raises(UserError, match=message) as caught:
        prepare(folder)
    assert "\n" not in str(caught.value)


def test_npy_that_is_no_vector_of_ids_is_refused(folder):
    for array in (np.zeros((2, 3), np.int32), np.zeros(4)):
        np.save(folder / "in" / "a.npy", array)
        (folder / "in" / "a.json").write_text(json.dumps(DESCRIPTION))
        with pytest.raises(UserError, match="must be a vector of whole numbers"):
            prepare(folder, "*.npy")


def test_tokens_need_their_tokenizer_and_have_no_functions(folder):
    write_stream(folder / "in" / "a.bin", BYTES)
    with pytest.raises(UserError, match=r"data\.tokenizer=bpe needs text"):
        prepare(folder, tokenizer="bpe")
    with pytest.raises(UserError, match=r"data\.task=functions needs text"):
        prepare(folder, task="functions")
