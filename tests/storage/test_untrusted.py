"""Untrusted files: any bytes give one line and no crash."""

import importlib.util
import json
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pma_jax.storage.formats.open import open_source, read_leaf

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path, header, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def refuses(path, match="."):
    with pytest.raises(ValueError, match=match) as error:
        open_source(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"a": F32 | {"data_offsets": [-8, 0]}}, "data_offsets"),
        ({"a": F32 | {"data_offsets": [8, 0]}}, "-8 bytes"),
        ({"a": F32 | {"data_offsets": [0, 2**60]}, "b": F32}, "bytes"),
        ({"a": F32 | {"shape": [2**60]}}, "shape and dtype need"),
        ({"a": F32 | {"shape": [2**62] * 60}}, "shape and dtype need"),
        ({"a": F32 | {"shape": [2**80, 0]}}, "shape"),
        ({"a": F32 | {"shape": [1] * 65 + [2]}}, "shape"),
        ({"a": F32 | {"shape": [True, 2]}}, "shape"),
        ({"a": F32 | {"shape": [2.0]}}, "shape"),
        ({"a": F32 | {"dtype": "F4"}}, "dtype"),
        ({"a": F32 | {"dtype": ["F32"]}}, "dtype"),
        ({"a": F32, "b": F32}, "overlaps"),
        ({"a": F32 | {"shape": [1], "data_offsets": [4, 8]}}, "hole"),
        ({"a": F32 | {"shape": [1], "data_offsets": [0, 4]}}, "describes 4 bytes"),
        ({"a": 3}, "JSON object"),
        ({"a": {}}, "dtype"),
        ({"a": F32, "__metadata__": {"x": 1}}, "__metadata__"),
        ([], "not a JSON object"),
        (b'{"a": ' + json.dumps(F32).encode() + b', "a": ' + json.dumps(F32).encode() + b"}", "2 times"),
        (b'{"\xff": 1}', "JSON"),
        (b'{"\\ud800": ' + json.dumps(F32).encode() + b"}", "Unicode"),
        ({"a\nb": F32}, "printable"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"", "JSON"),
    ],
)
def test_corrupt_headers_are_one_line(tmp_path, header, match):
    refuses(write(tmp_path / "x.safetensors", header), match)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**60, 10**8 + 1, 1000])
def test_false_length_allocates_nothing(tmp_path, length):
    path = write(tmp_path / "x.safetensors", {"a": F32}, length=length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuses(path, "claims")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


def test_truncated_files_are_one_line(tmp_path):
    for length in range(9):
        (tmp_path / "x.safetensors").write_bytes(b"\x00" * length)
        refuses(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ({"weight_map": {"a": "../x.safetensors"}}, "next to its index"),
        ({"weight_map": {"a": "/etc/passwd"}}, "next to its index"),
        ({"weight_map": {"a": ".."}}, "next to its index"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "next to its index"),
        ({"weight_map": {"a": "sub/x.safetensors"}}, "next to its index"),
        ({"weight_map": {"a": "x.bin"}}, "convert"),
        ({"weight_map": {"a": 7}}, "next to its index"),
        ({"weight_map": {"a": "gone.safetensors"}}, "missing"),
        ({"weight_map": {"b": "x.safetensors"}}, "disagree"),
        ({"weight_map": {}}, "weight_map"),
        ({}, "weight_map"),
        ([], "expected a JSON object"),
    ],
)
def test_corrupt_indexes_are_one_line(tmp_path, index, match):
    write(tmp_path / "x.safetensors", {"a": F32})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(tmp_path, match)


def test_pickles_are_refused_with_conversion_instructions(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refuses(tmp_path, "pickle.*convert")
    refuses(tmp_path / "pytorch_model.bin", "pickle.*convert")


def test_missing_checkpoint_is_one_line(tmp_path):
    refuses(tmp_path / "gone", "no such file")
    refuses(tmp_path, "holds no checkpoint in a format that is read")
    (tmp_path / "notes.txt").write_text("")
    refuses(tmp_path / "notes.txt", "not a checkpoint")


def test_file_truncated_after_opening_is_one_line(tmp_path):
    save_file({"a": np.ones(1000, np.float32)}, tmp_path / "x.safetensors")
    source = open_source(tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(ValueError, match="cut short"):
        read_leaf(source, "a")


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([2**60, -1, "F32"])
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I8", "X"]) | scalars,
        "shape": st.lists(st.integers(-1, 5) | st.just(2**60), max_size=4) | values,
        "data_offsets": st.lists(st.integers(-8, 40), min_size=2, max_size=2) | values,
    },
)
headers = st.one_of(
    st.binary(max_size=200),
    st.dictionaries(st.text(max_size=6), entries | values, max_size=4).map(lambda d: json.dumps(d).encode()),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=headers, data=st.binary(max_size=40), length=st.none() | st.integers(0, 2**64 - 1))
def test_any_bytes_open_or_are_one_line(tmp_path, header, data, length):
    path = write(tmp_path / "x.safetensors", header, data, length)
    try:
        source = open_source(path)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    for name, leaf in source.leaves.items():
        assert read_leaf(source, name).nbytes == leaf.nbytes <= len(data)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.none() | st.integers(0, 10**6))
def test_file_with_a_changed_byte_opens_or_is_one_line(tmp_path, at, byte, cut):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones((3, 4), np.float32), "b": np.zeros(5, np.int8)}, path, metadata={"format": "pt"})
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data if cut is None else data[: cut % len(data)])
    try:
        source = open_source(path)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    assert sum(read_leaf(source, name).nbytes for name in source.leaves) == source.nbytes <= len(data)


def test_fuzzing_corpus_opens_or_is_refused_in_one_line(tmp_path):
    fuzz = Path(__file__).parents[2] / "experiments" / "fuzz"
    spec = importlib.util.spec_from_file_location("safetensors_header", fuzz / "safetensors_header.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output = {path.name: module.open_all(path.read_bytes(), tmp_path) for path in (fuzz / "corpus").iterdir()}
    assert output["header"] is None
    assert len(output) > 30 and len(set(output.values())) > 10, "the corpus reaches many different refusals"
