"""The parts of `gpu.py`: each makes its figures in a process of its own. JAX is imported where it is used.

A part takes the sizes and the command's arguments, and returns what JSON can hold.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pma_jax.runtime.mesh import put_batch

# What the makers name for dense bfloat16 products, FLOPs a second (data sheets of H100, H200 SXM and A100).
PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}
RATE = 1e-4  # of learning: the speed does not depend on it


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the parts measure: (configuration, sequences a step, context) and numbers of bytes, models and steps."""

    steps: dict[str, tuple[str, tuple[int, ...], int]]  # a smaller batch is tried where one does not fit
    product: int  # rows and columns of the matrix product
    stream_elements: int
    merge_config: str
    merge_models: int
    training: tuple[str, int, int, int]  # configuration, sequences, context, steps an interval
    turns: int
    steps_a_turn: int


# --- Rates ------------------------------------------------------------------------------------------------------------


def rates(sizes: Sizes, _: argparse.Namespace) -> dict[str, Any]:
    """The ceilings: FLOPs a second of a square bfloat16 product of random numbers, bytes a second of STREAM add."""
    import jax
    import jax.numpy as jnp

    n = sizes.product
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    seconds = median_seconds(lambda: product(a, b), repeats=10)
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__},
        "product_flops_per_second": 2 * n**3 / seconds,
        "stream_add_bytes_per_second": 12 * sizes.stream_elements / stream_add_seconds(sizes.stream_elements),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }


def stream_add_seconds(elements: int) -> float:
    """Seconds of c = a + b, float32, into memory that is there: 12 bytes an element."""
    import jax
    import jax.numpy as jnp

    a, b = (jnp.full(elements, value, jnp.float32) for value in (1, 2))
    add = jax.jit(lambda c, a, b: a + b, donate_argnums=0, keep_unused=True)
    held = [jnp.zeros(elements)]

    def again():
        held.append(add(held.pop(), a, b))
        return held[0]

    return median_seconds(again, repeats=5)


def median_seconds(run: Callable[[], Any], repeats: int, turns: int = 7) -> float:
    """Median over turns of the seconds of a call, `repeats` calls a turn; the first two turns warm up."""
    import jax

    taken = []
    for _ in range(turns + 2):
        begin = time.perf_counter()
        for _ in range(repeats - 1):
            run()
        jax.block_until_ready(run())
        taken.append((time.perf_counter() - begin) / repeats)
    return statistics.median(taken[2:])


# --- A train step -----------------------------------------------------------------------------------------------------


def train_step(sizes: Sizes, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The step of `sizes.steps[name]`, at the largest of its batches that fits."""
    import jax

    config_name, batches, length = sizes.steps[name]
    refused = []
    for batch in batches:
        try:
            return measured_step(sized(config_name, batch, length, args), sizes) | {"batches_refused": refused}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            refused.append({"sequences": batch, "said": str(error).splitlines()[0][:200]})
        jax.clear_caches()
    raise RuntimeError(f"no batch fits: {refused}")


def sized(name: str, batch: int, length: int, args: argparse.Namespace, *more: str):
    """A shipped configuration with these sizes, in bfloat16, as one device has it."""
    from pma_jax import config as configuration

    raw = configuration.load(name)
    sizes = {"training.batch_size_sequences": batch, "training.sequence_length_tokens": length}
    sizes |= {"evaluation.batch_size_sequences": batch, "evaluation.tokens": batch * length}
    sizes |= {"model.compute_dtype": "bfloat16", "mesh.cpu_devices": 0}
    configuration.override(raw, [*(f"{key}={value}" for key, value in sizes.items()), *more, *args.set])
    return configuration.resolve(raw)


def measured_step(config, sizes: Sizes) -> dict[str, Any]:
    """Step time, utilisation, costs and memory of the real train step, state donated, steps queued as in training."""
    import jax
    import numpy as np
    from memory_floor import compiled_bytes, floor
    from profile_costs import top_costs

    from pma_jax.planning.aot import program_lowerings
    from pma_jax.planning.cost import forward_flops_per_token, training_flops_per_token
    from pma_jax.runtime.mesh import check_mesh, make_mesh
    from pma_jax.training.state import make_state

    mesh, L = make_mesh(config.mesh), config.training.sequence_length_tokens
    check_mesh(config, mesh)
    shape = (config.training.batch_size_sequences, L + 1)
    tokens_BxM = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape).astype(np.int32)
    with jax.set_mesh(mesh):
        begin = time.perf_counter()
        step = program_lowerings(config, mesh)["train_step"]().compile()
        compile_seconds = time.perf_counter() - begin
        held: list[Any] = [make_state(config), None]
        tokens = put_batch(mesh, tokens_BxM)

        def turn():
            for _ in range(sizes.steps_a_turn):
                held[:] = step(held[0], tokens, RATE)
            return jax.block_until_ready(held[1]["loss"])

        seconds = median_seconds(turn, repeats=1, turns=sizes.turns) / sizes.steps_a_turn
        loss = float(turn())
        if not np.isfinite(loss):
            raise RuntimeError(f"the loss is {loss}")
        costs = top_costs(turn, sizes.steps_a_turn, step.as_text() or "")
    device, devices = jax.devices()[0], jax.device_count()
    needed = training_flops_per_token(config.model, L) * config.batch_tokens
    # PaLM's convention counts all L keys for each position, seen or not.
    seen = forward_flops_per_token(config.model, L)["attention"]
    all_keys = 4.0 * config.model.layers * config.model.heads * config.model.head_dim * L
    peak = next((rate for name, rate in PEAKS.items() if name in device.device_kind), None)
    used = (device.memory_stats() or {}).get("peak_bytes_in_use")
    least = floor(config, devices, keeps_scores=device.platform == "cpu")
    took = compiled_bytes(step)
    return {
        "step_seconds": seconds,
        "tokens_per_second": config.batch_tokens / seconds,
        "batch_tokens": config.batch_tokens,
        "needed_flops_per_second": needed / seconds / devices,
        "mfu": needed / seconds / devices / peak if peak else None,
        "mfu_of_all_keys": (needed + 3 * (all_keys - seen) * config.batch_tokens) / seconds / devices / peak
        if peak
        else None,
        "compile_seconds": compile_seconds,
        "loss": loss,
        "peak_memory_bytes": used,
        "compiled_memory": took,
        "memory_floor": least,
        "memory_over_floor": (used or took["bytes"]) / least["bytes"],
        "costs": costs,
    }


# --- The experts' product ---------------------------------------------------------------------------------------------


def grouped_product(sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and FLOPs a second of the product of experts with both gradients, random loads, one way after another."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pma_jax.model.kernels import grouped_matmul as grouped

    name, batches, length = sizes.steps["moe_2k"]
    model = sized(name, batches[0], length, args).model
    E, D, F = model.experts, model.width, model.expert_hidden
    R = batches[0] * length * model.experts_per_token
    rng = np.random.default_rng(0)
    sizes_E = jnp.asarray(rng.multinomial(R, rng.dirichlet(np.full(E, 20.0))), jnp.int32)
    rows, g = (jax.random.normal(jax.random.key(i), (R, n), jnp.bfloat16) for i, n in ((0, D), (1, F)))
    matrices = jax.random.normal(jax.random.key(2), (E, D, F), jnp.bfloat16) / D**0.5

    def by(product, outer):  # one of our ways, whatever the platform's own
        return lambda rows, matrices, g: (
            product(rows, matrices, sizes_E),
            product(g, matrices, sizes_E, transposed=True),
            outer(rows, g, sizes_E),
        )

    def derived(product):  # with the gradients that JAX has for it
        def three(rows, matrices, g):
            y, back = jax.vjp(lambda rows, matrices: product(rows, matrices, sizes_E), rows, matrices)
            return y, *back(g)

        return three

    ways = {
        "ours": derived(grouped.grouped_matmul),
        "batch": by(grouped._product_by_batch, grouped._outer_by_batch),
        "loop": by(grouped._product_by_blocks, grouped._outer_by_blocks),
        "ragged_dot": derived(jax.lax.ragged_dot),
    }
    found: dict[str, Any] = {"rows": R, "shape": [E, D, F], "largest_load": int(sizes_E.max())}
    reference = None
    for way, three in ways.items():
        run = jax.jit(three)
        try:
            result = [np.asarray(x[:64].astype(jnp.float32)) for x in run(rows, matrices, g)]
            reference = reference or result
            error = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(result, reference, strict=True))
            seconds = median_seconds(lambda run=run: run(rows, matrices, g), repeats=2, turns=3)
            rate = 6.0 * R * D * F / seconds
            found[way] = {"seconds": seconds, "flops_per_second": rate, "difference_from_ours": float(error)}
        except Exception as refusal:  # a way that this backend has not is a result too
            found[way] = {"refused": str(refusal).splitlines()[0][:300]}
    return found


# --- Merging ----------------------------------------------------------------------------------------------------------


def merge(sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """`average` of N models on the mesh into an earlier result's memory, against STREAM add in the same process."""
    import jax
    import jax.numpy as jnp

    from pma_jax.merging.averager import average
    from pma_jax.merging.recipes import sma
    from pma_jax.model.decoder import init_params, parameter_count
    from pma_jax.runtime.mesh import make_mesh

    config = sized(sizes.merge_config, 8, 64, args)
    found: dict[str, Any] = {"models": sizes.merge_models}
    with jax.set_mesh(make_mesh(config.mesh)):
        for dtype in ("float32", "bfloat16"):
            make = jax.jit(lambda key, d=dtype: jax.tree.map(lambda x: x.astype(d), init_params(config.model, key)))
            params_K = [make(jax.random.key(k)) for k in range(sizes.merge_models)]
            held = [average(params_K, sma(sizes.merge_models))]

            def again(params_K=params_K, held=held):
                held.append(average(params_K, sma(sizes.merge_models), out=held.pop()))
                return held[0]

            seconds = median_seconds(again, repeats=2)
            count = parameter_count(params_K[0])
            touched = (sizes.merge_models + 1) * count * jnp.dtype(dtype).itemsize
            found |= {"parameters": count, f"{dtype}_seconds": seconds}
            found[f"{dtype}_bytes_per_second"] = touched / seconds
            del params_K, held, again
    rate = 12 * sizes.stream_elements / stream_add_seconds(sizes.stream_elements)
    shares = {f"{d}_share_of_stream": found[f"{d}_bytes_per_second"] / rate for d in ("float32", "bfloat16")}
    return found | {"stream_add_bytes_per_second": rate} | shares


# --- The loop ---------------------------------------------------------------------------------------------------------


def training(sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """The real loop without snapshots, with them, and with previews of 2 besides; seconds of four whole intervals."""
    import jax

    from pma_jax import config as configuration
    from pma_jax.training.loop import train

    name, batch, length, steps = sizes.training
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")  # the step is the same in all three
        words = [f"{a}{b}" for a in ("mer", "ges", "ta", "ko") for b in ("na", "lo", "ri", "u")]
        rng = random.Random(0)
        lines = (" ".join(rng.choices(words, k=40)) for _ in range(5000))
        Path(folder, "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        interval = steps * batch * length
        for kind, changes in {
            "plain": (f"checkpoint.interval_tokens={10**15}", "preview.windows="),
            "snapshots": (f"checkpoint.interval_tokens={interval}", "preview.windows="),
            "previews": (f"checkpoint.interval_tokens={interval}", "preview.windows=2", "preview.start_tokens=0"),
        }.items():
            keys = {
                "data.source": "files",
                "data.files": f"{folder}/*.jsonl",
                "data.held_out_percent": 5,
                "data.cache_dir": f"{folder}/cache",
                "training.total_tokens": 7 * interval,
                "training.log_interval_tokens": batch * length,
                "checkpoint.kinds": "point",
                "checkpoint.window": 2,
                "checkpoint.keep_windows": 1,
                "checkpoint.archive_interval_tokens": 0,
                "checkpoint.state_interval_tokens": 10**15,
                "checkpoint.keep_states_at_tokens": "",
                "schedule.warmup_tokens": interval,
            }
            config = sized(name, batch, length, args, *(f"{k}={v}" for k, v in keys.items()), *changes)
            run = train(config, f"{folder}/{kind}")
            at = {r["tokens"]: r["seconds"] for r in run.metrics if r["kind"] == "train"}
            # From the step after the second mark, all is compiled; the horizon also saves a state, and is left out.
            found[f"{kind}_seconds"] = at[6 * interval] - at[2 * interval + batch * length]
    counted = 4 * steps - 1
    printed = configuration.resolve(configuration.load(name)).checkpoint.interval_tokens
    step_seconds = found["plain_seconds"] / counted
    # A mark's record is written after its snapshot is made: four fall between the two records that are compared.
    snapshot = (found["snapshots_seconds"] - found["plain_seconds"]) / 4
    preview = (found["previews_seconds"] - found["snapshots_seconds"]) / 4
    apart = printed / (batch * length) * step_seconds
    return found | {
        "step_seconds": step_seconds,
        "seconds_per_snapshot": snapshot,
        "seconds_per_preview": preview,
        "interval_tokens": printed,
        "snapshot_share": snapshot / apart,
        "preview_share": preview / apart,
    }


PARTS: dict[str, Callable[[Sizes, argparse.Namespace], dict[str, Any]]] = {
    "rates": rates,
    "dense_2k": lambda sizes, args: train_step(sizes, args, "dense_2k"),
    "dense_8k": lambda sizes, args: train_step(sizes, args, "dense_8k"),
    "moe_2k": lambda sizes, args: train_step(sizes, args, "moe_2k"),
    "grouped_product": grouped_product,
    "merge": merge,
    "training": training,
}
