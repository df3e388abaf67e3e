"""Memory of a compiled train step, relative to the minimum that the step needs.

    python experiments/benchmarks/memory_floor.py                        demo shapes, every remat policy
    python experiments/benchmarks/memory_floor.py --configs dense_125m --batch 4

The step is compiled on this machine and not run: the compiler reports its arguments and temporaries. No bar; the ratio
is reported.
Legend: L positions per sequence, S tokens per microbatch.
"""

import argparse
import json
import math

import jax
import jax.numpy as jnp

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.model.attention import QUERY_BLOCKS
from pma_jax.model.decoder import parameter_count
from pma_jax.planning.aot import program_lowerings
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.state import abstract_state


def main() -> None:
    """Print one row per configuration and policy, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default="tiny,tiny_moe", help="names of configurations, comma-separated")
    parser.add_argument("--batch", type=int, help="sequences per step, instead of the configuration's")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="overrides of every configuration"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    for name in args.configs.split(","):
        raw = configuration.load(name)
        # Unrolled, XLA on CPU merges a recomputed layer with its first computation, and no policy has an effect.
        changes = ["mesh.cpu_devices=0", "model.scan_layers=True"]
        changes += [f"training.batch_size_sequences={args.batch}"] if args.batch else []
        configuration.override(raw, [*changes, *args.set])
        for policy in ("none", "full", "dots"):
            raw.model.remat = policy
            result = measure(configuration.resolve(raw))
            if args.json:
                print(json.dumps({"config": name, "remat": policy} | result), flush=True)
                continue
            compiled, least = (result[kind]["bytes"] / 2**20 for kind in ("compiled", "floor"))
            print(
                f"{name:<10} remat {policy:<5} {compiled:9.1f} MiB compiled, floor {least:9.1f} MiB, "
                f"{result['ratio']:.2f}x; without the state {result['step_ratio']:.2f}x",
                flush=True,
            )


def measure(config: Config) -> dict:
    """Return the memory of the compiled step per device, the floor, and their ratios with and without the state.

    The process's default backend compiles the step; the floor assumes the attention of that backend.
    """
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        compiled = program_lowerings(config, mesh)["train_step"]().compile()
    memory, least = compiled_bytes(compiled), floor(config, len(mesh.devices.flat), jax.default_backend() == "cpu")
    without_state = memory["bytes"] - memory["arguments"]
    return {
        "compiled": memory,
        "floor": least,
        "ratio": memory["bytes"] / least["bytes"],
        "step_ratio": without_state / (least["bytes"] - least["state"]),
    }


def compiled_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return the bytes per device of a compiled program: arguments, temporaries, and outputs not in donated memory."""
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not report memory"
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "new_outputs": new_outputs,
    }
    return parts | {"bytes": sum(parts.values())}


def floor(config: Config, devices: int, keeps_scores: bool) -> dict[str, int]:
    """Return the minimum bytes per device: the state, plus the peak of a step.

    The peak is either at the end of the forward pass (activations for the backward pass, a chunk of logits and the
    gradient of the output projection), or at the end of the step (all gradients, because the global norm needs them).
    Activations count only if no cheap element-wise pass recomputes them: inputs of norms, of attention and of the gate.

    Args:
        config: Configuration of the run.
        devices: Number of devices that share the state, the batch and the activations evenly.
        keeps_scores: Whether attention keeps its softmax for the gradient, as XLA on CPU does; flash attention does
            not.
    """
    model, training = config.model, config.training
    state = abstract_state(config, make_mesh(config.mesh))
    parameters = parameter_count(state.params)
    state_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    L, S = training.sequence_length_tokens, training.batch_size_sequences * training.sequence_length_tokens
    S //= training.accumulation_steps
    width = jnp.dtype(model.compute_dtype).itemsize
    parts = layer_elements(config, keeps_scores)
    stacked = {  # elements per token that each layer keeps until its backward pass
        "none": sum(parts.values()),
        "full": parts["residual"] / 2,
        "dots": parts["residual"] + parts["attention_inputs"] + parts["gate"] + parts.get("experts", 0),
    }[model.remat]
    # While a layer is recomputed, one at a time, all of its elements are live.
    recomputed = 0 if model.remat == "none" else sum(parts.values())
    activations = width * S * (model.layers * stacked + recomputed + model.width)
    chunk = 4 * min(model.logits_chunk_tokens * devices, S) * model.vocabulary_size
    head = 4 * model.width * model.vocabulary_size
    peak = max(activations + chunk + head, 4 * parameters)
    numbers = {
        "state": state_bytes,
        "activations": activations,
        "logits_chunk": chunk,
        "head_gradient": head,
        "gradients": 4 * parameters,
        "bytes": state_bytes + 4 * S * (L + 1) // L + peak,
    }
    return {name: round(value / devices) for name, value in numbers.items()}


def layer_elements(config: Config, keeps_scores: bool) -> dict[str, float]:
    """Return the elements per token that one layer must keep for its gradient, by part."""
    c, L = config.model, config.training.sequence_length_tokens
    parts = {
        "residual": 2.0 * c.width,  # the inputs of the two norms
        "attention_inputs": float((c.heads + 2 * c.kv_heads) * c.head_dim),
        "attention": float(c.heads * c.head_dim + c.heads),  # its output, and the log of each softmax's sum
        "gate": 2.0 * c.unrouted_hidden,  # gate and up
    }
    if keeps_scores:
        visible = sum(-(-L // QUERY_BLOCKS) * (i + 1) for i in range(QUERY_BLOCKS)) / QUERY_BLOCKS
        parts["attention"] += c.heads * min(visible, L)
    if c.experts:  # per chosen expert: gate, up, and the row that its weight multiplies
        parts["experts"] = float(c.experts_per_token * (2 * c.expert_hidden + c.width) + c.experts)
    return parts


if __name__ == "__main__":
    main()
