"""Cost of merging as a complete process, relative to a plain read of the same bytes and to other implementations.

    python experiments/benchmarks/merge.py SCRATCH                       the 160M model, bfloat16, 5 rounds: minutes
    python experiments/benchmarks/merge.py SCRATCH --size 560M --dtype float32 --rounds 3
    python experiments/benchmarks/merge.py SCRATCH --mergekit ENV/bin/python    also mergekit, in its own environment
    python experiments/benchmarks/merge.py SCRATCH --cold    drop the inputs from the page cache before each run

The script writes its inputs to SCRATCH (about 11 checkpoints, as safetensors and as Orbax), removes them at the end,
and prints one JSON object: medians of wall seconds, with their range, and of peak resident MB, and the ratios that the
bars refer to.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from merge_methods import METHODS

# Name -> width, hidden width, layers, vocabulary.
SIZES = {"tiny": (256, 512, 4, 1024), "160M": (768, 2048, 16, 32000), "560M": (1280, 3456, 24, 32000)}


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of a Llama model of one of `SIZES`."""
    width, hidden, layers, vocabulary = SIZES[size]
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        tensors |= {f"{prefix}.mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
        tensors |= {f"{prefix}.mlp.down_proj.weight": (width, hidden), f"{prefix}.input_layernorm.weight": (width,)}
        tensors[f"{prefix}.post_attention_layernorm.weight"] = (width,)
    return tensors | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def checkpoints(size: str, dtype: str, count: int) -> Any:
    """Yield `count` checkpoints (name -> array): the same weights with different small noise."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    noise = rng.standard_normal(2**22, np.float32) * 1e-3
    base = {name: rng.standard_normal(shape, np.float32) * 0.02 for name, shape in shapes(size).items()}
    for number in range(count):
        yield {
            name: (value + np.resize(np.roll(noise, 7919 * number), value.shape)).astype(kind)
            for name, value in base.items()
        }


def generate(folder: Path, size: str, dtype: str, count: int) -> None:
    """Write the checkpoints as safetensors/K and orbax/K (Orbax v1 with its default options)."""
    from orbax.checkpoint import v1 as ocp
    from safetensors.numpy import save_file

    for number, leaves in enumerate(checkpoints(size, dtype, count)):
        target = folder / "safetensors" / str(number)
        target.mkdir(parents=True)
        save_file(leaves, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(llama_config(size, dtype)))
        ocp.save(str(folder / "orbax" / str(number)), leaves)


def llama_config(size: str, dtype: str) -> dict[str, Any]:
    """Return the config.json that mergekit requires."""
    width, hidden, layers, vocabulary = SIZES[size]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def run(
    method: str, inputs: list[Path], out: Path, python: str = sys.executable, cold: bool = False
) -> dict[str, float]:
    """Run one method in a process of its own; return its wall and CPU seconds and its peak resident MB."""
    if cold:
        drop_pages(inputs)
    words = [python, __file__, str(out.parent), *map(str, inputs), "--child", method, "--out", str(out)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": seconds, "cpu_s": cpu, "peak_MB": float(output.split()[-1])}


def drop_pages(inputs: list[Path]) -> None:
    """Drop the inputs from the page cache, so that the next read is from disk."""
    os.sync()  # a dirty page cannot be dropped
    for file in (file for path in inputs for file in path.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_resident_mb() -> float:
    """Return this process's peak resident MB; getrusage would include its parent's memory at the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(
    methods: list[str], inputs: list[Path], scratch: Path, rounds: int, cold: bool, mergekit_python: str = ""
) -> dict[str, dict[str, float]]:
    """Run the methods alternately, `rounds` times each; return the medians and the range of the time per method."""
    runs: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            python = mergekit_python if method == "mergekit" else sys.executable
            runs[method].append(run(method, inputs, scratch / "out", python, cold))
    medians = {}
    for method, of_method in runs.items():
        medians[method] = {key: round(statistics.median(one[key] for one in of_method), 2) for key in of_method[0]}
        for key, extreme in (("lowest", min), ("highest", max)):
            medians[method][f"{key}_wall_s"] = round(extreme(one["wall_s"] for one in of_method), 2)
    return medians


def ratio(medians: dict[str, dict[str, float]], method: str, reference: str) -> str:
    """Format the ratio of wall seconds of two methods, and of CPU seconds, which depend less on other load."""
    wall, cpu = (medians[method][key] / medians[reference][key] for key in ("wall_s", "cpu_s"))
    return f"{wall:.2f} (CPU {cpu:.2f})"


def memory_over_imports(inputs: list[Path], scratch: Path) -> dict[str, int]:
    """Return the peak resident MB above that of the imports, for 3 and for 30 checkpoints."""
    base = run("imports", inputs, scratch / "out")["peak_MB"]
    return {str(n): round(run("ours", (inputs * 30)[:n], scratch / "out")["peak_MB"] - base) for n in (3, 30)}


def safetensors_section(scratch: Path, rounds: int, count: int, cold: bool, mergekit_python: str) -> dict[str, Any]:
    """Measure merges from safetensors to safetensors, and the memory for 3 and 30 checkpoints."""
    inputs = [scratch / "safetensors" / str(number) for number in range(count)]
    methods = ["floor", "ours", "numpy loop", "torch loop", *(["mergekit"] if mergekit_python else [])]
    medians = measure(methods, inputs, scratch, rounds, cold, mergekit_python)
    medians |= measure(["floor of 16 recipes", "ours 16 recipes"], inputs, scratch, min(rounds, 3), cold)
    ratios = {f"{method} / floor": ratio(medians, method, "floor") for method in methods[1:]}
    ratios |= {f"{method} / ours": ratio(medians, method, "ours") for method in [*methods[2:], "ours 16 recipes"]}
    ratios["ours 16 recipes / floor of 16 recipes"] = ratio(medians, "ours 16 recipes", "floor of 16 recipes")
    memory = memory_over_imports(inputs, scratch)
    return {"found": medians, "ratios": ratios, "peak_MB_over_imports_by_count": memory}


def orbax_section(scratch: Path, rounds: int, count: int, cold: bool) -> dict[str, Any]:
    """Measure merges from Orbax to Orbax."""
    inputs = [scratch / "orbax" / str(number) for number in range(count)]
    medians = measure(["floor", "decode", "ours", "one by one"], inputs, scratch, rounds, cold)
    pairs = (("ours", "decode"), ("one by one", "ours"))
    ratios = {f"{method} / {reference}": ratio(medians, method, reference) for method, reference in pairs}
    memory = memory_over_imports(inputs, scratch)
    return {"found": medians, "ratios": ratios, "peak_MB_over_imports_by_count": memory}


def encodings_section(scratch: Path, size: str, rounds: int) -> dict[str, Any]:
    """Measure encodings of float32 snapshots: size relative to raw, and restoring relative to a plain read.

    Of times and of the ratios of each round, the quartiles are returned: low, median, high.
    """
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp
    from spread import quartiles

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = jax.device_put(next(iter(checkpoints(size, "float32", 1))), place)
    raw = sum(leaf.nbytes for leaf in leaves.values())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), leaves)
    results = {}
    for ocdbt in (True, False):
        for compressed in (True, False):
            for chunk in (None, 2**24):
                path = scratch / "encoded"
                context = ocp.Context()
                context.array.saving.use_ocdbt = ocdbt
                context.array.saving.use_compression = compressed
                context.array.saving.storage_options.chunk_byte_size = chunk
                saves, loads, plain_reads, engine_reads = [], [], [], []
                for _ in range(rounds):
                    shutil.rmtree(path, ignore_errors=True)
                    saves.append(measure_seconds(lambda c=context, p=path: save_with(c, p, leaves)))
                    plain_reads.append(measure_seconds(lambda p=path: read_bytes(p)))
                    loads.append(measure_seconds(lambda p=path: jax.block_until_ready(ocp.load(str(p), abstract))))
                    engine_reads.append(measure_seconds(lambda p=path: read_by_engine(p)))
                size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                name = (
                    f"{'ocdbt' if ocdbt else 'files'} {'zstd' if compressed else 'raw'} {'16MiB' if chunk else 'whole'}"
                )
                results[name] = {
                    "size / raw": round(size_bytes / raw, 3),
                    "save s": quartiles(saves, 2),
                    "plain read s": quartiles(plain_reads, 3),
                    "orbax load / plain read": quartiles(np.divide(loads, plain_reads), 2),
                    "engine read / plain read": quartiles(np.divide(engine_reads, plain_reads), 2),
                }
                shutil.rmtree(path)
    return results


def save_with(context: Any, path: Path, leaves: Any) -> None:
    """Save `leaves` under an Orbax context."""
    from orbax.checkpoint import v1 as ocp

    with context:
        ocp.save(str(path), leaves)


def read_bytes(path: Path) -> None:
    """Read every byte once, into one reused buffer."""
    buffer = bytearray(2**20)
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass


def read_by_engine(path: Path) -> None:
    """Read every leaf with the engine's reader, in blocks of 1 MiB where the format allows."""
    from pma_jax.storage.formats.open import open_source, read_leaf_bytes

    source = open_source(path)
    for name, leaf in source.leaves.items():
        step = leaf.chunk_elements if name not in source.byte_ranges else 2**18
        for start in range(0, leaf.elements, step):
            read_leaf_bytes(source, name, start, min(start + step, leaf.elements))


def measure_seconds(call: Callable[[], Any]) -> float:
    """Return the wall seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Run the sections, or one method as a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path, help="directory for temporary checkpoints")
    parser.add_argument("--size", choices=SIZES, default="160M")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5, help="runs per method")
    parser.add_argument("--count", type=int, default=10, help="checkpoints per merge")
    parser.add_argument("--sections", default="safetensors,orbax,encodings", help="comma-separated")
    parser.add_argument("--cold", action="store_true", help="read from disk, not from the page cache")
    parser.add_argument("--mergekit", default="", help="Python interpreter of an environment with mergekit")
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("inputs", nargs="*", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        METHODS[options.child](options.inputs, options.out)
        print(peak_resident_mb())
        return
    scratch = options.scratch.absolute() / f"{options.size}-{options.dtype}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        generate(scratch, options.size, options.dtype, options.count)
        results: dict[str, Any] = {"size": options.size, "dtype": options.dtype, "count": options.count}
        for section in options.sections.split(","):
            if section == "encodings":
                results[section] = encodings_section(scratch, options.size, options.rounds)
            else:
                results[section] = (
                    safetensors_section(scratch, options.rounds, options.count, options.cold, options.mergekit)
                    if section == "safetensors"
                    else orbax_section(scratch, options.rounds, options.count, options.cold)
                )
        print(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
