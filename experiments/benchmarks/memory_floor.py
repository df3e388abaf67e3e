"""The least memory that a train step needs, against what XLA's program for it takes.

    python experiments/benchmarks/memory_floor.py                        demo shapes, every remat policy, compiled here
    python experiments/benchmarks/memory_floor.py --configs dense_125m --batch 4

Nothing runs: a program's arguments and temporaries are what the compiler says. Bar: none yet; the ratio is reported.
Legend: B sequences, L positions, S = B L tokens, T layers, D width, N query heads, K key heads, H head dim, F hidden
width of what a token meets, V vocabulary, C positions of a chunk of logits.
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
    """Print a row a configuration and policy, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default="tiny,tiny_moe")
    parser.add_argument("--batch", type=int, help="sequences a step, in place of the configuration's")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in args.configs.split(","):
        raw = configuration.load(name)
        # Unrolled, XLA on CPU sees that a recomputed layer is the first one again, and keeps it: no policy has effect.
        changes = ["mesh.cpu_devices=0", "model.scan_layers=True"]
        changes += [f"training.batch_size_sequences={args.batch}"] if args.batch else []
        configuration.override(raw, [*changes, *args.set])
        for policy in ("none", "full", "dots"):
            raw.model.remat = policy
            found = compiled_and_floor(configuration.resolve(raw))
            if args.json:
                print(json.dumps({"config": name, "remat": policy} | found), flush=True)
                continue
            took, least = (found[kind]["bytes"] / 2**20 for kind in ("compiled", "floor"))
            print(
                f"{name:<10} remat {policy:<5} {took:9.1f} MiB compiled, floor {least:9.1f} MiB, "
                f"{found['ratio']:.2f}x; the step's own {found['step_ratio']:.2f}x",
                flush=True,
            )


def compiled_and_floor(config: Config) -> dict:
    """What the compiled step takes of a device, the floor, and two ratios: of all bytes, and of those beyond the state.

    Which backend compiles is the process's; the floor supposes the attention that it runs.
    """
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        compiled = program_lowerings(config, mesh)["train_step"]().compile()
    took, least = compiled_bytes(compiled), floor(config, len(mesh.devices.flat), jax.default_backend() == "cpu")
    own = took["bytes"] - took["arguments"]
    return {
        "compiled": took,
        "floor": least,
        "ratio": took["bytes"] / least["bytes"],
        "step_ratio": own / (least["bytes"] - least["state"]),
    }


def compiled_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a device while a compiled program runs: arguments, temporaries, and outputs that take no argument's."""
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend says nothing of memory"
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "new_outputs": fresh,
    }
    return parts | {"bytes": sum(parts.values())}


def floor(config: Config, devices: int, keeps_scores: bool) -> dict[str, int]:
    """The least bytes of a device, evenly split: the state, and the fullest moment of a step.

    The step is fullest either when the forward pass is done (what the backward pass needs is kept, a chunk of logits
    and the output projection's gradient are there), or when it ends (all gradients are, as the global norm needs them).
    Kept is only what no cheap element-wise pass makes again: inputs of norms, of attention and of the gate.

    Args:
        config: of the run.
        devices: that share the state, the batch and the activations.
        keeps_scores: whether attention keeps its softmax for the gradient, as XLA's on CPU; flash attention does not.
    """
    model, training = config.model, config.training
    state = abstract_state(config, make_mesh(config.mesh))
    parameters = parameter_count(state.params)
    state_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    L, S = training.sequence_length_tokens, training.batch_size_sequences * training.sequence_length_tokens
    S //= training.accumulation_steps
    width = jnp.dtype(model.compute_dtype).itemsize
    parts = layer_elements(config, keeps_scores)
    stacked = {  # what each layer keeps until its backward pass, elements a token
        "none": sum(parts.values()),
        "full": parts["residual"] / 2,
        "dots": parts["residual"] + parts["attention_inputs"] + parts["gate"] + parts.get("experts", 0),
    }[model.remat]
    # A layer that is computed again has all of its own besides, one layer at a time.
    again = 0 if model.remat == "none" else sum(parts.values())
    activations = width * S * (model.layers * stacked + again + model.width)
    chunk = 4 * min(model.logits_chunk_tokens * devices, S) * model.vocabulary_size
    head = 4 * model.width * model.vocabulary_size
    fullest = max(activations + chunk + head, 4 * parameters)
    numbers = {
        "state": state_bytes,
        "activations": activations,
        "logits_chunk": chunk,
        "head_gradient": head,
        "gradients": 4 * parameters,
        "bytes": state_bytes + 4 * S * (L + 1) // L + fullest,
    }
    return {name: round(value / devices) for name, value in numbers.items()}


def layer_elements(config: Config, keeps_scores: bool) -> dict[str, float]:
    """Numbers a token that one layer must keep for its gradient, by part."""
    c, L = config.model, config.training.sequence_length_tokens
    parts = {
        "residual": 2.0 * c.width,  # the inputs of the two norms
        "attention_inputs": float((c.heads + 2 * c.kv_heads) * c.head_dim),
        "attention": float(c.heads * c.head_dim + c.heads),  # its output, and the log of each softmax's sum
        "gate": 2.0 * c.shared_hidden,  # gate and up
    }
    if keeps_scores:
        seen = sum(-(-L // QUERY_BLOCKS) * (i + 1) for i in range(QUERY_BLOCKS)) / QUERY_BLOCKS
        parts["attention"] += c.heads * min(seen, L)
    if c.experts:  # of each choice: gate, up, and the row that its weight multiplies
        parts["experts"] = float(c.experts_per_token * (2 * c.expert_hidden + c.width) + c.experts)
    return parts


if __name__ == "__main__":
    main()
