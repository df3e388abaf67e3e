"""Paths that begin with gs://, through each library's own path layer: see local_bucket.py."""

import dataclasses
import itertools
import shutil
from pathlib import Path

import local_bucket
import numpy as np
import pytest
import tiny
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

from pma_jax import config as configuration
from pma_jax.cli import main
from pma_jax.config.errors import UserError
from pma_jax.data import batches, corpus, shards
from pma_jax.evaluation.held_out import read_sample
from pma_jax.evaluation.snapshot_tokenizer import tokenizer_of_snapshot
from pma_jax.evaluation.sweep import sweep
from pma_jax.evaluation.targets import evaluate_targets
from pma_jax.evaluation.watch import watch
from pma_jax.reporting.report import build_report, write_report
from pma_jax.runs import states
from pma_jax.runs.directory import open_run, read_metric_records
from pma_jax.runs.snapshots import is_snapshot, read_snapshot
from pma_jax.storage.formats import publish
from pma_jax.storage.lines import LineFile
from pma_jax.storage.paths import RangeReader, absolute_path, as_path
from pma_jax.training.fork import fork
from pma_jax.training.loop import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the local folder behind gs://bucket."""
    root = tmp_path_factory.mktemp("buckets")
    server, environment = local_bucket.serve(root)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        local_bucket.install()
        (root / "bucket").mkdir()
        yield root / "bucket"
    server.shutdown()


@pytest.fixture(scope="module")
def run(finished, folder):
    """Return the finished run in the bucket. Read-only."""
    shutil.copytree(finished.path, folder / "runs" / "demo")
    return open_run("gs://bucket/runs/demo")


@pytest.mark.slow
def test_training_in_a_bucket_equals_training_on_disk(finished, workspace, folder, monkeypatch):
    config, save = tiny.config(workspace), states.save_state

    def save_and_stop(writer, state, progress):
        # The object in the bucket has all records from before the state, and the snapshots are published.
        records = read_metric_records(open_run("gs://bucket/runs/new").path / "metrics.jsonl")
        assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, progress.step + 1))
        assert open_run("gs://bucket/runs/new").snapshots[-1].step == progress.step
        save(writer, state, progress)
        if progress.step == 16:
            raise KeyboardInterrupt

    monkeypatch.setattr(states, "save_state", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, "gs://bucket/runs/new")
    monkeypatch.undo()
    assert open_run("gs://bucket/runs/new").newest_resumable_state.step == 16
    made = train(config, "gs://bucket/runs/new")
    assert tiny.numbers(made) == tiny.numbers(finished)
    for one, other in zip(made.snapshots, finished.snapshots, strict=True):
        tiny.assert_equal(tiny.read(one), tiny.read(other))
    assert [s.step for s in made.states] == tiny.STATES
    assert list((folder / "runs" / "new" / "tensorboard").iterdir())


def test_fork_between_buckets_continues_from_the_state(run, folder):
    forked = fork(run, 16 * tiny.BATCH_TOKENS, run.config, "gs://bucket/runs/forked")
    (saved,) = forked.states
    assert forked.metadata["forked_from"]["path"] == "gs://bucket/runs/demo"
    original, copy = (tiny.contents(folder / "runs" / name / "states" / "16") for name in ("demo", "forked"))
    assert copy == original and saved.step == 16
    assert fork(run, 16 * tiny.BATCH_TOKENS, run.config, "gs://bucket/runs/forked").path == forked.path


@pytest.mark.slow
def test_run_in_a_bucket_is_swept_evaluated_watched_and_reported(finished, run, tmp_path):
    local = open_run(shutil.copytree(finished.path, tmp_path / "run"))
    grid = (["sma", "wma"], [2, 4])
    assert sweep(run, *grid)["rows"] == sweep(local, *grid)["rows"]
    assert evaluate_targets([str(run.path)], [])[0]["loss"] == evaluate_targets([str(local.path)], [])[0]["loss"]
    assert list(watch(run)) == list(watch(local))
    assert list(watch(run)) == [], "records of watch.jsonl are not computed again"
    assert main(["inspect", "gs://bucket/runs/demo"]) == 0
    written = write_report(build_report(run, []), run, run.path)
    assert [path.name for path in written if path.exists()] == ["report.json", "report.png", "report.html"]


def read_without_provenance(path: Path) -> dict[str, bytes]:
    """Return the files of a merge without the provenance, which names its sources."""
    return {name: data for name, data in tiny.contents(path).items() if name != "provenance.json"}


def test_merge_in_a_bucket_equals_merge_on_disk(finished, run, folder, tmp_path, capsys):
    assert main(["merge", str(finished.path), "--last", "3", "--out", str(tmp_path / "local")]) == 0
    for out in (str(tmp_path / "out"), "gs://bucket/merged/sma-3"):
        assert main(["merge", str(run.path), "--last", "3", "--out", out]) == 0
    expected = read_without_provenance(tmp_path / "local")
    assert read_without_provenance(tmp_path / "out") == read_without_provenance(folder / "merged" / "sma-3") == expected
    capsys.readouterr()
    assert main(["merge", str(run.path), "--last", "3", "--out", "gs://bucket/merged/sma-3"]) == 1
    assert "never overwrites" in capsys.readouterr().err
    assert main(["inspect", "gs://bucket/merged/sma-3", "--verify", "--with-sources"]) == 0
    tiny.assert_equal(
        tiny.read(read_snapshot("gs://bucket/merged/sma-3")),
        tiny.read(read_snapshot(tmp_path / "local")),
    )
    assert main(["export", "gs://bucket/merged/sma-3", "--out", "gs://bucket/models/demo"]) == 0
    assert main(["import", "gs://bucket/models/demo", "--out", "gs://bucket/imported"]) == 0
    assert is_snapshot("gs://bucket/imported")


@pytest.mark.slow
def test_data_in_a_bucket_are_verified(run, folder, capsys):
    for path in (run.snapshots[1].path, run.states[0].path):
        assert main(["inspect", str(path), "--verify"]) == 0
        assert "all data matches its digests" in capsys.readouterr().out
    shutil.copytree(folder / "runs" / "demo" / "snapshots" / "8", folder / "damaged" / "8")
    step = folder / "damaged" / "8" / "params"
    file = max((f for f in step.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main(["inspect", "gs://bucket/damaged/8", "--verify"]) == 1
    assert "damaged/8: " in capsys.readouterr().err


def test_tokenizer_of_a_model_that_was_imported_into_a_bucket(run, folder, tmp_path):
    assert main(["export", str(run.snapshots[-1].path), "--out", str(tmp_path / "model")]) == 0
    assert main(["import", str(tmp_path / "model"), "--out", "gs://bucket/model"]) == 0
    snapshot = read_snapshot("gs://bucket/model")
    found = tokenizer_of_snapshot(snapshot, snapshot.config)
    assert found.name.startswith("gs://bucket/model/tokenizer/") and found.decode(found.encode("def f")) == "def f"
    assert main(["export", "gs://bucket/model", "--out", "gs://bucket/again"]) == 0
    name = "tokenizer.json"
    assert (folder / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_every_kind_of_checkpoint_is_read_from_a_bucket(folder, tmp_path):
    rng = np.random.default_rng(0)
    for step in (1, 2, 3):
        tree = {"w": rng.standard_normal((300, 200), np.float32), "n": np.arange(5)}
        save_file(tree, _made(folder / "safetensors" / f"step{step}") / "model.safetensors")
        ocp.save(folder / "zstd" / str(step), {"params": tree})  # Compressed, as Orbax does by default.
        context = ocp.Context()
        context.array.saving.use_ocdbt = False
        context.array.saving.use_zarr3 = True
        with context:
            ocp.save(folder / "files" / str(step), {"params": tree})
    for kind in ("safetensors", "zstd", "files"):
        assert main(["merge", str(folder / kind), "--out", str(tmp_path / f"{kind}-local")]) == 0
        assert main(["merge", f"gs://bucket/{kind}", "--out", str(tmp_path / kind)]) == 0
        assert read_without_provenance(tmp_path / kind) == read_without_provenance(tmp_path / f"{kind}-local")


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_interrupted_publication_is_no_checkpoint_and_is_completed(run, folder, tmp_path, monkeypatch, capsys):
    arguments = ["merge", str(run.path), "--last", "2", "--out", "gs://bucket/merged/cut"]
    copy, calls = publish._copy, itertools.count()  # Several threads copy at once.

    def stops(source, target):
        if next(calls) >= 3:
            raise KeyboardInterrupt
        copy(source, target)

    monkeypatch.setattr(publish, "_copy", stops)
    assert main(arguments) == 130
    monkeypatch.undo()
    assert (folder / "merged" / "cut" / publish.IN_PROGRESS_FILE).exists()
    assert not is_snapshot("gs://bucket/merged/cut")
    assert main([*arguments[:3], "3", *arguments[4:]]) == 1, "another merge does not overwrite it"
    assert main(arguments) == 0
    assert not (folder / "merged" / "cut" / publish.IN_PROGRESS_FILE).exists()
    assert main(["merge", str(run.path), "--last", "2", "--out", str(tmp_path / "out")]) == 0
    assert read_without_provenance(folder / "merged" / "cut") == read_without_provenance(tmp_path / "out")


def test_text_and_tokenizer_may_be_in_a_bucket(folder, tmp_path):
    tiny.write_corpus(folder / "text" / "a", documents=30)
    (folder / "text" / ".hidden.txt").write_text("no document")
    keys = {"source": "files", "held_out_percent": 20.0, "cache_dir": str(tmp_path / "cache")}
    there = configuration.DataConfig(**keys, files=("gs://bucket/text/**/*.txt",))
    here = configuration.DataConfig(**keys, files=(str(folder / "text" / "**" / "*.txt"),))
    assert corpus.open_corpus(there).digest == corpus.open_corpus(here).digest
    tokens = shards.prepare_tokens(there, progress=False)
    shutil.copy(tokens.directory / "tokenizer.json", folder / "tokenizer.json")
    again = configuration.DataConfig(**keys, files=there.files, tokenizer="gs://bucket/tokenizer.json")
    assert shards.prepare_tokens(again, progress=False).validation.tokens == tokens.validation.tokens


def test_tokens_in_a_bucket_are_those_on_disk(workspace, folder, tmp_path, monkeypatch):
    config = tiny.config(workspace)
    there = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir="gs://bucket/tokens"))
    here, stored = shards.prepare_tokens(config.data), shards.prepare_tokens(there.data)
    assert (stored.digest, stored.train.tokens) == (here.digest, here.train.tokens)
    for of_split in (lambda tokens: tokens.train.ids, lambda tokens: tokens.validation.ids):
        ids, expected = of_split(stored), of_split(here)
        assert len(ids) == len(expected) and (ids[:] == expected).all() and (ids[7:7] == expected[7:7]).all()
        index = np.random.default_rng(0).integers(0, len(expected), (5, 40))
        index[1:3] = np.arange(100, 140)
        assert (ids[index] == expected[index]).all() and ids[index].shape == (5, 40)
    assert (stored.held_out_documents == here.held_out_documents).all()
    assert (
        shards.find_cached_tokenizer(there.data, here.digest).read_bytes()
        == (here.directory / "tokenizer.json").read_bytes()
    )
    iterators = [batches.train_batches(t, config.training, consumed_sequences=8) for t in (here, stored)]
    for _ in range(3):
        one, other = map(next, iterators)
        assert one.dtype == other.dtype and (one == other).all()
    one, other = (read_sample(tokens, config, "select") for tokens in (here, stored))
    assert one.describe() == other.describe()
    # Prepared once: a second time, the text is neither tokenised nor uploaded.
    monkeypatch.setattr(shards, "_prepare_directory", None)
    files = tiny.contents(folder / "tokens")
    shards.prepare_tokens(there.data)
    assert tiny.contents(folder / "tokens") == files


def test_killed_upload_of_tokens_is_not_read(workspace, folder, monkeypatch):
    data = dataclasses.replace(tiny.config(workspace).data, cache_dir="gs://bucket/killed-tokens")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "write_object", raise_interrupt)
        shards.prepare_tokens(data)
    (left,) = (folder / "killed-tokens").glob("*/*/train.bin")
    tokens = shards.prepare_tokens(data)
    assert tokens.directory.name != left.parent.name and tokens.train.ids[:].tobytes() == left.read_bytes()
    (folder / "killed-tokens" / tokens.directory.parent.name / tokens.directory.name / "train.bin").write_bytes(b"ab")
    with pytest.raises(UserError, match="are corrupt"):
        shards.prepare_tokens(data)


def raise_interrupt(*_):
    raise KeyboardInterrupt


def test_byte_ranges_are_read_exactly(folder, monkeypatch):
    data = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()
    (folder / "object").write_bytes(data)
    monkeypatch.setattr(RangeReader, "READ_AHEAD_BYTES", 1000)
    reader = RangeReader(as_path("gs://bucket/object"))
    for offset, length in ((0, 10), (10, 995), (990, 30), (5, 5), (50_000, 5000), (99_990, 100), (100_000, 5)):
        into, filled = bytearray(length), 0
        while got := reader.read_into(memoryview(into)[filled:], offset + filled):
            filled += got
        assert bytes(into[:filled]) == data[offset : offset + length]


def test_lines_are_written_to_a_bucket_when_flushed(folder, monkeypatch):
    path, clock = absolute_path("gs://bucket/lines"), [0.0]
    monkeypatch.setattr("pma_jax.storage.lines.time.monotonic", lambda: clock[0])
    file = LineFile(path)
    file.write_lines("a\n")
    assert not path.exists()
    file.sync()
    assert path.read_text() == "a\n"
    clock[0] = 31.0
    file.write_lines("b\n")
    file.write_lines("c\n")
    assert path.read_text() == "a\nb\n"
    file.close()
    assert path.read_text() == "a\nb\nc\n"
    again = LineFile(path)
    again.write_lines("d\n")
    again.close()
    assert path.read_text() == "a\nb\nc\nd\n"


def test_missing_packages_and_buckets_are_reported(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "s3://bucket/run"]) == 1
    assert "paths are local or begin with gs://" in capsys.readouterr().err

    def not_installed(address):
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr("pma_jax.storage.paths.file_system", not_installed)
    for arguments in (["merge", "gs://b/run", "--out", "x"], ["train", "--config", "tiny", "--workdir", "gs://b/run"]):
        assert main(arguments) == 1
        assert "pip install 'pma-jax[gcs]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
