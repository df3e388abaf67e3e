"""What merging costs: whole processes, beside a plain read of the same bytes and beside other ways, all in one run.

    python experiments/benchmarks/merge.py SCRATCH                       the 160M model, bfloat16, 5 rounds: minutes
    python experiments/benchmarks/merge.py SCRATCH --size 560M --dtype float32 --rounds 3
    python experiments/benchmarks/merge.py SCRATCH --mergekit ENV/bin/python    and mergekit, from its own environment
    python experiments/benchmarks/merge.py SCRATCH --cold    the inputs' pages are dropped from memory before each run

Makes its inputs in SCRATCH (about 11 checkpoints, twice: safetensors and Orbax), removes them when it is done, and
prints one JSON object: medians of wall seconds and peak resident MB, and the ratios that the bars are about.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {"tiny": (256, 512, 4, 1024), "160M": (768, 2048, 16, 32000), "560M": (1280, 3456, 24, 32000)}


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a Llama-shaped model: (width, hidden, layers, vocabulary) from `SIZES`."""
    width, hidden, layers, vocabulary = SIZES[size]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        found |= {f"{prefix}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        found |= {f"{prefix}.mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
        found |= {f"{prefix}.mlp.down_proj.weight": (width, hidden), f"{prefix}.input_layernorm.weight": (width,)}
        found[f"{prefix}.post_attention_layernorm.weight"] = (width,)
    return found | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def checkpoints(size: str, dtype: str, count: int) -> Any:
    """Yields `count` checkpoints, name -> array: common weights and a little noise that differs."""
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
    """Writes the checkpoints as safetensors/K and orbax/K (Orbax v1 as it is by default)."""
    from orbax.checkpoint import v1 as ocp
    from safetensors.numpy import save_file

    for number, leaves in enumerate(checkpoints(size, dtype, count)):
        target = folder / "safetensors" / str(number)
        target.mkdir(parents=True)
        save_file(leaves, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(llama(size, dtype)))
        ocp.save(str(folder / "orbax" / str(number)), leaves)


def llama(size: str, dtype: str) -> dict[str, Any]:
    """The config.json that mergekit asks for."""
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


def floor(inputs: list[Path], out: Path, rows: int = 1) -> None:
    """Reads every byte of every input once, two threads, and writes `rows` times as many bytes as one input has."""
    files = [file for path in inputs for file in sorted(path.rglob("*")) if file.is_file()]
    buffers = [bytearray(2**20) for _ in range(2)]

    def read(worker: int) -> None:
        for file in files[worker::2]:
            descriptor = os.open(file, os.O_RDONLY)
            while os.readv(descriptor, [buffers[worker]]):
                pass
            os.close(descriptor)

    workers = [threading.Thread(target=read, args=(worker,)) for worker in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    size = sum(file.stat().st_size for file in inputs[0].rglob("*") if file.is_file())
    with out.open("wb", buffering=0) as target:
        for _ in range(0, rows * size, 2**20):
            target.write(buffers[0])


def ours(inputs: list[Path], out: Path, rows: int = 1) -> None:
    """This package: the mean, or `rows` weighted sums in one pass."""
    import numpy as np

    from pma_jax.merging.engine.merge import merge
    from pma_jax.merging.engine.plan import plan
    from pma_jax.storage.formats.open import open_source

    count = len(inputs)
    coefficients = np.full((1, count), 1 / count)
    if rows > 1:
        coefficients = np.random.default_rng(0).dirichlet(np.ones(count), rows)
    made = plan([open_source(path) for path in inputs], coefficients, recipes=["r"] * rows)
    merge(made, [out / str(row) for row in range(rows)])


def torch_loop(inputs: list[Path], out: Path) -> None:
    """Each file loaded whole, added in float32."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    first = load_file(inputs[0] / "model.safetensors")
    total = {name: value.to(torch.float32) for name, value in first.items()}
    for path in inputs[1:]:
        for name, value in load_file(path / "model.safetensors").items():
            total[name] += value
    merged = {name: (value / len(inputs)).to(first[name].dtype) for name, value in total.items()}
    out.mkdir()
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})


def mergekit(inputs: list[Path], out: Path) -> None:
    """Mergekit's own linear merge (its interpreter runs this function)."""
    from mergekit.config import MergeConfiguration  # pyrefly: ignore
    from mergekit.merge import MergeOptions, run_merge  # pyrefly: ignore

    models = [{"model": str(path), "parameters": {"weight": 1.0}} for path in inputs]
    config = MergeConfiguration.model_validate({"merge_method": "linear", "models": models, "dtype": "bfloat16"})
    run_merge(config, str(out), MergeOptions(lazy_unpickle=True, low_cpu_memory=True))


def decode(inputs: list[Path], out: Path) -> None:
    """Only decodes: every array of every checkpoint through tensorstore, eight in flight, nothing kept."""
    import tensorstore as ts

    flying: list[Any] = []
    for path in inputs:
        for name in json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"].values():
            key = ".".join(part["key"] for part in name["key_metadata"])
            store = {"driver": "ocdbt", "base": f"file://{path}/state/", "path": f"{key}/"}
            flying.append(ts.open({"driver": "zarr3", "kvstore": store}, open=True).result().read())
            if len(flying) == 8:
                flying.pop(0).result()
    for read in flying:
        read.result()


def one_by_one(inputs: list[Path], out: Path) -> None:
    """Orbax restores one checkpoint after the other; a jitted, donated add; Orbax saves."""
    import jax
    import jax.numpy as jnp
    from orbax.checkpoint import v1 as ocp

    add = jax.jit(lambda total, new: jax.tree.map(lambda t, n: t + n.astype(t.dtype), total, new), donate_argnums=0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def restore(path: Path) -> Any:
        stored = ocp.metadata(str(path)).metadata
        return ocp.load(
            str(path), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), stored)
        )

    first = restore(inputs[0])
    total = jax.tree.map(lambda x: x.astype(jnp.float32), first)
    dtypes = jax.tree.map(lambda x: x.dtype, first)
    del first
    for path in inputs[1:]:
        total = add(total, restore(path))
    ocp.save(str(out), jax.tree.map(lambda t, d: (t / len(inputs)).astype(d), total, dtypes))


def imports(inputs: list[Path], out: Path) -> None:
    """Only imports what merging these inputs imports."""
    __import__("pma_jax.merging.engine.merge")
    if (inputs[0] / "state").exists():
        __import__("tensorstore")


METHODS: dict[str, Callable[[list[Path], Path], None]] = {
    "floor": floor,
    "floor of 16 recipes": lambda inputs, out: floor(inputs, out, rows=16),
    "imports": imports,
    "ours": ours,
    "ours 16 recipes": lambda inputs, out: ours(inputs, out, rows=16),
    "torch loop": torch_loop,
    "mergekit": mergekit,
    "decode": decode,
    "one by one": one_by_one,
}


def run(
    method: str, inputs: list[Path], out: Path, python: str = sys.executable, cold: bool = False
) -> dict[str, float]:
    """Wall and CPU seconds of the whole process, and its peak resident MB."""
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
    """Takes the inputs out of the page cache, so that the next read comes from the disk."""
    os.sync()  # a page that is not on the disk yet cannot be dropped
    for file in (file for path in inputs for file in path.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_resident_mb() -> float:
    """Peak resident MB of this process since it began; getrusage would count what its parent had when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(
    methods: list[str], inputs: list[Path], scratch: Path, rounds: int, cold: bool, mergekit_python: str = ""
) -> dict[str, dict[str, float]]:
    """Every method in turn, `rounds` times: medians."""
    found: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            python = mergekit_python if method == "mergekit" else sys.executable
            found[method].append(run(method, inputs, scratch / "out", python, cold))
    return {
        method: {key: round(statistics.median(one[key] for one in all), 2) for key in all[0]}
        for method, all in found.items()
    }


def ratio(found: dict[str, dict[str, float]], method: str, over: str) -> str:
    """Wall seconds of one method over another's, and the same of CPU seconds, which a busy neighbour changes less."""
    wall, cpu = (found[method][key] / found[over][key] for key in ("wall_s", "cpu_s"))
    return f"{wall:.2f} (CPU {cpu:.2f})"


def memory_over_imports(inputs: list[Path], scratch: Path) -> dict[str, int]:
    """Peak resident MB above the imports, for 3 and for 30 checkpoints."""
    base = run("imports", inputs, scratch / "out")["peak_MB"]
    return {str(n): round(run("ours", (inputs * 30)[:n], scratch / "out")["peak_MB"] - base) for n in (3, 30)}


def safetensors_section(scratch: Path, rounds: int, count: int, cold: bool, mergekit_python: str) -> dict[str, Any]:
    """Safetensors -> safetensors, and memory for 3 and 30 checkpoints."""
    inputs = [scratch / "safetensors" / str(number) for number in range(count)]
    methods = ["floor", "ours", "torch loop", *(["mergekit"] if mergekit_python else [])]
    found = measure(methods, inputs, scratch, rounds, cold, mergekit_python)
    found |= measure(["floor of 16 recipes", "ours 16 recipes"], inputs, scratch, 1, cold)
    ratios = {f"{method} / floor": ratio(found, method, "floor") for method in methods[1:]}
    ratios |= {f"{method} / ours": ratio(found, method, "ours") for method in [*methods[2:], "ours 16 recipes"]}
    ratios["ours 16 recipes / floor of 16 recipes"] = ratio(found, "ours 16 recipes", "floor of 16 recipes")
    memory = memory_over_imports(inputs, scratch)
    return {"found": found, "ratios": ratios, "peak_MB_over_imports_by_count": memory}


def orbax_section(scratch: Path, rounds: int, count: int, cold: bool) -> dict[str, Any]:
    """Orbax -> Orbax."""
    inputs = [scratch / "orbax" / str(number) for number in range(count)]
    found = measure(["floor", "decode", "ours", "one by one"], inputs, scratch, rounds, cold)
    ratios = {"ours / decode": ratio(found, "ours", "decode"), "one by one / ours": ratio(found, "one by one", "ours")}
    memory = memory_over_imports(inputs, scratch)
    return {"found": found, "ratios": ratios, "peak_MB_over_imports_by_count": memory}


def encodings_section(scratch: Path, size: str, rounds: int) -> dict[str, Any]:
    """How to store our own snapshots (float32): size over raw, and restoring over a plain read of the same bytes."""
    import jax
    from orbax.checkpoint import v1 as ocp

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = jax.device_put(next(iter(checkpoints(size, "float32", 1))), place)
    raw = sum(leaf.nbytes for leaf in leaves.values())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), leaves)
    found = {}
    for ocdbt in (True, False):
        for compressed in (True, False):
            for chunk in (None, 2**24):
                path = scratch / "encoded"
                context = ocp.Context()
                context.array.saving.use_ocdbt = ocdbt
                context.array.saving.use_compression = compressed
                context.array.saving.storage_options.chunk_byte_size = chunk
                saves, loads, plain, ours_s = [], [], [], []
                for _ in range(rounds):
                    shutil.rmtree(path, ignore_errors=True)
                    saves.append(timed(lambda c=context, p=path: save_with(c, p, leaves)))
                    plain.append(timed(lambda p=path: read_plainly(p)))
                    loads.append(timed(lambda p=path: jax.block_until_ready(ocp.load(str(p), abstract))))
                    ours_s.append(timed(lambda p=path: read_ours(p)))
                size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                read = statistics.median(plain)
                name = (
                    f"{'ocdbt' if ocdbt else 'files'} {'zstd' if compressed else 'raw'} {'16MiB' if chunk else 'whole'}"
                )
                found[name] = {
                    "size / raw": round(size_bytes / raw, 3),
                    "save s": round(statistics.median(saves), 2),
                    "plain read s": round(read, 3),
                    "orbax load / plain read": round(statistics.median(loads) / read, 2),
                    "engine read / plain read": round(statistics.median(ours_s) / read, 2),
                }
                shutil.rmtree(path)
    return found


def save_with(context: Any, path: Path, leaves: Any) -> None:
    """Saves under an Orbax context."""
    from orbax.checkpoint import v1 as ocp

    with context:
        ocp.save(str(path), leaves)


def read_plainly(path: Path) -> None:
    """Every byte once, into one reused buffer."""
    buffer = bytearray(2**20)
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass


def read_ours(path: Path) -> None:
    """Every leaf through the engine's reader, in 1 MiB blocks where it can."""
    from pma_jax.storage.formats.open import open_source, read_leaf_bytes

    source = open_source(path)
    for name, leaf in source.leaves.items():
        step = leaf.chunk_elements if name not in source.byte_ranges else 2**18
        for start in range(0, leaf.elements, step):
            read_leaf_bytes(source, name, start, min(start + step, leaf.elements))


def timed(call: Callable[[], Any]) -> float:
    """Wall seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Runs the sections, or one method as a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--size", choices=SIZES, default="160M")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--sections", default="safetensors,orbax,encodings")
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from the page cache")
    parser.add_argument("--mergekit", default="", help="the python of an environment that has mergekit")
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
