"""Leaves whose chunks are not complete rows are unpacked to files, box by box, and merged from these."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorstore as ts
import zstandard

from pma_jax.config.errors import UserError
from pma_jax.merging.engine import schedule, units
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.merging.verify import verify
from pma_jax.storage.formats.byte_ranges import open_files, write_range
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.open import open_source, read_leaf
from pma_jax.storage.formats.source import ByteRange
from pma_jax.storage.formats.unpack import box_shape, unpack_leaf

ZSTD = {"name": "zstd", "configuration": {"level": 1}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def write(folder, x, chunk, codecs=(BYTES, ZSTD)):
    """Write an Orbax tree with one zarr3 array."""
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    metadata = {"shape": list(x.shape), "data_type": x.dtype.name, "chunk_grid": grid, "codecs": list(codecs)}
    spec = {"driver": "zarr3", "kvstore": f"file://{folder}/state/w/", "metadata": metadata, "create": True}
    ts.open(spec).result().write(x).result()
    entry = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    tree = {"tree_metadata": {"('w',)": entry}, "use_ocdbt": False, "use_zarr3": True}
    (folder / "state" / "_METADATA").write_text(json.dumps(tree | {"store_array_data_equal_to_fill_value": True}))
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {"state": "x"}}))
    return folder


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((33, 40), (33, 7)),
        ((33, 40), (10, 7)),
        ((5, 6, 7), (5, 6, 3)),
        ((5, 6, 7), (2, 3, 7)),
        ((4, 6, 5, 3), (2, 4, 5, 3)),
    ],
)
@pytest.mark.parametrize("box_bytes", [1, 300, 10**6])
def test_bytes_in_c_order(tmp_path, shape, chunk, box_bytes):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    source = open_source(write(tmp_path / "1", x, chunk))
    unpack_leaf(source, "w", tmp_path / "unpacked", box_bytes)
    assert (tmp_path / "unpacked").read_bytes() == x.tobytes()
    box = box_shape(source, "w", box_bytes)
    assert all(c <= b <= size for b, c, size in zip(box, chunk, shape, strict=True))


def test_merge_of_unpacked_leaves_equals_float64(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "_MAX_REGION_BYTES", 100)
    monkeypatch.setattr(units, "BOX_BYTES", 500)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(40, 33)).astype(np.float32) for _ in range(4)]
    sharding = {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [20, 5], "codecs": [BYTES], "index_codecs": [BYTES, {"name": "crc32c"}]},
    }
    layouts = [((40, 8), (BYTES, ZSTD)), ((40, 8), (BYTES,)), ((40, 33), (BYTES,)), ((20, 10), (sharding,))]
    paths = [write(tmp_path / str(k), x, *layout) for k, (x, layout) in enumerate(zip(xs, layouts, strict=True))]
    rows = np.array([[0.25] * 4, [0.1, 0.2, 0.3, 0.4]])
    made = plan([open_source(path) for path in paths], rows, recipes=["sma", "weights"])
    assert made.schedule.unpacked_leaves == {"w"}
    outs = [tmp_path / "sma", tmp_path / "weights"]
    merge(made, outs)
    for row, out in zip(rows, outs, strict=True):
        merged = read_leaf(open_source(out), "w")
        exact = sum(c * x.astype(np.float64) for c, x in zip(row, xs, strict=True))
        np.testing.assert_allclose(merged, exact, rtol=1e-6, atol=1e-6)
        assert verify(out, with_sources=True) == []
    assert not list(tmp_path.glob(".*"))


MEASURE = """
import resource, sys
from pma_jax.cli.command import main
status = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.slow
def test_memory_limit_holds_for_a_leaf_that_is_split_along_its_second_axis(tmp_path):
    shape, chunk = (4096, 6144), (4096, 512)  # 96 MiB
    for k in range(2):
        write(tmp_path / str(k), np.full(shape, k, np.float32) + np.arange(6144, dtype=np.float32), chunk)
    limit = 256 * 2**20
    arguments = ["merge", str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(tmp_path / "out")]
    arguments += ["--order", "given", "--memory-limit", str(limit)]
    # ru_maxrss of a new process begins with the memory of the process that started it.
    spawn = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    command = [sys.executable, "-c", spawn, sys.executable, "-c", MEASURE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < limit


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 8] = bytes(255 - b for b in data[len(data) // 2 : len(data) // 2 + 8])
    path.write_bytes(data)


def store_larger_chunk(path):
    path.write_bytes(zstandard.compress(bytes(4 * 20 * 8 + 4)))


def store_smaller_chunk(path):
    path.write_bytes(zstandard.compress(bytes(4 * 20 * 8 - 4)))


def append(path):
    path.write_bytes(path.read_bytes() + b"more")


MISSING = r"0/state: 'w': 1 of its 10 chunks are missing, the first is w/c/1/1; the checkpoint is not complete"
DELETED = r"0/state/w/c/1/1: no such file; was it deleted or moved while it was in use\?"
SHORT = "0/state/w/c/1/1: a compressed chunk is too short; the file is corrupt"
LONG = "0/state/w/c/1/1: a compressed chunk is too long; the file is corrupt"


@pytest.mark.parametrize(
    ("damage", "before", "after"),
    [
        (os.unlink, MISSING, DELETED),
        (truncate, SHORT, SHORT),
        (flip, "0/state/w/c/1/1: a compressed chunk is corrupt: ", "0/state/w/c/1/1: a compressed chunk is corrupt: "),
        (store_larger_chunk, LONG, LONG),
        (store_smaller_chunk, SHORT, SHORT),
        (append, LONG, None),  # only the bytes that the chunk had are read
    ],
)
def test_damaged_chunks_are_refused_and_nothing_is_written(tmp_path, damage, before, after):
    """`before` and `after` are the messages if a chunk is damaged before and after the checkpoint is opened."""
    # Values that zstd compresses, and a checksum, so that a changed byte is noticed.
    x = np.arange(40, dtype=np.float32)[:, None] * np.ones(33, np.float32)
    checked = {"name": "zstd", "configuration": {"level": 1, "checksum": True}}
    paths = [write(tmp_path / str(k), x + k, (20, 8), (BYTES, checked)) for k in range(2)]
    opened = plan([open_source(path) for path in paths], np.array([0.5, 0.5]))
    assert opened.schedule.unpacked_leaves == {"w"}
    damage(paths[0] / "state" / "w" / "c" / "1" / "1")
    with pytest.raises(UserError, match=before) as caught:
        merge(plan([open_source(path) for path in paths], np.array([0.5, 0.5])), [tmp_path / "out"])
    assert "\n" not in str(caught.value)
    assert {entry.name for entry in tmp_path.iterdir()} == {"0", "1"}
    if after:
        with pytest.raises(UserError, match=after) as caught:
            merge(opened, [tmp_path / "out"])
        assert "\n" not in str(caught.value)
        assert {entry.name for entry in tmp_path.iterdir()} == {"0", "1"}


def test_raw_chunk_that_is_cut_short_or_deleted_is_refused(tmp_path):
    x = np.arange(40 * 33, dtype=np.float32).reshape(40, 33)
    paths = [write(tmp_path / str(k), x + k, (20, 8), (BYTES,)) for k in range(2)]
    for damage, message in ((truncate, "a chunk is too short; the file is corrupt"), (os.unlink, "no such file")):
        made = plan([open_source(path) for path in paths], np.array([0.5, 0.5]))
        assert made.schedule.unpacked_leaves == {"w"}
        path = paths[0] / "state" / "w" / "c" / "1" / "1"
        stored = path.read_bytes()
        damage(path)
        with pytest.raises(UserError, match=f"0/state/w/c/1/1: {message}"):
            merge(made, [tmp_path / "out"])
        assert {entry.name for entry in tmp_path.iterdir()} == {"0", "1"}
        path.write_bytes(stored)


def test_writes_that_the_system_cuts_short_are_continued(tmp_path, monkeypatch):
    """On a disk that becomes full, `pwrite` writes a part: the rest must not stay zeros."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, memoryview(data)[:5], offset))
    header = bytes(range(1, 40))
    layout = OutputLayout({}, {"model.safetensors": 60}, {}, {"model.safetensors": header}, {})
    layout.create_files(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == header + bytes(21)
    data = np.arange(30, dtype=np.uint8)
    path = tmp_path / "model.safetensors"
    with open_files([path], os.O_WRONLY) as files:
        write_range(files, [ByteRange(path, 39, 10), ByteRange(path, 49, 11)], 3, data[:18])
    assert path.read_bytes()[39:] == bytes(3) + bytes(data[:18])
    x = np.random.default_rng(0).normal(size=(33, 40)).astype(np.float32)
    unpack_leaf(open_source(write(tmp_path / "1", x, (10, 7))), "w", tmp_path / "unpacked", 300)
    assert (tmp_path / "unpacked").read_bytes() == x.tobytes()
