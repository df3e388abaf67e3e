"""The parts of `gpu.py`, each of which runs in a process of its own. JAX is imported inside functions.

A part is a function of the sizes and the command's arguments that returns its figures as a JSON-serialisable dict.
"""

import argparse
import dataclasses
import functools
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

# Peak rates of dense bfloat16 products, FLOPs per second (data sheets of H100, H200 SXM and A100).
PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}
LEARNING_RATE = 1e-4  # does not affect the speed
LOGITS_CHUNK_TOKENS = 8192  # 2 GB of float32 logits of 65,536 words


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that the parts measure."""

    # Part -> configuration, settings in order of preference, context. A setting is sequences per step, then overrides.
    # Those that do not fit into memory are left out; the first `--settings` that do are measured, and the fastest is
    # reported.
    steps: dict[str, tuple[str, tuple[tuple[Any, ...], ...], int]]
    product: int  # rows and columns of the square matrix product
    stream_elements: int  # per array of STREAM add
    merge_config: str
    merge_models: int  # models per mean
    training: tuple[str, int, int, int]  # configuration, sequences per step, context, steps per snapshot interval
    turns: int  # timings per step time, which is their median
    steps_per_turn: int


# --- Rates ------------------------------------------------------------------------------------------------------------


def rates(sizes: Sizes, _: argparse.Namespace) -> dict[str, Any]:
    """Measure upper bounds: FLOPs per second of a square bfloat16 product, and bytes per second of STREAM add."""
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
    """Return the seconds of c = a + b in float32 into existing memory: 12 bytes per element."""
    import jax
    import jax.numpy as jnp

    a, b = (jnp.full(elements, value, jnp.float32) for value in (1, 2))
    add = jax.jit(lambda c, a, b: a + b, donate_argnums=0, keep_unused=True)
    result = [jnp.zeros(elements)]

    def add_again():
        result.append(add(result.pop(), a, b))
        return result[0]

    return median_seconds(add_again, repeats=5)


def median_seconds(run: Callable[[], Any], repeats: int, turns: int = 7) -> float:
    """Return the median of `time_turns`."""
    return statistics.median(time_turns(run, repeats, turns))


def time_turns(run: Callable[[], Any], repeats: int, turns: int = 7) -> list[float]:
    """Return the seconds per call of each turn, with `repeats` calls per turn, after two warm-up turns."""
    import jax

    timings = []
    for _ in range(turns + 2):
        started = time.perf_counter()
        for _ in range(repeats - 1):
            run()
        jax.block_until_ready(run())
        timings.append((time.perf_counter() - started) / repeats)
    return timings[2:]


# --- A train step -----------------------------------------------------------------------------------------------------


def train_step(sizes: Sizes, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Measure the train step of a part at the first settings that fit into memory, and return the fastest one."""
    import jax

    config_name, settings, length = sizes.steps[name]
    measured, refused = [], []
    for batch, *overrides in settings:
        if len(measured) == args.settings:
            break
        setting = {"sequences": batch, "overrides": " ".join(overrides)}
        try:
            config = make_config(config_name, batch, length, args, *overrides)
            measured.append(setting | measure_step(config, sizes))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            refused.append(setting | {"said": str(error).splitlines()[0][:200]})
        jax.clear_caches()
    if not measured:
        raise RuntimeError(f"no setting fits: {refused}")
    fastest = max(measured, key=lambda result: result["tokens_per_second"])
    keys = ("sequences", "overrides", "step_seconds", "tokens_per_second", "mfu")
    others = [{key: result[key] for key in keys} for result in measured if result is not fastest]
    return fastest | {"others": others, "refused": refused}


def make_config(name: str, batch: int, length: int, args: argparse.Namespace, *overrides: str):
    """Return a shipped configuration with this batch size and context, in bfloat16, for one device."""
    from pma_jax import config as configuration

    raw = configuration.load(name)
    sizes = {"training.batch_size_sequences": batch, "training.sequence_length_tokens": length}
    sizes |= {"evaluation.batch_size_sequences": batch, "evaluation.tokens": batch * length}
    sizes |= {"model.compute_dtype": "bfloat16", "model.logits_chunk_tokens": LOGITS_CHUNK_TOKENS}
    sizes |= {"mesh.cpu_devices": 0}
    configuration.override(raw, [*(f"{key}={value}" for key, value in sizes.items()), *overrides, *args.set])
    return configuration.resolve(raw)


def measure_step(config, sizes: Sizes) -> dict[str, Any]:
    """Measure time, utilisation, costs and memory of the train step; it donates the state, as in the training loop."""
    import jax
    import numpy as np
    from memory_floor import compiled_bytes, floor
    from profile_costs import top_costs

    from pma_jax.planning.aot import program_lowerings
    from pma_jax.planning.cost import forward_flops_per_token, training_flops_per_token
    from pma_jax.runtime.mesh import check_mesh, make_mesh
    from pma_jax.training.state import init_state_from_seed

    mesh, L = make_mesh(config.mesh), config.training.sequence_length_tokens
    check_mesh(config, mesh)
    shape = (config.training.batch_size_sequences, L + 1)
    tokens_BxM = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape).astype(np.int32)
    with jax.set_mesh(mesh):
        started = time.perf_counter()
        step = program_lowerings(config, mesh)["train_step"]().compile()
        compile_seconds = time.perf_counter() - started
        state_and_metrics: list[Any] = [init_state_from_seed(config), None]
        tokens = put_batch(mesh, tokens_BxM)

        def run_step():
            state_and_metrics[:] = step(state_and_metrics[0], tokens, LEARNING_RATE)
            return state_and_metrics[1]["loss"]

        times = time_turns(run_step, repeats=sizes.steps_per_turn, turns=sizes.turns)
        loss = float(run_step())
        if not np.isfinite(loss):
            raise RuntimeError(f"the loss is {loss}, not a finite number")
        costs = top_costs(lambda: jax.block_until_ready(run_step()), 1, step.as_text() or "")
    device, devices, seconds = jax.devices()[0], jax.device_count(), statistics.median(times)
    needed = training_flops_per_token(config.model, L) * config.batch_tokens
    # PaLM's convention counts all L keys for each position, including invisible ones.
    visible_keys = forward_flops_per_token(config.model, L)["attention"]
    all_keys = 4.0 * config.model.layers * config.model.heads * config.model.head_dim * L
    peak = next((rate for name, rate in PEAKS.items() if name in device.device_kind), None)
    peak_bytes = (device.memory_stats() or {}).get("peak_bytes_in_use")
    least = floor(config, devices, keeps_scores=device.platform == "cpu")
    memory = compiled_bytes(step)
    return {
        "step_seconds": seconds,
        "step_seconds_range": [min(times), max(times)],
        "tokens_per_second": config.batch_tokens / seconds,
        "batch_tokens": config.batch_tokens,
        "needed_flops_per_second": needed / seconds / devices,
        "mfu": needed / seconds / devices / peak if peak else None,
        "mfu_of_all_keys": (needed + 3 * (all_keys - visible_keys) * config.batch_tokens) / seconds / devices / peak
        if peak
        else None,
        "compile_seconds": compile_seconds,
        "loss": loss,
        "peak_memory_bytes": peak_bytes,
        "compiled_memory": memory,
        "memory_floor": least,
        "memory_over_floor": (peak_bytes or memory["bytes"]) / least["bytes"],
        "costs": costs,
    }


# --- The experts' product ---------------------------------------------------------------------------------------------


def grouped_product(sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """Measure each implementation of the experts' product with both gradients, at random loads of the experts."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pma_jax.model.kernels import grouped_matmul as grouped

    name, ((batch, *_), *_), length = sizes.steps["moe_2k"]
    model = make_config(name, batch, length, args).model
    E, D, F = model.experts, model.width, model.expert_hidden
    R = batch * length * model.experts_per_token
    rng = np.random.default_rng(0)
    loads_E = rng.multinomial(R, rng.dirichlet(np.full(E, 20.0)))
    loads_E[1], loads_E[0] = 0, loads_E[0] + loads_E[1]  # an expert without a token
    sizes_E = jnp.asarray(loads_E, jnp.int32)
    rows, g = (jax.random.normal(jax.random.key(i), (R, n), jnp.bfloat16) for i, n in ((0, D), (1, F)))
    matrices = jax.random.normal(jax.random.key(2), (E, D, F), jnp.bfloat16) / D**0.5

    def own_kernels(product, outer):  # an implementation of pma_jax, also on platforms that use another one
        return lambda rows, matrices, g: (
            product(rows, matrices, sizes_E),
            product(g, matrices, sizes_E, transposed=True),
            outer(rows, g, sizes_E),
        )

    def with_vjp(product):  # the product with the gradients that JAX derives or that are registered for it
        def products(rows, matrices, g):
            y, vjp = jax.vjp(lambda rows, matrices: product(rows, matrices, sizes_E), rows, matrices)
            return y, *vjp(g)

        return products

    implementations = {
        "ours": with_vjp(functools.partial(grouped.grouped_matmul, has_padding=False)),
        "batch": own_kernels(grouped._product_by_batch, grouped._gradient_by_batch),
        "loop": own_kernels(grouped._product_by_loop, grouped._gradient_by_loop),
        "ragged_dot": with_vjp(jax.lax.ragged_dot),
    }
    results: dict[str, Any] = {"rows": R, "shape": [E, D, F], "largest_load": int(sizes_E.max())}
    reference = None
    for name, products in implementations.items():
        run = jax.jit(products)
        try:
            result = [np.asarray(x[:: -(-len(x) // 64)].astype(jnp.float32)) for x in run(rows, matrices, g)]
            reference = reference or result
            error = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(result, reference, strict=True))
            seconds = median_seconds(lambda run=run: run(rows, matrices, g), repeats=2, turns=3)
            rate = 6.0 * R * D * F / seconds
            results[name] = {"seconds": seconds, "flops_per_second": rate, "difference_from_ours": float(error)}
        except Exception as failure:  # this backend may not support every implementation
            results[name] = {"refused": str(failure).splitlines()[0][:300]}
    return results


# --- Merging ----------------------------------------------------------------------------------------------------------


def merge(sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """Measure `average` of N models on the mesh into an earlier result's memory, relative to STREAM add."""
    import jax
    import jax.numpy as jnp

    from pma_jax.merging.averager import weighted_sum
    from pma_jax.merging.recipes import sma
    from pma_jax.model.decoder import init_params, parameter_count
    from pma_jax.runtime.mesh import make_mesh

    config = make_config(sizes.merge_config, 8, 64, args)
    results: dict[str, Any] = {"models": sizes.merge_models}
    with jax.set_mesh(make_mesh(config.mesh)):
        for dtype in ("float32", "bfloat16"):
            make = jax.jit(lambda key, d=dtype: jax.tree.map(lambda x: x.astype(d), init_params(config.model, key)))
            params_K = [make(jax.random.key(k)) for k in range(sizes.merge_models)]
            mean = [weighted_sum(params_K, sma(sizes.merge_models))]

            def average_again(params_K=params_K, mean=mean):
                mean.append(weighted_sum(params_K, sma(sizes.merge_models), out=mean.pop()))
                return mean[0]

            times = time_turns(average_again, repeats=2)
            seconds = statistics.median(times)
            count = parameter_count(params_K[0])
            total_bytes = (sizes.merge_models + 1) * count * jnp.dtype(dtype).itemsize
            results |= {"parameters": count, f"{dtype}_seconds": seconds}
            results[f"{dtype}_seconds_range"] = [min(times), max(times)]
            results[f"{dtype}_bytes_per_second"] = total_bytes / seconds
            del params_K, mean, average_again
    rate = 12 * sizes.stream_elements / stream_add_seconds(sizes.stream_elements)
    shares = {f"{d}_share_of_stream": results[f"{d}_bytes_per_second"] / rate for d in ("float32", "bfloat16")}
    return results | {"stream_add_bytes_per_second": rate} | shares


# --- The loop ---------------------------------------------------------------------------------------------------------


def training(sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """Measure four intervals of the training loop: without snapshots, with them, and with previews of 2 in addition."""
    import jax

    from pma_jax import config as configuration
    from pma_jax.training.loop import train

    name, batch, length, steps = sizes.training
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")  # all three runs use the same step
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
            config = make_config(name, batch, length, args, *(f"{k}={v}" for k, v in keys.items()), *changes)
            run = train(config, f"{folder}/{kind}")
            seconds_at = {r["tokens"]: r["seconds"] for r in run.metrics if r["kind"] == "train"}
            # Everything is compiled after the second mark. The last interval is not measured: it also saves a state.
            results[f"{kind}_seconds"] = seconds_at[6 * interval] - seconds_at[2 * interval + batch * length]
    measured_steps = 4 * steps - 1
    interval_tokens = configuration.resolve(configuration.load(name)).checkpoint.interval_tokens
    step_seconds = results["plain_seconds"] / measured_steps
    # The record of a mark is written after its snapshot, so four snapshots are between the two records.
    snapshot = (results["snapshots_seconds"] - results["plain_seconds"]) / 4
    preview = (results["previews_seconds"] - results["snapshots_seconds"]) / 4
    interval_seconds = interval_tokens / (batch * length) * step_seconds
    return results | {
        "step_seconds": step_seconds,
        "seconds_per_snapshot": snapshot,
        "seconds_per_preview": preview,
        "interval_tokens": interval_tokens,
        "snapshot_share": snapshot / interval_seconds,
        "preview_share": preview / interval_seconds,
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
