"""Merge Hugging Face layouts and compare with float64 NumPy: `python experiments/faults/foreign_hf.py [CELL …]`.

Each cell writes three checkpoints with the safetensors library, merges them with `pma merge`, and reads the result with
the safetensors library. The result must be right to the rounding of its dtype, and complete; or the merge must be
refused, with a message that names the reason, where a merge would be wrong. Exit status 1 if a cell fails.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("step100", "step200", "step300")
WEIGHTS = {"sma": [1 / 3] * 3, "wma": [1 / 6, 2 / 6, 3 / 6], "ema:alpha=0.2": [0.64, 0.16, 0.2], "lagfree": [0, 0, 1]}
UNIT = {"float64": 2**-52, "float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}
FP8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}

Leaves = dict[str, np.ndarray]
Call = Callable[[list[str]], tuple[int, str]]  # arguments of `pma` -> (exit status, standard error)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One layout.

    Attributes:
        leaves: Number of the checkpoint (0, 1, 2) -> its tensors.
        files: Name -> text of each companion file.
        shards: Number of files that the tensors are divided over.
        change: Function that changes the written directory.
        options: Further arguments of `pma merge`.
        recipe: A key of `WEIGHTS`.
        refused: Text that the error must contain; None if the merge must succeed.
        target: What is merged in a checkpoint's directory: "" for the directory itself.
    """

    leaves: Callable[[int], Leaves]
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    shards: int = 1
    change: Callable[[Path], None] = lambda folder: None
    options: tuple[str, ...] = ()
    recipe: str = "sma"
    refused: str | None = None
    target: str = ""


def random_leaves(dtype: Any, k: int, **more: np.ndarray) -> Leaves:
    """Return two matrices, a vector, a scalar and an empty tensor of one dtype."""
    base, noise = np.random.default_rng(0), np.random.default_rng(k + 1)
    shapes = {"embed.weight": (67, 33), "layers.0.weight": (33, 33), "norm.weight": (33,), "gain": (), "none": (0, 3)}
    values = {n: np.asarray(base.normal(size=s) + 0.1 * noise.normal(size=s)).astype(dtype) for n, s in shapes.items()}
    return values | more


def of_dtype(dtype: Any) -> Callable[[int], Leaves]:
    """Return a function that makes random leaves of one dtype."""
    return lambda k: random_leaves(dtype, k)


def fixed(**leaves: np.ndarray) -> Callable[[int], Leaves]:
    """Return a function that makes float32 leaves, and `leaves`, equal in all checkpoints."""
    return lambda k: random_leaves(np.float32, k, **leaves)


def links_to_blobs(folder: Path) -> None:
    """Turn a directory into a revision of the hub's cache: links from snapshots/REVISION to blobs."""
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    for file in list(folder.iterdir()):
        blob = file.rename(blobs / f"{folder.name}-{file.name}")
        file.symlink_to(Path("../../blobs") / blob.name)


def secret_link(folder: Path) -> None:
    """Add a tokenizer.json that links to a file of the machine."""
    (folder / "tokenizer.json").symlink_to("/etc/passwd")


def without(pattern: str) -> Callable[[Path], None]:
    """Return a function that removes the files of a directory that match a pattern."""

    def change(folder: Path) -> None:
        for file in list(folder.glob(pattern)):
            file.unlink()

    return change


def only(name: str) -> Callable[[Path], None]:
    """Return a function that replaces the weights of a directory by one file that is not read."""

    def change(folder: Path) -> None:
        without("*.safetensors*")(folder)
        (folder / name).write_bytes(b"\x80\x04")

    return change


def duplicate(name: str) -> Callable[[Path], None]:
    """Return a function that writes other weights beside those of a directory."""
    return lambda folder: save_file({"gain": np.zeros(1, np.float32)}, folder / name)


F32 = np.ones((8, 8), np.float32)
COMPANIONS = {"config.json": '{"dtype": "float32"}', "tokenizer.json": "{}", "merges.txt": "a b", "README.md": "x"}
CELLS = {
    **{
        f"dtype {np.dtype(d).name}": Cell(of_dtype(d)) for d in (np.float64, np.float32, ml_dtypes.bfloat16, np.float16)
    },
    "dtype float64, ema": Cell(of_dtype(np.float64), recipe="ema:alpha=0.2"),
    "dtype mixed": Cell(lambda k: random_leaves(np.float32, k, half=np.full(3, k, np.float16), n=np.arange(3))),
    "dtype uint16 and uint64": Cell(fixed(a=np.arange(3, dtype=np.uint16), b=np.arange(3, dtype=np.uint64))),
    "dtype complex64, equal": Cell(fixed(z=np.ones(3, np.complex64))),
    "dtype complex64, different": Cell(
        lambda k: random_leaves(np.float32, k, z=np.full(3, k, np.complex64)), refused="complex64"
    ),
    "equal inputs": Cell(of_dtype(np.float32)),
    "sharded": Cell(of_dtype(np.float32), shards=3),
    "sharded output": Cell(of_dtype(np.float32), options=("--shard-size", "5000")),
    "companions": Cell(of_dtype(np.float32), COMPANIONS),
    "hub cache": Cell(of_dtype(np.float32), COMPANIONS, change=links_to_blobs),
    "hub cache, sharded": Cell(of_dtype(np.float32), COMPANIONS, 2, links_to_blobs),
    "tied weights": Cell(of_dtype(np.float32), {"config.json": '{"tie_word_embeddings": true}'}),
    "unusual names": Cell(fixed(**{"a/b.c d": F32, "ü.✓": F32, "x" * 200: F32, ".hidden": F32, "..": F32})),
    "a thousand names": Cell(fixed(**{f"layers.{i}.bias": np.full(2, i, np.float32) for i in range(1000)})),
    "zero-dimensional only": Cell(lambda k: {"t": np.array(k, np.float32)}),
    "recipe wma": Cell(of_dtype(ml_dtypes.bfloat16), recipe="wma"),
    "output bfloat16": Cell(of_dtype(np.float32), options=("--dtype", "bfloat16")),
    "output float32": Cell(of_dtype(ml_dtypes.bfloat16), options=("--dtype", "float32")),
    "output float16": Cell(of_dtype(np.float32), options=("--dtype", "float16")),
    "output float16, overflow": Cell(fixed(w=F32 * 1e6), options=("--dtype", "float16"), refused="float16"),
    "integers differ": Cell(lambda k: random_leaves(np.float32, k, num_batches_tracked=np.array(k)), refused="newest"),
    "integers newest": Cell(
        lambda k: random_leaves(np.float32, k, num_batches_tracked=np.array(k)), options=("--integers", "newest")
    ),
    "fp8 with scales": Cell(lambda k: {"w_scale_inv": F32 * (k + 1), "b": F32}, {"fp8": "w"}, refused="quantised"),
    "quantization_config": Cell(
        of_dtype(np.float32), {"config.json": '{"quantization_config": {"bits": 4}}'}, refused="quantis"
    ),
    "gptq": Cell(fixed(**{"q.qweight": F32.astype(np.int32), "q.scales": F32}), refused="quantised"),
    "bitsandbytes": Cell(fixed(**{"q.weight": F32.astype(np.uint8), "q.weight.absmax": F32}), refused="quantised"),
    "mxfp4": Cell(fixed(e_blocks=F32.astype(np.uint8), e_scales=F32.astype(np.uint8)), refused="quantised"),
    "lora": Cell(fixed(**{"q.lora_A.weight": F32, "q.lora_B.weight": F32}), refused="adapter"),
    "adapter_config": Cell(of_dtype(np.float32), {"adapter_config.json": "{}"}, refused="adapter"),
    "lone shard": Cell(of_dtype(np.float32), shards=2, change=without("*.json"), refused="index"),
    "lone shard, named": Cell(
        of_dtype(np.float32), shards=2, target="model-00001-of-00002.safetensors", refused="shard 1 of 2"
    ),
    "one shard left": Cell(
        of_dtype(np.float32),
        shards=2,
        change=lambda folder: (without("*.json")(folder), without("model-00002-*")(folder))[0],
        refused="shard 1 of 2",
    ),
    "shard missing": Cell(of_dtype(np.float32), shards=2, change=without("model-00002-*"), refused="missing"),
    "shard not listed": Cell(
        of_dtype(np.float32), shards=2, change=duplicate("model-00003-of-00003.safetensors"), refused="does not list"
    ),
    "model.safetensors beside index": Cell(
        of_dtype(np.float32), shards=2, change=duplicate("model.safetensors"), refused="does not list"
    ),
    "consolidated beside index": Cell(of_dtype(np.float32), shards=2, change=duplicate("consolidated.safetensors")),
    "link out of the checkpoint": Cell(of_dtype(np.float32), change=secret_link),
    "pickle": Cell(of_dtype(np.float32), change=only("pytorch_model.bin"), refused="AutoModelForCausalLM"),
    "msgpack": Cell(of_dtype(np.float32), change=only("flax_model.msgpack"), refused="msgpack"),
    "npz": Cell(of_dtype(np.float32), change=only("params.npz"), refused="not a complete .npz file"),
    "dcp": Cell(of_dtype(np.float32), change=only("__0_0.distcp"), refused="DCP"),
    "gguf": Cell(of_dtype(np.float32), change=only("model.gguf"), refused="GGUF"),
}


def write(folder: Path, cell: Cell, k: int) -> Leaves:
    """Write checkpoint number `k` of a cell; return its leaves."""
    folder.mkdir(parents=True)
    leaves = cell.leaves(k)
    files = {name: text for name, text in cell.files.items() if name != "fp8"}
    for name, text in files.items():
        (folder / name).write_text(text)
    if "fp8" in cell.files:  # the safetensors library cannot write float8 with NumPy
        write_fp8(folder / "model.safetensors", leaves, cell.files["fp8"])
    elif cell.shards == 1:
        save_file(leaves, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = [f"model-{i + 1:05d}-of-{cell.shards:05d}.safetensors" for i in range(cell.shards)]
        shards = {name: dict(list(leaves.items())[i :: cell.shards]) for i, name in enumerate(names)}
        for name, part in shards.items():
            save_file(part, folder / name, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {leaf: name for name, part in shards.items() for leaf in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    cell.change(folder)
    return leaves


def write_fp8(path: Path, leaves: Leaves, name: str) -> None:
    """Write float32 leaves and a float8 leaf `name`."""
    parts = leaves | {name: F32.astype(FP8["F8_E4M3"])}
    header, start = {}, 0
    for key, x in parts.items():
        code = "F32" if x.dtype == np.float32 else "F8_E4M3"
        header[key] = {"dtype": code, "shape": list(x.shape), "data_offsets": [start, start + x.nbytes]}
        start += x.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for x in parts.values()))


def run_cell(name: str, folder: Path, call: Call) -> str | None:
    """Run one cell in an empty folder; return what is wrong, or None."""
    cell = CELLS[name]
    numbers = (1, 1, 1) if name == "equal inputs" else (0, 1, 2)
    parent = folder / "snapshots"
    leaves_K = [write(parent / step, cell, k) for step, k in zip(NAMES, numbers, strict=True)]
    out = folder / "out"
    sources = [str(parent / step / cell.target) for step in NAMES]
    status, errors = call(["merge", *sources, "--out", str(out), "--recipe", cell.recipe, *cell.options])
    lines = [line for line in errors.splitlines() if line.startswith("error:")]
    if cell.refused is not None:
        if status == 0 or out.exists():
            return "merged, although the result is wrong"
        is_told = status == 1 and len(lines) == 1 and "Traceback" not in errors and cell.refused in lines[0]
        return None if is_told else f"status {status}, the reason is not told: {errors[-200:]}"
    if status:
        return f"status {status}: {errors[-300:]}"
    return compare(out, cell, leaves_K, is_equal=name == "equal inputs")


def compare(out: Path, cell: Cell, leaves_K: list[Leaves], is_equal: bool) -> str | None:
    """Compare a merged checkpoint, read with the safetensors library, with float64; return what is wrong, or None."""
    merged: Leaves = {}
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            merged |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    if merged.keys() != leaves_K[0].keys():
        return f"leaves differ: {sorted(merged.keys() ^ leaves_K[0].keys())[:3]}"
    option = cell.options[1] if cell.options[:1] == ("--dtype",) else None
    for name, x in merged.items():
        inputs = [leaves[name] for leaves in leaves_K]
        is_summed = inputs[0].dtype.name in UNIT
        expected_dtype = option if option and is_summed else inputs[0].dtype.name
        if x.dtype.name != expected_dtype or x.shape != inputs[0].shape:
            return f"{name}: {x.dtype} {x.shape}"
        if is_equal or not is_summed:
            if x.tobytes() != inputs[-1].tobytes():
                return f"{name}: differs from its equal inputs"
            continue
        exact = sum(c * v.astype(np.float64) for c, v in zip(WEIGHTS[cell.recipe], inputs, strict=True))
        sums = max(UNIT[inputs[0].dtype.name] if inputs[0].dtype == np.float64 else 2**-23, 2**-52)
        size = max((np.abs(v.astype(np.float64)).max(initial=0) for v in inputs), default=0.0)
        error = np.abs(x.astype(np.float64) - exact)
        if (error > UNIT[x.dtype.name] / 2 * np.abs(exact) + 4 * sums * size).any():
            return f"{name}: off by {error.max():.3g}"
    if any(path.is_symlink() or b"root:" in path.read_bytes()[:100] for path in out.iterdir()):
        return "a file of the machine was copied"
    missing = {file for file in cell.files if file != "README.md"} - {path.name for path in out.iterdir()}
    return f"not copied: {sorted(missing)}" if missing else None


def call_in_subprocess(arguments: list[str]) -> tuple[int, str]:
    """Run `pma` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.environ.get("PMA_ROOT", str(ROOT))}
    command = [sys.executable, "-m", "pma_jax.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment, cwd="/")
    return done.returncode, done.stderr


def main() -> None:
    """Run the cells that are named, or all of them."""
    names = sys.argv[1:] or list(CELLS)
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            problem = run_cell(name, Path(folder), call_in_subprocess)
        failed += problem is not None
        print(f"{'ok  ' if problem is None else 'FAIL'}  {name}{f': {problem}' if problem else ''}", flush=True)
    print(f"{len(names) - failed} of {len(names)} cells are right")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
