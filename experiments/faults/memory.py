"""Compare the memory that `pma merge --dry-run` says with the peak resident memory of the merge, under limits.

    python experiments/faults/memory.py
    python experiments/faults/memory.py --package PATH     the pma_jax in PATH instead, an earlier one for example
    python experiments/faults/memory.py --only columns --million

Each merge must keep its limit, and its peak must be within 10% of what the dry run says (if tensorstore decodes its
leaves, at most 10% above and 50% below). A merge may be refused only if
the limit is below the memory that it says it needs, and with this much it must run. Prints a line per case, recipes and
limit. Exit status 1 if a cell fails.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

MIB = 2**20
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
TOLERANCE = 0.10
# tensorstore decodes chunks of other codecs than zstd with threads of its own, and the dry run says an upper bound.
LOWEST_DECODED = 0.5
RECIPES = ("sma", "ema:alpha=0.2", "wma", "ema:alpha=0.5")
RAW = ({"name": "bytes", "configuration": {"endian": "little"}},)
ZSTD = (*RAW, {"name": "zstd", "configuration": {"level": 1}})
GZIP = (*RAW, {"name": "gzip", "configuration": {"level": 1}})


def write_safetensors(folder: Path, leaves: dict[str, tuple[int, ...]], dtype: str, seed: int) -> None:
    """Write one file of random values, a leaf at a time."""
    header, offset, width = {}, 0, np.dtype(dtype).itemsize
    for name, shape in leaves.items():
        size = int(np.prod(shape)) * width
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    folder.mkdir(parents=True)
    block = np.random.default_rng(seed).standard_normal(2**20).astype(dtype).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, offset, len(block)):
            file.write(block[: offset - start])


def write_orbax(
    folder: Path,
    leaves: dict[str, tuple[int, ...]],
    chunk: Callable[[tuple[int, ...]], list[int]],
    codecs: tuple,
    seed: int,
) -> None:
    """Write an Orbax tree of zarr3 arrays with the given chunks and codecs."""
    entries = {}
    rng = np.random.default_rng(seed)
    for name, shape in leaves.items():
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk(shape)}}
        metadata = {"shape": list(shape), "data_type": "float32", "chunk_grid": grid, "codecs": list(codecs)}
        spec = {"driver": "zarr3", "kvstore": f"file://{folder}/state/{name}/", "metadata": metadata, "create": True}
        ts.open(spec).result().write(rng.standard_normal(shape, np.float32)).result()
        key = {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
        entries[f"('{name}',)"] = key
    tree = {"tree_metadata": entries, "use_ocdbt": False, "use_zarr3": True}
    (folder / "state" / "_METADATA").write_text(json.dumps(tree | {"store_array_data_equal_to_fill_value": True}))
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {"state": "x"}}))


def save_with_orbax(folder: Path, leaves: dict[str, tuple[int, ...]], seed: int) -> None:
    """Save a tree with Orbax's defaults: OCDBT, one chunk per array, zstd of level 3, and a small integer leaf."""
    from orbax.checkpoint import v1 as ocp

    rng = np.random.default_rng(seed)
    tree: dict[str, Any] = {"counts": np.arange(7)}
    for name, shape in leaves.items():
        tree[name] = rng.standard_normal(shape, np.float32)
    ocp.save(str(folder), tree)  # pyrefly: ignore


def rows_chunk(shape: tuple[int, ...]) -> list[int]:
    """Split the first axis in 16."""
    return [-(-shape[0] // 16), *shape[1:]]


def columns_chunk(shape: tuple[int, ...]) -> list[int]:
    """Split the last axis in 8."""
    return [*shape[:-1], -(-shape[-1] // 8)]


Shapes = dict[str, tuple[int, ...]]
LARGE: Shapes = {"w": (8192, 4096), "b": (4096,)}  # 128 MiB
HUGE: Shapes = {"w": (8192, 8192)}  # 256 MiB
SMALL: Shapes = {f"layers.{i}.w": (16,) for i in range(20_000)}
FEW_SMALL: Shapes = {f"layers-{i}": (16,) for i in range(400)}
MANY_SMALLER: Shapes = {f"w{i}": (1024, 1024) for i in range(16)}  # 4 MiB each
MANY: Shapes = {f"w{i}": (2048, 2048) for i in range(8)}  # 16 MiB each
TWO: Shapes = {f"w{i}": (4096, 3840) for i in range(2)}  # 60 MiB each
Writer = Callable[[Path, int], None]
CASES: dict[str, Writer] = {
    "safetensors, large": lambda folder, seed: write_safetensors(folder, LARGE, "float32", seed),
    "safetensors, 20,000 small": lambda folder, seed: write_safetensors(folder, SMALL, "float32", seed),
    "orbax, 400 small": lambda folder, seed: write_orbax(folder, FEW_SMALL, list, ZSTD, seed),
    "orbax, defaults": lambda folder, seed: save_with_orbax(folder, LARGE, seed),
    "orbax, rows, raw": lambda folder, seed: write_orbax(folder, LARGE, rows_chunk, RAW, seed),
    "orbax, rows, zstd": lambda folder, seed: write_orbax(folder, LARGE, rows_chunk, ZSTD, seed),
    "orbax, whole, zstd": lambda folder, seed: write_orbax(folder, LARGE, list, ZSTD, seed),
    "orbax, columns, raw": lambda folder, seed: write_orbax(folder, LARGE, columns_chunk, RAW, seed),
    "orbax, columns, zstd": lambda folder, seed: write_orbax(folder, LARGE, columns_chunk, ZSTD, seed),
    "orbax, columns, 16 of 4 MiB": lambda folder, seed: write_orbax(folder, MANY_SMALLER, columns_chunk, ZSTD, seed),
    "orbax, columns, 8 of 16 MiB": lambda folder, seed: write_orbax(folder, MANY, columns_chunk, ZSTD, seed),
    "orbax, columns, 2 of 60 MiB": lambda folder, seed: write_orbax(folder, TWO, columns_chunk, ZSTD, seed),
    "orbax, gzip, large columns": lambda folder, seed: write_orbax(folder, LARGE, columns_chunk, GZIP, seed),
    "orbax, gzip, 8 of 16 MiB": lambda folder, seed: write_orbax(folder, MANY, columns_chunk, GZIP, seed),
    "orbax, gzip, 2 of 60 MiB": lambda folder, seed: write_orbax(folder, TWO, columns_chunk, GZIP, seed),
    "orbax, huge columns, zstd": lambda folder, seed: write_orbax(folder, HUGE, columns_chunk, ZSTD, seed),
}
MILLION: Shapes = {f"layers.{i}.w": (1,) for i in range(1_000_000)}


class Cell(NamedTuple):
    """One merge: what the dry run said, and the peak of the merge, in bytes; 0 if there is none."""

    said: float
    measured: float
    message: str


def resident_bytes(pid: int, field: str = "VmHWM") -> int:
    """Return the peak resident bytes of a process and its children; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        own = int(text.split(f"{field}:")[1].split()[0]) * 1024
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return 0
    return own + sum(resident_bytes(int(child), field) for child in children)


def run(package: Path, arguments: list[str]) -> tuple[int, str, int]:
    """Run `pma`; return its status, its output, and its peak resident bytes."""
    command = [sys.executable, "-m", "pma_jax.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(package)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=package, env=environment, stdout=output, stderr=subprocess.STDOUT)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.003)
        output.seek(0)
        return process.returncode, output.read(), peak


def measure(package: Path, inputs: list[Path], recipes: int, limit: int, out: Path) -> Cell:
    """Run the dry run and the merge of one cell."""
    arguments = ["merge", *map(str, inputs), "--out", str(out), "--memory-limit", str(limit)]
    for recipe in RECIPES[:recipes]:
        arguments += ["--recipe", recipe]
    status, text, _ = run(package, [*arguments, "--dry-run"])
    if status:
        return Cell(0, 0, text.strip()[-200:])
    said = re.search(r"([\d.]+) ([KMG]?i?B) of memory", text)
    status, merged, peak = run(package, arguments)
    shutil.rmtree(out, ignore_errors=True)
    if status or said is None:
        return Cell(0, peak, merged.strip()[-200:] or text)
    return Cell(float(said[1]) * UNITS[said[2]], peak, "")


def judge(cell: Cell, limit: int, lowest: float) -> str:
    """Return the verdict of a cell: "ok", "refused: ..." or what is wrong.

    Args:
        cell: The cell.
        limit: Its memory limit in bytes.
        lowest: The lowest ratio of the measured memory to what the dry run says.
    """
    if cell.message:
        needed = re.search(r"(\d+) MiB", cell.message)
        is_true = needed is not None and "more memory" not in cell.message and int(needed[1]) * MIB > limit
        return f"{'refused' if is_true else 'WRONG REFUSAL'}: {cell.message}"
    if cell.measured > limit:
        return "OVER THE LIMIT"
    return "ok" if lowest <= cell.measured / cell.said <= 1 + TOLERANCE else "NOT WITHIN 10%"


def main() -> int:
    """Build the cases, run all cells, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=Path(__file__).resolve().parents[2], help="root of the package")
    parser.add_argument("--only", default="", help="run only the cases whose names contain this")
    parser.add_argument("--limits", default="1024,256", help="memory limits in MiB, comma-separated")
    parser.add_argument("--recipes", default="1,4", help="numbers of recipes, comma-separated")
    parser.add_argument("--count", type=int, default=3, help="checkpoints per merge")
    parser.add_argument("--million", action="store_true", help="also merge a million tensors: minutes")
    options = parser.parse_args()
    cases = {name: write for name, write in CASES.items() if options.only in name}
    if options.million:
        cases["safetensors, 1,000,000 small"] = lambda folder, seed: write_safetensors(folder, MILLION, "float32", seed)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, write in cases.items():
            folder = Path(scratch) / "inputs"
            inputs = [folder / f"step{number + 1}" for number in range(options.count)]
            for seed, path in enumerate(inputs):
                write(path, seed)
            for recipes in map(int, options.recipes.split(",")):
                for limit in (int(text) * MIB for text in options.limits.split(",")):
                    cell = measure(options.package.resolve(), inputs, recipes, limit, Path(scratch) / "out")
                    verdict = judge(cell, limit, LOWEST_DECODED if "gzip" in name else 1 - TOLERANCE)
                    failed += verdict[0].isupper()
                    ratio = f"{cell.measured / cell.said:.2f}" if cell.said else "-"
                    print(
                        f"{name:30} {recipes} recipes, limit {limit // MIB:4}: said {cell.said / MIB:5.0f} MiB, "
                        f"measured {cell.measured / MIB:5.0f} MiB, ratio {ratio:>4}  {verdict}",
                        flush=True,
                    )
            shutil.rmtree(folder)
    print(f"{failed} cells failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
