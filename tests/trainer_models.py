"""Small random trees of MaxText and levanter, and their Hugging Face tensors by the trainers' rules, in float64."""

import json
from pathlib import Path

import hf_models
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.array_serialization import serialization

from pma_jax.config import ModelConfig


def write_config(path: Path, made: ModelConfig, **fields) -> Path:
    """Write the config.json of a model; `fields` change it, and None removes one."""
    hf_models.write_hf_tensors(path.parent / f"{path.name}-model", made, {}, **({"hidden_act": "silu"} | fields))
    (path.parent / f"{path.name}-model" / "config.json").rename(path)
    return path


def sizes(made: ModelConfig) -> dict[str, int]:
    """Return the sizes of the dims of a model by letter."""
    return {"D": made.width, "N": made.heads, "K": made.kv_heads, "H": made.head_dim, "V": made.vocabulary_size} | {
        "F": made.expert_hidden if made.experts else made.hidden,
        "E": made.experts,
        "G": made.heads // made.kv_heads,
    }


def block_dims(made: ModelConfig, attention: dict[str, str], dense: dict[str, str], mixture: dict[str, str]):
    """Return path -> dims of the arrays of one layer."""
    kept = {
        path: dims for path, dims in attention.items() if made.qk_norm or "_norm/" not in path.replace("layer_norm", "")
    }
    return kept | (mixture if made.experts else dense)


MAXTEXT_ATTENTION = {
    "pre_self_attention_layer_norm/scale": "D",
    "self_attention/query/kernel": "DNH",
    "self_attention/key/kernel": "DKH",
    "self_attention/value/kernel": "DKH",
    "self_attention/out/kernel": "NHD",
    "self_attention/query_norm/scale": "H",
    "self_attention/key_norm/scale": "H",
    "post_self_attention_layer_norm/scale": "D",
}
MAXTEXT_DENSE = {"mlp/wi_0/kernel": "DF", "mlp/wi_1/kernel": "DF", "mlp/wo/kernel": "FD"}
MAXTEXT_MIXTURE = {
    "moe_block/gate/kernel": "DE",
    "moe_block/wi_0": "EDF",
    "moe_block/wi_1": "EDF",
    "moe_block/wo": "EFD",
}


def maxtext_layers(made: ModelConfig, seed: int = 0, dtype: str = "float32"):
    """Return random arrays of a model: those outside of layers, and those of each layer, by path."""
    rng, size = np.random.default_rng(seed), sizes(made)

    def random(dims: str) -> np.ndarray:
        return (rng.standard_normal([size[dim] for dim in dims]) / 4 + 0.5 * (len(dims) == 1)).astype(dtype)

    top = {"token_embedder/embedding": random("VD"), "decoder/decoder_norm/scale": random("D")}
    if not made.tie_embeddings:
        top["decoder/logits_dense/kernel"] = random("DV")
    dims = block_dims(made, MAXTEXT_ATTENTION, MAXTEXT_DENSE, MAXTEXT_MIXTURE)
    return top, [{path: random(text) for path, text in dims.items()} for _ in range(made.layers)]


def nested(leaves: dict[str, np.ndarray]) -> dict:
    """Return the tree of leaves by path."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *folders, last = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return tree


def maxtext_tree(top, layers, form: str) -> dict:
    """Return the tree as MaxText holds it: `form` is scanned, unscanned, or nnx (lists of layers, and `value`)."""
    leaves = dict(top)
    if form == "scanned":
        leaves |= {f"decoder/layers/{path}": np.stack([layer[path] for layer in layers], axis=1) for path in layers[0]}
    for number, layer in enumerate(layers if form != "scanned" else ()):
        start = f"decoder/layers/{number}" if form == "nnx" else f"decoder/layers_{number}"
        leaves |= {f"{start}/{path}": values for path, values in layer.items()}
    if form == "nnx":
        return {"params": nested({f"{path}/value": values for path, values in leaves.items()})}
    return {"params": {"params": nested(leaves)}}


def save_maxtext(path: Path, tree: dict, step: int = 100) -> Path:
    """Save as MaxText does, with an optimizer's state beside the parameters; return the folder of the checkpoints."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.CheckpointManager(path, item_names=("items",), item_handlers={"items": handler}) as manager:
        state = tree | {"step": np.int32(step), "opt_state": {"mu": tree["params"]}}
        manager.save(step, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    return path


def maxtext_expected(made: ModelConfig, top, layers, rope_type: str, normalize: bool = False) -> dict[str, np.ndarray]:
    """Return the Hugging Face tensors of a model of MaxText in float64, by loops over heads and rotary pairs."""
    H = made.head_dim
    # Rotary pair i is (2i, 2i + 1) in MaxText's llama3.1 layout, and (i, i + H/2) in that of Hugging Face.
    place = {h: (h // 2 + (h % 2) * H // 2) if rope_type == "llama3.1" else h for h in range(H)}

    def heads(kernel: np.ndarray, rotated: bool, scale: float = 1.0) -> np.ndarray:
        rows = np.zeros((kernel.shape[1] * H, made.width))
        for head in range(kernel.shape[1]):
            for h in range(H):
                rows[head * H + (place[h] if rotated else h)] = kernel[:, head, h].astype(np.float64) * scale
        return rows

    def rotary_scale(scale: np.ndarray) -> np.ndarray:
        result = np.zeros(H)
        for h in range(H):
            result[place[h]] = scale[h]
        return result

    expected = {"model.embed_tokens.weight": top["token_embedder/embedding"].astype(np.float64)}
    expected["model.norm.weight"] = top["decoder/decoder_norm/scale"] / (made.width**0.5 if normalize else 1)
    if not made.tie_embeddings:
        expected["lm_head.weight"] = top["decoder/logits_dense/kernel"].T
    for number, layer in enumerate(layers):
        start = f"model.layers.{number}"
        expected |= {
            f"{start}.input_layernorm.weight": layer["pre_self_attention_layer_norm/scale"],
            f"{start}.post_attention_layernorm.weight": layer["post_self_attention_layer_norm/scale"],
            f"{start}.self_attn.q_proj.weight": heads(
                layer["self_attention/query/kernel"], True, 1 if made.qk_norm else H**0.5
            ),
            f"{start}.self_attn.k_proj.weight": heads(layer["self_attention/key/kernel"], True),
            f"{start}.self_attn.v_proj.weight": heads(layer["self_attention/value/kernel"], False),
            f"{start}.self_attn.o_proj.weight": np.concatenate([*layer["self_attention/out/kernel"]]).T,
        }
        if made.qk_norm:
            expected[f"{start}.self_attn.q_norm.weight"] = rotary_scale(layer["self_attention/query_norm/scale"])
            expected[f"{start}.self_attn.k_norm.weight"] = rotary_scale(layer["self_attention/key_norm/scale"])
        if made.experts:
            expected[f"{start}.mlp.gate.weight"] = layer["moe_block/gate/kernel"].T
        names = (("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo"))
        for theirs, ours in names:
            for expert in range(made.experts):
                expected[f"{start}.mlp.experts.{expert}.{theirs}.weight"] = layer[f"moe_block/{ours}"][expert].T
            if not made.experts:
                expected[f"{start}.mlp.{theirs}.weight"] = layer[f"mlp/{ours}/kernel"].T
    return expected


LEVANTER_ATTENTION = {
    "input_layernorm/weight": "D",
    "self_attn/q_proj/weight": "KGHD",
    "self_attn/k_proj/weight": "KHD",
    "self_attn/v_proj/weight": "KHD",
    "self_attn/o_proj/weight": "DNH",
    "self_attn/q_norm/weight": "H",
    "self_attn/k_norm/weight": "H",
    "post_attention_layernorm/weight": "D",
}
LEVANTER_DENSE = {"mlp/gate_proj/weight": "FD", "mlp/up_proj/weight": "FD", "mlp/down_proj/weight": "DF"}
LEVANTER_MIXTURE = {
    "mlp/gate/weight": "ED",
    "mlp/experts/gate_proj/weight": "EDF",
    "mlp/experts/up_proj/weight": "EDF",
    "mlp/experts/down_proj/weight": "EFD",
}


def levanter_model(made: ModelConfig, seed: int = 0, is_stacked: bool = True):
    """Return random arrays of a model of levanter by path, and its Hugging Face tensors in float64."""
    rng, size = np.random.default_rng(seed), sizes(made)

    def random(dims: str) -> np.ndarray:
        shape = [size[dim] for dim in dims]
        return (rng.standard_normal(shape) / 4 + 0.5 * (len(dims) == 1)).astype(np.float32)

    leaves = {"embeddings/token_embeddings/weight": random("VD"), "transformer/norm/weight": random("D")}
    expected = {
        "model.embed_tokens.weight": leaves["embeddings/token_embeddings/weight"],
        "model.norm.weight": leaves["transformer/norm/weight"],
    }
    if not made.tie_embeddings:
        leaves["lm_head/weight"] = expected["lm_head.weight"] = random("VD")
    dims = block_dims(made, LEVANTER_ATTENTION, LEVANTER_DENSE, LEVANTER_MIXTURE)
    layers = [{path: random(text) for path, text in dims.items()} for _ in range(made.layers)]
    for number, layer in enumerate(layers):
        for path, values in layer.items():
            name = f"model.layers.{number}.{path.replace('/', '.')}"
            if "experts/" in path:
                for expert, matrix in enumerate(values):
                    expected[name.replace("experts.", f"experts.{expert}.")] = matrix.T
            elif "o_proj" in path:  # inputs are the last two dims
                expected[name] = np.stack([np.concatenate([*row]) for row in values])
            elif "self_attn" in path and "_proj" in path:  # outputs are all but the last dim
                expected[name] = np.stack([values[index] for index in np.ndindex(values.shape[:-1])])
            else:
                expected[name] = values
    if is_stacked:
        leaves |= {
            f"transformer/layers/stacked/{path}": np.stack([layer[path] for layer in layers]) for path in layers[0]
        }
    else:
        for number, layer in enumerate(layers):
            leaves |= {f"transformer/layers/blocks/{number}/{path}": values for path, values in layer.items()}
    return leaves, expected


def save_levanter(path: Path, leaves: dict[str, np.ndarray], step: int = 100) -> Path:
    """Save as levanter does, into one database, with an optimizer's state; return the checkpoint."""
    path = path / f"step-{step}"
    path.mkdir(parents=True)
    state = {f"model/{name}": values for name, values in leaves.items()} | {"opt_state/count": np.int32(step)}
    base = {"driver": "file", "path": str(path)}
    specs = [{"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": name}} for name in state]
    manager = serialization.GlobalAsyncCheckpointManager()
    manager.serialize([jnp.asarray(x) for x in state.values()], specs, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    metadata = {"step": step, "timestamp": "2026-01-01T00:00:00", "is_temporary": False}
    (path / "metadata.json").write_text(json.dumps(metadata))
    return path
