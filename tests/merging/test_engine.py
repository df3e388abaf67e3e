"""Merge safetensors: against float64, after a kill, and every refusal."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.merging.engine.provenance import read
from pma_jax.merging.verify import verify
from pma_jax.storage.formats.open import open_source, read_leaf

BF16 = ml_dtypes.bfloat16


def make(directory: Path, seed: int, dtype=BF16, noise=0.01, shift=0, **extra) -> Path:
    base, rng = np.random.default_rng(0), np.random.default_rng(seed)
    directory.mkdir(parents=True)
    shapes = {
        "embed.weight": (701, 333),
        "norm.weight": (33,),
        "scale": (),
        "empty": (0, 4),
        "lm_head.weight": (333, 701),
    }
    leaves = {
        name: np.asarray(base.standard_normal(shape) + noise * rng.standard_normal(shape)).astype(dtype)
        for name, shape in shapes.items()
    }
    leaves["counts"] = np.arange(7) + shift
    save_file(leaves | extra, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text('{"torch_dtype": "bfloat16", "vocab_size": 701}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "training_args.bin").write_bytes(b"\x80")
    return directory


def load(path):
    """Load with the reference reader; float8, which it lacks for numpy, with pma_jax's."""
    source = open_source(path)
    if "float8_e4m3fn" in {leaf.dtype for leaf in source.leaves.values()}:
        return {name: read_leaf(source, name) for name in source.leaves}
    return load_file(path / "model.safetensors")


def mean(paths, coefficients, name):
    values = [load(path)[name].astype(np.float64) for path in paths]
    return sum(c * v for c, v in zip(coefficients, values, strict=True))


def run(paths, coefficients, out, **options):
    return merge(plan([open_source(path) for path in paths], np.asarray(coefficients), **options), [out])


@pytest.fixture
def paths(tmp_path):
    return [make(tmp_path / f"step{100 * k}", k) for k in range(1, 4)]


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float16, np.float64, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("coefficients", [[1 / 3, 1 / 3, 1 / 3], [-0.25, 0.5, 0.75], [0.0, 0.5, 0.5]])
def test_merge_equals_float64(tmp_path, dtype, coefficients):
    paths = [make(tmp_path / str(k), k, dtype) for k in range(3)]
    run(paths, coefficients, tmp_path / "out")
    merged = load(tmp_path / "out")
    for name in ("embed.weight", "norm.weight", "scale", "empty", "lm_head.weight"):
        exact = mean(paths, coefficients, name)
        assert merged[name].dtype == dtype and merged[name].shape == exact.shape
        step = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24, "float64": 2**-53}.get(
            np.dtype(dtype).name, 2**-4
        )
        # Half a step of the output dtype, plus the error of float32 sums of three terms of size 5.
        tolerance = step * np.abs(exact) + (1e-15 if dtype == np.float64 else 2e-6) + (2**-9 if step == 2**-4 else 0)
        assert np.all(np.abs(merged[name].astype(np.float64) - exact) <= tolerance), name
    np.testing.assert_array_equal(merged["counts"], np.arange(7))


def test_equal_weights_return_the_correctly_rounded_mean(tmp_path):
    paths = [make(tmp_path / str(k), k) for k in range(10)]
    run(paths, np.full(10, 0.1), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("embed.weight", "norm.weight"):
        exact = mean(paths, np.ones(10), name) / 10
        np.testing.assert_array_equal(merged[name], exact.astype(np.float32).astype(BF16))


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64, np.float16])
def test_several_recipes_in_one_pass(tmp_path, dtype):
    paths = [make(tmp_path / f"in{k}", k, dtype) for k in range(3)]
    rows = np.array([[1 / 3, 1 / 3, 1 / 3], [0.2, 0.3, 0.5], [0, 0, 1.0]])
    made = plan([open_source(path) for path in paths], rows, recipes=["sma", "weights", "last"])
    merge(made, [tmp_path / f"all{r}" for r in range(3)])
    merged = [load_file(tmp_path / f"all{r}" / "model.safetensors") for r in range(3)]
    for name in ("embed.weight", "norm.weight", "scale"):
        for row, leaves in zip(rows[:2], merged[:2], strict=True):
            exact = mean(paths, row, name).astype(np.float64 if dtype == np.float64 else np.float32).astype(dtype)
            # A float32 sum may round a tie differently from the float64 sum: by at most one step of the dtype.
            step = {"bfloat16": 2**-7, "float16": 2**-10}.get(np.dtype(dtype).name, 2**-22)
            difference = np.abs(leaves[name].astype(np.float64) - exact.astype(np.float64))
            assert np.all(difference <= step * np.abs(exact.astype(np.float64)) + 1e-6)
        np.testing.assert_array_equal(merged[2][name], load_file(paths[2] / "model.safetensors")[name])


def test_dtype_float32_keeps_what_bfloat16_rounds_away(paths, tmp_path):
    run(paths, np.full(3, 1 / 3), tmp_path / "out", dtype="float32")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_allclose(merged["embed.weight"], mean(paths, [1 / 3] * 3, "embed.weight"), rtol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    assert verify(tmp_path / "out", with_sources=True) == []


def test_same_inputs_give_the_same_bytes(paths, tmp_path):
    for out, cores in (("a", 1), ("b", 2)):
        run(paths, [0.2, 0.3, 0.5], tmp_path / out, cores=cores)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_sharded_output_opens_by_its_index(paths, tmp_path):
    run(paths, [0, 0, 1.0], tmp_path / "out", shard_bytes=500_000)
    assert (tmp_path / "out" / "model-00001-of-00002.safetensors").exists()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    newest = load_file(paths[2] / "model.safetensors")
    assert set(index["weight_map"]) == set(newest)
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / "out" / file)[name], newest[name])
    run([tmp_path / "out", paths[2]], [0.5, 0.5], tmp_path / "again")
    merged = load_file(tmp_path / "again" / "model.safetensors")
    np.testing.assert_array_equal(merged["embed.weight"], newest["embed.weight"])


def test_small_files_are_copied_and_others_reported(paths, tmp_path):
    notes, _ = run(paths, [0.5, 0.25, 0.25], tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "training_args.bin").exists()
    assert any("training_args.bin" in note for note in notes)
    facts = read(tmp_path / "out")
    assert facts["coefficients"] == [0.5, 0.25, 0.25] and facts["copied_leaves"] == ["counts"]
    assert [source["step"] for source in facts["sources"]] == [100, 200, 300]


def test_rounding_that_loses_the_gain_is_reported(tmp_path):
    paths = [make(tmp_path / str(k), k, np.float32, noise=1e-4) for k in range(10)]
    notes, _ = run(paths, np.full(10, 0.1), tmp_path / "out", dtype="bfloat16")
    assert any("rounding to bfloat16" in note for note in notes)
    paths = [make(tmp_path / f"wide{k}", k, np.float32, noise=0.1) for k in range(10)]
    assert not any(
        "rounding to" in note for note in run(paths, np.full(10, 0.1), tmp_path / "out2", dtype="bfloat16")[0]
    )


def test_verify_detects_one_changed_byte(paths, tmp_path):
    out = tmp_path / "out"
    run(paths, [0.2, 0.3, 0.5], out)
    assert verify(out, with_sources=True) == []
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    (out / "tokenizer.json").unlink()
    problems = verify(out)
    assert len(problems) == 2 and "does not match its digest" in problems[0] and "tokenizer.json" in problems[1]


def refused(match, paths, tmp_path, coefficients=None, **options):
    out = tmp_path / "refused"
    with pytest.raises(ValueError, match=match) as error:
        run(paths, np.full(len(paths), 1 / len(paths)) if coefficients is None else coefficients, out, **options)
    assert "\n" not in str(error.value)
    assert not out.exists() and not list(tmp_path.glob(".refused*"))


def test_different_leaves_are_named_and_counted(paths, tmp_path):
    other = make(tmp_path / "other", 9, np.float32, surplus=np.zeros(3))
    refused(
        r"in 6 places: .*surplus is not expected in .*embed.weight is float32, not bfloat16 in .*other",
        [*paths, other],
        tmp_path,
    )


def test_different_integers_are_named(paths, tmp_path):
    other = make(tmp_path / "other", 9, shift=1)
    refused(r"1 integer or boolean leaves.*counts \(int64\) in .*other", [*paths, other], tmp_path)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0x7FFF, 0xFFFF])
@pytest.mark.parametrize("place", [4998, 4999])
@pytest.mark.parametrize("coefficients", [[0.5, 0.5], [0.3, 0.7]])
def test_non_finite_values_are_refused(tmp_path, bits, place, coefficients):
    """Refuse infinities and NaNs of every bit pattern: rounding adds to the bits."""
    leaf = np.ones(5000, BF16)
    other = make(tmp_path / "other", 9, extra=leaf)
    bad = leaf.copy()
    bad.view(np.uint16)[place] = bits
    more = make(tmp_path / "more", 0, extra=bad)
    refused(rf"more: extra has .* at element {place}", [other, more], tmp_path, coefficients=coefficients)


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_non_finite_float32_values_are_refused(tmp_path, bits, out_dtype):
    leaf = np.ones(5000, np.float32)
    other = make(tmp_path / "other", 9, np.float32, extra=leaf)
    bad = leaf.copy()
    bad.view(np.uint32)[4998] = bits
    more = make(tmp_path / "more", 0, np.float32, extra=bad)
    refused("more: extra has .* at element 4998", [other, more], tmp_path, dtype=out_dtype)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_overflowing_sum_is_refused(tmp_path, dtype):
    paths = [make(tmp_path / str(k), k, dtype, huge=np.full(9, 3e38, dtype)) for k in range(2)]
    refused(f"huge: the weighted sum overflows {np.dtype(dtype)}", paths, tmp_path, coefficients=[1.5, 1.5])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"coefficients": [1.0]}, "1 weights for 3 checkpoints"),
        ({"coefficients": [0.5, np.nan, 0.5]}, "finite"),
        ({"dtype": "int8"}, "dtype"),
        ({"format": "pickle"}, "format"),
        ({"memory_limit_bytes": 10}, "memory"),
        ({"recipes": ["a", "b"]}, "recipe names"),
    ],
)
def test_invalid_calls_are_one_line(paths, tmp_path, options, match):
    refused(match, paths, tmp_path, **options)


def test_existing_output_is_never_overwritten(paths, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ValueError, match="never overwrites"):
        run(paths, [0.2, 0.3, 0.5], out)
    assert list(out.iterdir()) == []


def pass_on(problem):
    if problem is not None:
        raise problem


def test_two_processes_share_the_work(paths, tmp_path):
    """Run the two processes one after the other; each writes its part, and the first publishes both."""
    run(paths, [0.2, 0.3, 0.5], tmp_path / "alone")
    made = plan([open_source(path) for path in paths], np.array([0.2, 0.3, 0.5]))
    merge(made, [tmp_path / "out"], process_index_and_count=(1, 2), barrier=pass_on)
    assert not (tmp_path / "out").exists()
    merge(made, [tmp_path / "out"], process_index_and_count=(0, 2), barrier=pass_on)
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    with pytest.raises(ValueError, match="units are missing"):
        merge(made, [tmp_path / "half"], process_index_and_count=(0, 2), barrier=pass_on)


CHILD = """
import sys, time
import numpy as np
from pma_jax.merging.engine import sums
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.storage.formats.open import open_source, read_leaf
finish = sums.finish_block
def slow(*arguments):
    time.sleep(0.02)
    return finish(*arguments)
sums.finish_block = slow
rows = np.array([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])
made = plan([open_source(path) for path in sys.argv[3:]], rows, recipes=["a", "b"], cores=1)
merge(made, sys.argv[1:3], progress=lambda done, total: print(done, flush=True))
"""


def test_killed_merge_resumes_where_it_stopped(tmp_path, monkeypatch):
    leaves = {f"leaf{n}": np.full(40_000, n, np.float32) for n in range(40)}  # larger than leaves in packs
    paths = [make(tmp_path / f"in{k}", k, **leaves) for k in range(3)]
    outs = [tmp_path / "a", tmp_path / "b"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, outs), *map(str, paths)], stdout=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout is not None
        for _ in range(12):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert not any(out.exists() for out in outs)
    # As after a power failure: a recorded block never reached the disk.
    work = next(tmp_path.glob(".a.partial-*"))
    with (work / "checkpoint" / "model.safetensors").open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(bytes(40))
    rows = np.array([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])
    made = plan([open_source(path) for path in paths], rows, recipes=["a", "b"], cores=1)
    _, read_bytes = merge(made, outs)
    assert 0 < read_bytes < made.read_bytes
    assert not list(tmp_path.glob(".*partial*"))
    wholes = [tmp_path / "whole" / out.name for out in outs]
    merge(made, wholes)
    for out, complete in zip(outs, wholes, strict=True):
        assert verify(out, with_sources=True) == []
        assert (out / "model.safetensors").read_bytes() == (complete / "model.safetensors").read_bytes()


def interrupt_between_publications(paths, tmp_path, monkeypatch):
    """Interrupt a merge with two recipes when the second of its outputs is published, and the first is not."""
    rows = np.array([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])
    made = plan([open_source(path) for path in paths], rows, recipes=["a", "b"])
    outs = [tmp_path / "a", tmp_path / "b"]
    rename = Path.rename

    def interrupted(self, target):
        if target.name == "a":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge(made, outs)
    monkeypatch.undo()
    assert not outs[0].exists() and outs[1].exists()
    return made, outs


def test_merge_killed_between_two_publications_publishes_the_other(paths, tmp_path, monkeypatch):
    made, outs = interrupt_between_publications(paths, tmp_path, monkeypatch)
    assert merge(made, outs)[1] == 0
    assert all(verify(out) == [] for out in outs)


@pytest.mark.parametrize("name", ["unlink", "rmdir"])
@pytest.mark.parametrize("removals", range(4))
@pytest.mark.parametrize("recipes", [["a"], ["a", "b"]])
def test_merge_killed_while_it_removes_its_working_files_is_complete(
    paths, tmp_path, monkeypatch, name, removals, recipes
):
    rows = np.array([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])[: len(recipes)]
    made = plan([open_source(path) for path in paths], rows, recipes=recipes)
    outs = [tmp_path / recipe for recipe in recipes]
    remove, calls = getattr(os, name), itertools.count()

    def stops(path, **options):
        if next(calls) >= removals:
            raise KeyboardInterrupt
        remove(path, **options)

    monkeypatch.setattr(os, name, stops)
    with contextlib.suppress(KeyboardInterrupt):
        merge(made, outs)
    monkeypatch.undo()
    assert all(verify(out, with_sources=True) == [] for out in outs)
    if list(tmp_path.glob(".*partial*")):
        assert merge(made, outs).read_bytes == 0
    with pytest.raises(ValueError, match="exists already"):
        merge(made, outs)
    assert all(verify(out, with_sources=True) == [] for out in outs) and not list(tmp_path.glob(".*partial*"))


def test_merge_whose_journal_was_lost_names_the_outputs_to_remove(paths, tmp_path, monkeypatch):
    made, outs = interrupt_between_publications(paths, tmp_path, monkeypatch)
    next(tmp_path.glob(".a.partial-*/journal.0.jsonl")).unlink()
    with pytest.raises(ValueError, match=f"{outs[1]}: written by an interrupted run .* remove it"):
        merge(made, outs)
    shutil.rmtree(outs[1])
    merge(made, outs)
    assert all(verify(out, with_sources=True) == [] for out in outs) and not list(tmp_path.glob(".*partial*"))


def test_concurrent_identical_merge_is_refused(paths, tmp_path, monkeypatch):
    made = plan([open_source(path) for path in paths], np.array([0.2, 0.3, 0.5]))
    seen = []

    def nested(done, total):
        if not seen:
            seen.append(1)
            with pytest.raises(ValueError, match="another process"):
                merge(made, [tmp_path / "out"])

    merge(made, [tmp_path / "out"], progress=nested)
    assert seen and verify(tmp_path / "out") == []


def test_memory_is_constant_in_the_number_of_checkpoints(tmp_path):
    """Compare the peak resident memory above the imports for 3 and for 30 checkpoints, each in a new process."""
    paths = [make(tmp_path / str(k), k, big=np.ones(2**22, np.float32)) for k in range(3)]
    code = """
import pathlib, sys
import numpy as np
def peak_kib():
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.storage.formats.open import open_source, read_leaf
before = peak_kib()
sources = [open_source(path) for path in sys.argv[2:]]
merge(plan(sources, np.full(len(sources), 1 / len(sources)), cores=2), [sys.argv[1]])
heavy = {"jax", "orbax", "tensorstore", "torch"} & set(sys.modules)
assert not heavy, heavy
print(before, peak_kib())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    peaks = []
    for count in (3, 30):
        arguments = [
            sys.executable,
            "-c",
            code,
            str(tmp_path / f"out{count}"),
            *[str(path) for path in (paths * 10)[:count]],
        ]
        out = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout.split()
        peaks.append(int(out[1]))
        assert int(out[1]) - int(out[0]) < 100 * 1024
    assert peaks[1] < 1.1 * peaks[0]


def test_block_size_does_not_change_the_result(paths, tmp_path):
    made = plan([open_source(path) for path in paths], np.array([0.2, 0.3, 0.5]))
    merge(made, [tmp_path / "a"])
    schedule = dataclasses.replace(made.schedule, block_elements=2**12)
    merge(dataclasses.replace(made, schedule=schedule), [tmp_path / "b"])
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
