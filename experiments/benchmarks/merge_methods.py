"""The implementations of merging that `merge.py` compares, each run in a process of its own.

A method takes the input checkpoints and the output path. Only the standard library is imported at the top: each method
imports its own packages, and mergekit runs in another environment.
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def floor(inputs: list[Path], out: Path, rows: int = 1) -> None:
    """Read every byte of every input once, in two threads, and write `rows` times the bytes of one input."""
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
    """Merge with this package: the mean, or `rows` weighted sums in one pass."""
    import numpy as np

    from pma_jax.merging.engine.merge import merge
    from pma_jax.merging.engine.plan import plan
    from pma_jax.storage.formats.open import open_source

    count = len(inputs)
    coefficients = np.full((1, count), 1 / count)
    if rows > 1:
        coefficients = np.random.default_rng(0).dirichlet(np.ones(count), rows)
    merge_plan = plan([open_source(path) for path in inputs], coefficients, recipes=["r"] * rows)
    merge(merge_plan, [out / str(row) for row in range(rows)])


def numpy_loop(inputs: list[Path], out: Path) -> None:
    """Merge with a NumPy loop that loads each file completely and adds it in float32."""
    import ml_dtypes  # noqa: F401  (safetensors reads bfloat16 with it)
    import numpy as np
    from safetensors.numpy import load_file, save_file

    first = load_file(inputs[0] / "model.safetensors")
    total = {name: value.astype(np.float32) for name, value in first.items()}
    for path in inputs[1:]:
        for name, value in load_file(path / "model.safetensors").items():
            total[name] += value.astype(np.float32)
    merged = {name: (value / len(inputs)).astype(first[name].dtype) for name, value in total.items()}
    out.mkdir()
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})


def torch_loop(inputs: list[Path], out: Path) -> None:
    """Merge with a torch loop that loads each file completely and adds it in float32."""
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
    """Merge with mergekit's linear method; mergekit's interpreter runs this function."""
    from mergekit.config import MergeConfiguration  # pyrefly: ignore
    from mergekit.merge import MergeOptions, run_merge  # pyrefly: ignore

    models = [{"model": str(path), "parameters": {"weight": 1.0}} for path in inputs]
    config = MergeConfiguration.model_validate({"merge_method": "linear", "models": models, "dtype": "bfloat16"})
    run_merge(config, str(out), MergeOptions(lazy_unpickle=True, low_cpu_memory=True))


def decode(inputs: list[Path], out: Path) -> None:
    """Only decode: read every array of every checkpoint with TensorStore, eight at a time, and discard it."""
    import tensorstore as ts

    pending: list[Any] = []
    for path in inputs:
        for name in json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"].values():
            key = ".".join(part["key"] for part in name["key_metadata"])
            store = {"driver": "ocdbt", "base": f"file://{path}/state/", "path": f"{key}/"}
            pending.append(ts.open({"driver": "zarr3", "kvstore": store}, open=True).result().read())
            if len(pending) == 8:
                pending.pop(0).result()
    for read in pending:
        read.result()


def one_by_one(inputs: list[Path], out: Path) -> None:
    """Merge with Orbax: restore one checkpoint after the other, add it by a jitted, donated sum, and save."""
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
    """Only import the modules that merging these inputs imports."""
    __import__("pma_jax.merging.engine.merge")
    if (inputs[0] / "state").exists():
        __import__("tensorstore")


METHODS: dict[str, Callable[[list[Path], Path], None]] = {
    "floor": floor,
    "floor of 16 recipes": lambda inputs, out: floor(inputs, out, rows=16),
    "imports": imports,
    "ours": ours,
    "ours 16 recipes": lambda inputs, out: ours(inputs, out, rows=16),
    "numpy loop": numpy_loop,
    "torch loop": torch_loop,
    "mergekit": mergekit,
    "decode": decode,
    "one by one": one_by_one,
}
