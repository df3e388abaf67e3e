"""Training throughput on CPU against PyTorch and transformers: `python experiments/benchmarks/train.py`.

A complete optimizer step (forward, backward, clipping, AdamW with decay on matrices, update) of the same decoder in
float32, on the same tokens, with two threads each:
  pma_jax                    `make_train_step` with one device per core (`mesh.cpu_devices=2`), as `pma train` runs it
  torch                      a plain decoder (nn.Linear, F.scaled_dot_product_attention); dense only
  transformers               LlamaForCausalLM, or Qwen3MoeForCausalLM with its grouped product of experts
  transformers, loop         Qwen3MoeForCausalLM with its loop over experts
  …, compiled                the same under torch.compile
With --forward, the loss of each token is computed without gradients instead, as in an evaluation (pma_jax:
`evaluation_step`; PyTorch: `eval()` and `torch.inference_mode()`).
All PyTorch contenders use AdamW(fused=True) and clip_grad_norm_. Each contender is a process of its own; they alternate
after a few steps, so that other load on the machine affects all of them. Steps follow each other as in the training
loop: metrics are fetched one step late, and a turn ends when everything is computed. At the start, the contenders
compute the loss of the same weights on the same tokens, and these losses must agree to 1e-4.
The script prints the median step of all turns in milliseconds, the quartiles, tokens per second, the ratio to the
fastest peer, CPU milliseconds per step (all threads), and the floor: the FLOPs that training needs
(`planning.cost.training_flops_per_token`; a third of them with --forward) at the rate of this machine's matrix products
(by JAX, at the MLP's sizes).
Bar: pma_jax 1.2x as fast as the fastest peer, 1.0x for mixtures. Requires `pip install -e '.[torch]'`, and a C++
compiler for torch.compile.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from pma_jax.config import Config, MeshConfig, ModelConfig, TrainingConfig
from pma_jax.planning.cost import training_flops_per_token
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.mesh import put_batch

QWEN3_MOE = {"scan_layers": False, "qk_norm": True, "router_bias": False}  # keys that match Qwen3-MoE

SHAPES = {  # name -> model, sequences per step; unrolled like the demo, because there are few blocks
    "default": (ModelConfig(scan_layers=False), 16),
    "demo": (ModelConfig(width=96, layers=3, heads=3, kv_heads=3, hidden=256, scan_layers=False), 16),
    "small": (ModelConfig(width=64, layers=3, head_dim=16, hidden=192, scan_layers=False), 32),
    "wide": (
        ModelConfig(8192, width=384, layers=4, heads=6, kv_heads=6, head_dim=64, hidden=1024, scan_layers=False),
        8,
    ),
    "moe": (  # tiny_moe's shape
        ModelConfig(width=96, layers=3, heads=3, kv_heads=3, experts=8, experts_per_token=2, **QWEN3_MOE),
        16,
    ),
    "moe_wide": (
        ModelConfig(width=256, heads=8, kv_heads=2, experts=32, experts_per_token=4, expert_hidden=256, **QWEN3_MOE),
        16,
    ),
}
DENSE = ("pma_jax", "torch", "torch, compiled", "transformers", "transformers, compiled")
MIXTURE = ("pma_jax", "transformers", "transformers, loop", "transformers, compiled")
LENGTH = 128  # tokens per sequence
LEARNING_RATE = 1e-3


def main():
    """Print a table or JSON lines; fail if the contenders do not compute the same loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of " + ", ".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=7, help="turns per contender")
    parser.add_argument("--steps", type=int, default=6, help="steps per turn")
    parser.add_argument("--forward", action="store_true", help="compute losses without gradients")
    parser.add_argument("--threads", type=int, default=2, help="cores per contender")
    parser.add_argument(
        "--axis", default="data", choices=("data", "fsdp", "expert"), help="mesh axis of pma_jax's cores"
    )
    parser.add_argument("--system-malloc", action="store_true", help="use glibc's malloc with its defaults")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="model keys, such as remat=dots")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        contender, shape = args.work
        run_contender(contender, shape, args)
        return
    if not args.json:
        print(f"{'shape':<8} {'contender':<22} {'ms/step':>8} {'quartiles':>15}{'tokens/s':>10} {'ratio':>6} CPU ms")
    for shape in args.shapes.split(","):
        for row in measure(shape, args):
            print(json.dumps(row) if args.json else format_row(row), flush=True)


def format_row(row):
    """Format one line of the table."""
    quartiles = "" if row["quartiles"] is None else "{:.1f} to {:.1f}".format(*row["quartiles"])
    return (
        f"{row['shape']:<8} {row['contender']:<22} {row['ms']:8.1f} {quartiles:>15} {row['tokens_per_second']:9.0f} "
        f"{row['ratio']:5.2f}x {row['cpu_ms']:7.1f}"
    )


def measure(shape, args):
    """Yield one row per contender, and the floor's row."""
    model, sequences = SHAPES[shape]
    tokens = sequences * LENGTH
    workers = {name: start_worker(name, shape, args) for name in (MIXTURE if model.experts else DENSE)}
    reports = {name: read_answer(worker) for name, worker in workers.items()}
    losses = {name: report["loss"] for name, report in reports.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"error: the contenders compute different losses: {losses}")
    timings = {name: [] for name in workers}
    for _ in range(args.rounds):
        for name, worker in workers.items():
            print(args.steps, file=worker.stdin, flush=True)
            timings[name].append(read_answer(worker))
    for worker in workers.values():
        worker.communicate()
    seconds = {name: statistics.median(wall for wall, _ in turns) for name, turns in timings.items()}
    fastest_peer = min(step for name, step in seconds.items() if name != "pma_jax")
    flops_per_token = training_flops_per_token(model, LENGTH) / (3 if args.forward else 1)
    seconds["floor"] = flops_per_token * tokens / reports["pma_jax"]["flops_per_second"]
    for name, step in seconds.items():
        cpu = statistics.median(cpu for _, cpu in timings[name]) if name in timings else float("nan")
        quartiles = (
            [1e3 * x for x in np.quantile([wall for wall, _ in timings[name]], (0.25, 0.75))]
            if name in timings
            else None
        )
        row = {"shape": shape, "contender": name, "ms": step * 1e3, "tokens_per_second": tokens / step}
        yield row | {"quartiles": quartiles, "ratio": fastest_peer / step, "cpu_ms": cpu * 1e3}


def start_worker(name, shape, args):
    """Start a contender's process."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": str(args.threads),
    }
    command = [sys.executable, __file__, "--work", name, shape, "--threads", str(args.threads), "--axis", args.axis]
    command += ["--set", *args.set]
    command += ["--forward"] * args.forward + ["--system-malloc"] * args.system_malloc
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_answer(worker):
    """Read a worker's next line of JSON."""
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("error: a contender ended early: see its message above")
    return json.loads(line)


def run_contender(name, shape, args):
    """Run one contender: print the loss of the shared weights, then time the number of steps in each line of stdin."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])
    # For all contenders: `pma train` does it, and torch allocates as much.
    if not args.system_malloc:
        keep_freed_memory()
    model, batch = SHAPES[shape]
    keys = dict(pair.split("=") for pair in args.set)
    typed = {
        k: v == "True" if isinstance(getattr(model, k), bool) else type(getattr(model, k))(v) for k, v in keys.items()
    }
    model = dataclasses.replace(model, **typed)
    tokens_BxM = np.random.default_rng(0).integers(0, model.vocabulary_size, (batch, LENGTH + 1)).astype(np.int32)
    build = functools.partial(jax_step, axis=args.axis) if name == "pma_jax" else torch_step
    step, finish, report = build(name, model, shared_weights(model), tokens_BxM, args.forward)
    for _ in range(3):
        step()
    finish()
    print(json.dumps(report), flush=True)
    for line in sys.stdin:
        steps, wall, cpu = int(line), time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        finish()
        print(json.dumps([(time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps]), flush=True)


def shared_weights(model):
    """Return leaf name -> float32 array in pma_jax's layout, made by NumPy so that all contenders have the same."""
    rng = np.random.default_rng(1)
    T, V, D, N, K, H, F, E = (
        getattr(model, key)
        for key in ("layers", "vocabulary_size", "width", "heads", "kv_heads", "head_dim", "hidden", "experts")
    )
    normal = lambda *shape: (rng.standard_normal(shape) * D**-0.5).astype(np.float32)  # noqa: E731
    blocks = {
        "query_DxNxH": normal(T, D, N, H),
        "key_DxKxH": normal(T, D, K, H),
        "value_DxKxH": normal(T, D, K, H),
        "output_NxHxD": normal(T, N, H, D),
    }
    blocks |= {name: np.ones((T, D), np.float32) for name in ("attention_norm_D", "mlp_norm_D")}
    if model.qk_norm:
        blocks |= {name: np.ones((T, H), np.float32) for name in ("query_norm_H", "key_norm_H")}
    if E:
        F = model.expert_hidden
        blocks["moe"] = {
            "router_DxE": normal(T, D, E),
            "expert_gate_ExDxF": normal(T, E, D, F),
            "expert_up_ExDxF": normal(T, E, D, F),
            "expert_down_ExFxD": normal(T, E, F, D),
        }
    else:
        blocks |= {"gate_DxF": normal(T, D, F), "up_DxF": normal(T, D, F), "down_FxD": normal(T, F, D)}
    ends = {"embedding_VxD": normal(V, D), "unembedding_DxV": normal(D, V), "final_norm_D": np.ones(D, np.float32)}
    return ends | {"blocks": blocks}


def jax_step(_name, model, weights, tokens_BxM, is_forward, axis="data"):
    """Return pma_jax's step as the training loop calls it, a function that waits for it, and the report.

    With `is_forward`, the step is that of an evaluation.
    """
    import jax

    from pma_jax.model.decoder import graph_definition
    from pma_jax.model.loss import MAX_BATCHES_IN_FLIGHT, evaluate, evaluation_step
    from pma_jax.runtime.mesh import make_mesh
    from pma_jax.training.state import init_state_from_seed
    from pma_jax.training.step import make_train_step

    config = Config(
        model=model,
        training=TrainingConfig(batch_size_sequences=len(tokens_BxM)),
        mesh=MeshConfig(**{"data": 1, axis: -1}, cpu_devices=len(os.sched_getaffinity(0))),
    )
    mesh = make_mesh(config.mesh)
    jax.set_mesh(mesh)
    graph, state = graph_definition(model), init_state_from_seed(config)
    params = jax.tree.map(lambda leaf, value: jax.device_put(value, leaf.sharding), state.params, weights)
    tokens_BxM = put_batch(mesh, tokens_BxM)
    report = {
        "loss": float(evaluate(graph, params, [tokens_BxM]).mean(dtype=np.float64)),
        "flops_per_second": matrix_product_rate(
            tokens_BxM.size // (LENGTH + 1) * LENGTH,
            model.width,
            model.expert_hidden if model.experts else model.hidden,
            axis,
        ),
    }
    if is_forward:
        losses: list = []

        def score():
            losses.append(evaluation_step(graph, params, tokens_BxM))
            jax.block_until_ready(losses[:-MAX_BATCHES_IN_FLIGHT])  # as `evaluate` waits
            losses[:-MAX_BATCHES_IN_FLIGHT] = []

        return score, lambda: jax.block_until_ready(losses), report
    train_step = make_train_step(config, graph)
    state_and_metrics: list = [dataclasses.replace(state, params=params), None]

    def step():
        previous_metrics = state_and_metrics[1]
        state_and_metrics[:] = train_step(state_and_metrics[0], tokens_BxM, LEARNING_RATE)
        jax.block_until_ready(previous_metrics)  # the loop also fetches metrics one step late

    return step, lambda: jax.block_until_ready(state_and_metrics), report


def matrix_product_rate(rows, inner, columns, axis):
    """Return the FLOPs per second of the MLP's product with its rows split over all devices: the best of twenty."""
    import jax
    import jax.numpy as jnp
    from jax import P

    a, b = jnp.ones((rows, inner), out_sharding=P(axis)), jnp.ones((inner, columns))
    product = jax.jit(jnp.matmul)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        jax.block_until_ready(product(a, b))
        seconds.append(time.perf_counter() - started)
    return 2 * rows * inner * columns / min(seconds)


def torch_step(name, model, weights, tokens_BxM, is_forward):
    """Return the step of a PyTorch contender, a function that waits for it, and the report.

    With `is_forward`, the step computes the loss of each token without gradients.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from torch_models import own_decoder, transformers_decoder

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if name.startswith("transformers"):
        loop = "loop" in name
        decoder = transformers_decoder(model, weights, LENGTH, "eager" if loop else "grouped_mm")
    else:
        decoder = own_decoder(model, weights, LENGTH)
    decoder.train(not is_forward)
    matrices = [p for p in decoder.parameters() if p.ndim > 1]
    scales = [p for p in decoder.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)
    tokens = torch.from_numpy(tokens_BxM).long()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)

    def loss_of(inputs, targets):
        return cross_entropy(decoder(inputs).flatten(0, 1), targets, reduction="none" if is_forward else "mean")

    report = {"loss": loss_of(inputs, targets).mean().item()}
    if name.endswith("compiled"):
        loss_of = torch.compile(loss_of)
    if is_forward:
        return torch.inference_mode()(lambda: loss_of(inputs, targets)), lambda: None, report

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_of(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()

    return step, lambda: None, report


if __name__ == "__main__":
    main()
