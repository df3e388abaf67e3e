import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import processes
import pytest
import tiny

from pma_jax import config
from pma_jax.data import corpus, documents, shards, tokenizer

WORDS = [f"word{i}" for i in range(5000)]


def make_files(folder, documents=200, words=60, seed=0):
    """Write one JSONL file of reproducible documents; return its texts."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=words)) + f" é {i}\n" for i in range(documents)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def data_config(tmp_path, **keys):
    keys = {"held_out_percent": 10.0, "cache_dir": str(tmp_path / "cache")} | keys
    return config.DataConfig(source="files", files=(str(tmp_path / "text" / "*.jsonl"),), **keys)


def stream(split):
    return split.ids.tolist()


def folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())


def documents_of(tokens, split):
    ids, end = stream(split), tokens.end_of_document
    assert ids[-1] == end
    made, document = [], []
    of_tokens = tokenizer.load_tokenizer(tokens.directory / "tokenizer.json")
    for token in ids:
        if token == end:
            made.append(of_tokens.backend.decode(document, skip_special_tokens=False))
            document = []
        else:
            document.append(token)
    return made


@pytest.mark.parametrize("kind", ["bytes", "bpe", "file"])
def test_every_document_is_in_exactly_one_split_once(tmp_path, kind):
    texts = make_files(tmp_path / "text", documents=60)
    if kind == "file":
        kind = str(tmp_path / "mine.json")
        tokenizer.train_bpe(texts, 400).save(kind)
    tokens = shards.prepare_tokens(data_config(tmp_path, tokenizer=kind, bpe_vocabulary_size=500), progress=False)
    train, validation = documents_of(tokens, tokens.train), documents_of(tokens, tokens.validation)
    assert sorted(train + validation) == sorted(texts) and train and validation
    for split, made in ((tokens.train, train), (tokens.validation, validation)):
        assert split.documents == len(made)
        assert split.tokens == len(stream(split))
        assert split.utf8_bytes == sum(len(text.encode()) + 1 for text in made)
    if kind == "bytes":
        assert tokens.validation.bytes_per_token == 1 and tokens.vocabulary_size == 256
        assert tokens.train.ids.dtype == np.uint8
    else:
        assert tokens.validation.bytes_per_token > 1.5
        assert tokens.train.ids.dtype == np.uint16


def test_index_holds_the_end_and_the_key_of_each_held_out_document(tmp_path):
    make_files(tmp_path / "text")
    data = data_config(tmp_path)
    tokens = shards.prepare_tokens(data, progress=False)
    held_out = [d for d in corpus.open_corpus(data).read() if documents.is_held_out(d.name, data.held_out_percent)]
    index = tokens.held_out_documents
    assert index["end"].tolist() == (np.flatnonzero(tokens.validation.ids == tokens.end_of_document) + 1).tolist()
    expected = [hashlib.sha256(document.name.encode()).digest()[8:16] for document in held_out]
    assert index["key"].tolist() == [int.from_bytes(key, "big") for key in expected]
    assert not tokens.train.ids.flags.writeable


def test_documents_of_equal_text_have_the_key_of_the_first(tmp_path):
    (tmp_path / "text").mkdir()
    lines = [json.dumps({"text": text}) for text in [*map(str, range(60)), *["same"] * 20]]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(lines))
    tokens = shards.prepare_tokens(data_config(tmp_path, held_out_percent=50.0), progress=False)
    texts = documents_of(tokens, tokens.validation)
    assert len(set(tokens.held_out_documents["key"].tolist())) == len(set(texts)) and texts.count("same") > 1
    assert "same" not in documents_of(tokens, tokens.train)


def test_tokens_are_prepared_once_and_again_after_a_change(tmp_path):
    make_files(tmp_path / "text")
    first = shards.prepare_tokens(data_config(tmp_path), progress=False)
    written = (first.directory / "meta.json").stat().st_mtime_ns
    again = shards.prepare_tokens(data_config(tmp_path), progress=False)
    assert again.directory == first.directory and (again.directory / "meta.json").stat().st_mtime_ns == written
    others = [
        shards.prepare_tokens(data_config(tmp_path, held_out_percent=20), progress=False),
        shards.prepare_tokens(data_config(tmp_path, tokenizer="bpe", bpe_vocabulary_size=300), progress=False),
        shards.prepare_tokens(data_config(tmp_path, tokenizer="bpe", bpe_vocabulary_size=301), progress=False),
    ]
    make_files(tmp_path / "text", seed=1)
    others.append(shards.prepare_tokens(data_config(tmp_path), progress=False))
    assert len({tokens.digest for tokens in [first, *others]}) == 5
    assert others[-1].corpus_digest != first.corpus_digest
    assert len(folders(tmp_path)) == 5


def test_output_is_one_line_on_a_pipe_and_empty_when_quiet(tmp_path, capsys):
    make_files(tmp_path / "text")
    shards.prepare_tokens(data_config(tmp_path), progress=True)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "train and" in err and "\x1b" not in err
    shards.prepare_tokens(data_config(tmp_path), progress=True)
    shards.prepare_tokens(data_config(tmp_path, held_out_percent=30), progress=False)
    assert capsys.readouterr() == ("", "")


def prepare_in_process(data):
    # A config written as code: the child must do exactly what a user's program does.
    code = f"from pma_jax.config import DataConfig\nfrom pma_jax.data import shards\nshards.prepare_tokens({data!r})"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


@pytest.fixture
def half_way(tmp_path):
    """Return a configuration, and another process in the middle of writing its tokens."""
    make_files(tmp_path / "text", documents=1500, words=600)
    data = data_config(tmp_path, tokenizer="bpe", bpe_vocabulary_size=300)
    child = prepare_in_process(data)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("cache/.*.tmp/train.bin")):
        assert child.poll() is None and time.monotonic() < deadline, child.stderr.read()
        time.sleep(0.002)
    yield data, child
    child.kill()
    child.communicate()


@pytest.mark.slow
def test_killed_preparation_leaves_nothing_that_looks_prepared(tmp_path, half_way):
    data, child = half_way
    child.send_signal(signal.SIGKILL)
    child.wait()
    [left] = folders(tmp_path)
    assert left.endswith(".tmp"), "the child was killed in the middle"
    tokens = shards.prepare_tokens(data, progress=False)
    assert folders(tmp_path) == [tokens.directory.name], "and the next process removes its files"
    assert tokens.train.documents + tokens.validation.documents == 1500


@pytest.mark.slow
def test_two_concurrent_preparations_both_succeed(tmp_path, half_way, capsys):
    data, child = half_way
    tokens = shards.prepare_tokens(data)
    assert capsys.readouterr().err == "waiting for another process to prepare the same tokens\n"
    assert child.wait(timeout=240) == 0
    assert folders(tmp_path) == [tokens.directory.name]
    assert tokens.train.documents + tokens.validation.documents == 1500


def test_corrupt_tokens_are_refused(tmp_path):
    make_files(tmp_path / "text")
    tokens = shards.prepare_tokens(data_config(tmp_path), progress=False)
    shard = tokens.directory / "train.bin"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"corrupt \(train.bin has .* bytes instead of .*\): delete it"):
        shards.prepare_tokens(data_config(tmp_path), progress=False)
    (tokens.directory / "meta.json").unlink()
    with pytest.raises(ValueError, match=r"corrupt .*: delete it and run again"):
        shards.open_tokens(tokens.directory)


def test_unusable_corpora_are_refused(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="files corpus has no text"):
        shards.prepare_tokens(data_config(tmp_path), progress=False)
    (tmp_path / "text" / "a.jsonl").write_text('{"text": "one document"}\n')
    with pytest.raises(ValueError, match=r"no document is in the validation split \(1 documents, .*=0.1\)"):
        shards.prepare_tokens(data_config(tmp_path, held_out_percent=0.1), progress=False)
    with pytest.raises(ValueError, match="no tokenizer file"):
        shards.prepare_tokens(data_config(tmp_path, tokenizer="bites"), progress=False)
    assert folders(tmp_path) == [], "a failure leaves no files"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write tokens to data.cache_dir .*file"):
        shards.prepare_tokens(data_config(tmp_path, cache_dir=str(tmp_path / "file")), progress=False)


def test_vocabulary_larger_than_the_model_is_refused(tmp_path):
    make_files(tmp_path / "text", documents=60)
    tokens = shards.prepare_tokens(data_config(tmp_path), progress=False)
    shards.check_tokens_match_model(tokens, config.ModelConfig(vocabulary_size=256))
    with pytest.raises(ValueError, match=r"ids up to 255 but model.vocabulary_size is 255: set it to 256 or more"):
        shards.check_tokens_match_model(tokens, config.ModelConfig(vocabulary_size=255))


def test_end_token_separates_documents(tmp_path):
    make_files(tmp_path / "text", documents=60)
    tokens = shards.prepare_tokens(data_config(tmp_path), progress=False)
    shards.check_tokens_match_model(tokens, config.ModelConfig(separator_token=tokens.end_of_document))
    wrong = tokens.end_of_document + 1
    with pytest.raises(ValueError, match=rf"separator_token is {wrong}, .* ends documents with {wrong - 1}"):
        shards.check_tokens_match_model(tokens, config.ModelConfig(separator_token=wrong))


PREPARE = """
import sys
from pathlib import Path
from pma_jax import config
from pma_jax.data import corpus, shared_tokens
read, index = corpus.open_corpus, hosts.process_index_and_count()[0]
opened = []
corpus.open_corpus = lambda data: opened.append(data) or read(data)
cache = Path(sys.argv[2]) / (f"disk{index}" if sys.argv[3] == "own" else "shared")
exists = shared_tokens.exists
shared_tokens.exists = lambda path: path.is_relative_to(cache) and exists(path)  # another host's disk is not seen
data = config.DataConfig(source="files", files=(sys.argv[1],), cache_dir=str(cache))
tokens = shared_tokens.prepare_tokens_in_all(data)
print(len(opened) > 0, tokens.directory.is_relative_to(cache), tokens.digest)
"""


@pytest.mark.slow
@pytest.mark.parametrize("disks", ["shared", "own"])
def test_hosts_that_share_a_cache_read_the_text_once_and_others_each(tmp_path, disks):
    files = tiny.write_corpus(tmp_path / "text")
    job = processes.script(PREPARE, [files, str(tmp_path), disks], 2, devices=1).check(120)
    first, second = job.out(0).split(), job.out(1).split()
    assert first[:2] == ["True", "True"] and second[:2] == [str(disks == "own"), "True"] and first[2] == second[2]
    assert len(list(tmp_path.glob("*/*/meta.json"))) == (2 if disks == "own" else 1)
