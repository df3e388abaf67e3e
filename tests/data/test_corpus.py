import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pma_jax import config
from pma_jax.data import corpus, documents


def files(*globs, **keys):
    return config.DataConfig(source="files", files=tuple(str(g) for g in globs), **keys)


def read(data):
    return [(document.name, document.text) for document in corpus.open_corpus(data).read()]


def write_jsonl(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_text_files_are_documents_named_relative_to_the_glob(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\r\n", newline="")
    expected = [(name, f"text of {name}\r\n") for name in ("a.txt", "b.txt", "deep/c.txt")]
    assert read(files(tmp_path / "**" / "*.txt")) == expected
    assert read(files(tmp_path / "a.txt", tmp_path / "*.txt")) == expected[:2], (
        "a file matched by two globs is read once"
    )


def test_relative_globs_are_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("odd[1].txt").write_text("brackets")
    Path("more").mkdir()
    Path("more/a.txt").write_text("x")
    assert read(files("odd[1].txt", "more/*.txt")) == [("odd[1].txt", "brackets"), ("a.txt", "x")]


def test_rows_of_jsonl_and_parquet_are_documents(tmp_path):
    texts = ["one", None, "", "two\0", "three €"]
    write_jsonl(tmp_path / "a.jsonl", [{"body": text, "id": i} for i, text in enumerate(texts)])
    table = pa.table({"id": range(5), "body": texts})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for suffix in ("jsonl", "parquet"):
        name = f"a.{suffix}"
        expected = [(f"{name}:1", "one"), (f"{name}:4", "two"), (f"{name}:5", "three €")]
        assert read(files(tmp_path / name, text_field="body")) == expected


def test_dictionary_and_large_string_columns_are_read(tmp_path):
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(["x", "y", "x"], pa.string()).cast(kind)}), tmp_path / "a.parquet")
        assert [text for _, text in read(files(tmp_path / "a.parquet"))] == ["x", "y", "x"]


def test_digest_depends_on_content_and_names_but_not_on_the_location(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text("alpha")
        (tmp_path / place / "b.txt").write_text("beta")
    here, there = tmp_path / "here", tmp_path / "there"
    original = corpus.open_corpus(files(here / "*.txt")).digest
    assert corpus.open_corpus(files(there / "*.txt")).digest == original
    (there / "b.txt").write_text("bets")
    changed = corpus.open_corpus(files(there / "*.txt")).digest
    (here / "b.txt").rename(here / "c.txt")
    renamed = corpus.open_corpus(files(here / "*.txt")).digest
    assert len({original, changed, renamed}) == 3


def test_held_out_share_is_stable_and_near_the_percentage():
    names = [f"document {i}" for i in range(20_000)]
    held_out = {percent: {n for n in names if documents.is_held_out(n, percent)} for percent in (2, 10)}
    assert held_out[2] < held_out[10], "raising the percentage only adds documents"
    assert abs(len(held_out[2]) / 20_000 - 0.02) < 0.004
    assert documents.is_held_out("document 3", 2) == documents.is_held_out("document 3", 2)


def test_held_out_text_is_never_trained_even_under_another_name(tmp_path):
    rows = [{"text": f"text {i % 50}"} for i in range(400)]
    opened = corpus.open_corpus(files(write_jsonl(tmp_path / "a.jsonl", rows)))
    actual = documents.scan_corpus(opened, 5)
    splits = list(documents.split_documents(opened, 5, actual))
    train = {document.text for split, document in splits if split == "train"}
    validation = {document.text for split, document in splits if split == "validation"}
    assert train and validation and not train & validation
    assert train | validation == {row["text"] for row in rows}
    assert actual.document_count == 400 and actual.content_bytes == sum(len(row["text"]) for row in rows)


def bad_corpora(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 is not enough")
    (tmp_path / "page.html").write_text("<p>")
    write_jsonl(tmp_path / "rows.jsonl", [{"body": "x", "title": 3}])
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (tmp_path / "utf16.jsonl").write_text('{"text": "x"}\n', encoding="utf-16")
    (tmp_path / "cut.jsonl").write_bytes(b'{"text": "x"}\n' * 9_000 + b"\0")  # as some file systems leave it
    pq.write_table(pa.table({"body": ["x"], "number": [1]}), tmp_path / "rows.parquet")
    (tmp_path / "folder").mkdir()
    return [
        (files(), "needs data.files"),
        (files(tmp_path / "none.txt"), "no file .*none.txt"),
        (files(tmp_path / "none*.txt"), "matches no file"),
        (files(tmp_path / "folder"), "is a folder: write a glob"),
        (files(tmp_path / "page.html"), "page.html is not a .txt, .jsonl or .parquet file"),
        (files(tmp_path / "latin.txt"), r"latin.txt is not UTF-8 \(byte 0\)"),
        (files(tmp_path / "broken.jsonl"), "broken.jsonl line 2 is not JSON"),
        (files(tmp_path / "list.jsonl"), "line 1 is not a JSON object"),
        (files(tmp_path / "utf16.jsonl"), "is not JSON: it contains NUL bytes"),
        (files(tmp_path / "cut.jsonl"), "is not JSON: it contains NUL bytes"),
        (files(tmp_path / "half.jsonl"), "line 1: .*a lone surrogate"),
        (files(tmp_path / "rows.jsonl"), "line 1 has no field 'text': .*one of body, title"),
        (files(tmp_path / "rows.jsonl", text_field="title"), "line 1: the field 'title' is int, not text"),
        (files(tmp_path / "broken.parquet"), "cannot read .*broken.parquet"),
        (files(tmp_path / "rows.parquet"), "rows.parquet has no field 'text': .*one of body, number"),
        (files(tmp_path / "rows.parquet", text_field="number"), "'number' is int64, not text"),
    ]


def test_bad_corpus_is_one_clear_line(tmp_path):
    for data, message in bad_corpora(tmp_path):
        with pytest.raises(ValueError, match=message) as caught:
            read(data)
        assert "\n" not in str(caught.value)


def test_disappearing_file_is_reported(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    opened = corpus.open_corpus(files(tmp_path / "*.txt"))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*a\.txt: .*No such file"):
        list(opened.read())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"text": f"row {i}", "n": i} for i in range(3000)])
    return config.DataConfig(source="hub", hub_name=str(tmp_path / "set"))


def test_hub_dataset_is_read_by_rows_and_digested_by_content(hub, tmp_path):
    opened = corpus.open_corpus(hub)
    assert [(d.name, d.text) for d in opened.read()] == [(f"train:{i + 1}", f"row {i}") for i in range(3000)]
    assert corpus.open_corpus(hub).digest == opened.digest
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"text": f"row {i + (i == 2999)}", "n": i} for i in range(3000)])
    assert corpus.open_corpus(hub).digest != opened.digest


def test_hub_mistakes_are_one_clear_line(hub, tmp_path, monkeypatch):
    bad = [
        (config.DataConfig(source="hub"), "needs data.hub_name"),
        (config.DataConfig(source="hub", hub_name=str(tmp_path / "nowhere")), "cannot load dataset .*nowhere"),
        (config.DataConfig(source="hub", hub_name=hub.hub_name, hub_split="tset"), "cannot load .* split 'tset'"),
        (config.DataConfig(source="hub", hub_name=hub.hub_name, text_field="t"), "no field 't': .*one of text, n"),
        (config.DataConfig(source="hub", hub_name=hub.hub_name, text_field="n"), "'n' is int64, not text"),
    ]
    for data, message in bad:
        with pytest.raises(ValueError, match=message) as caught:
            corpus.open_corpus(data)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)  # What an import raises where the extra is not installed.
    with pytest.raises(ValueError, match=r"pip install 'pma-jax\[hub\]'"):
        corpus.open_corpus(hub)
