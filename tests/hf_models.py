"""Small random models of every kind, and the Hugging Face layout implemented once more, one head and row at a time.

Every parameter is random, including the scales of norms, so that a wrong mapping shows.
"""

import json
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy by name
import numpy as np
import safetensors
import tiny
from safetensors.numpy import save_file

from pma_jax import config as configuration
from pma_jax.config import Config, MeshConfig, ModelConfig
from pma_jax.model.decoder import abstract_params, apply, graph_definition
from pma_jax.runs import snapshots
from pma_jax.runs.snapshots import Snapshot, read_snapshot
from pma_jax.runtime.mesh import data_parallel_mesh, make_mesh
from pma_jax.storage.paths import absolute_path

SIZES = {"vocabulary_size": 256, "width": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 24}
MIXTURE = {
    "qk_norm": True,
    "experts": 4,
    "experts_per_token": 2,
    "expert_hidden": 12,
    "router_bias": False,
}
OLMO2 = {"norm_position": "after", "qk_norm": True, "qk_norm_over": "projection"}
KINDS = {
    "llama": {},
    "llama tied": {"tie_embeddings": True, "rope_theta": 500.0},
    "llama, one key head": {"kv_heads": 1, "width": 24},
    "mistral": {"attention_window_tokens": 5, "rope_theta": 1e6},
    "smollm3": {"no_rope_interval": 2, "rope_theta": 2e6, "tie_embeddings": True},
    "smollm3, no rotary positions": {"no_rope_interval": 1, "layers": 2},
    "olmo2": OLMO2 | {"norm_epsilon": 1e-5, "kv_heads": 4},
    "olmo2, grouped queries": OLMO2 | {"rope_theta": 5e5, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "rope_theta": 1e6, "norm_epsilon": 1e-5},
    "qwen3, a window": {"qk_norm": True, "attention_window_tokens": 5},
    "qwen3 tied": {"qk_norm": True, "tie_embeddings": True, "head_dim": 6},
    "mixture": MIXTURE,
    "mixture tied": MIXTURE | {"tie_embeddings": True, "router_normalized": False, "experts_per_token": 3},
    "mixture, a window": MIXTURE | {"attention_window_tokens": 5, "experts_per_token": 1, "rope_theta": 1e6},
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
TOKENS = np.random.default_rng(1).integers(0, SIZES["vocabulary_size"], (8, 12)).astype(np.int32)


def model(kind: str) -> ModelConfig:
    """Return the small model of a kind."""
    return ModelConfig(**SIZES | KINDS[kind])


def config(kind: str, **data) -> Config:
    """Return a complete configuration with this model; keys of `data` may be given."""
    keys = SIZES | KINDS[kind]
    return configuration.resolve({"model": keys, "data": data, "training": {"sequence_length_tokens": 32}})


def random_tree(abstract, seed: int = 0):
    """Return random float32 numbers around one half for each shape, so that scales of norms differ."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        return (0.5 * (leaf.ndim == 1) + rng.standard_normal(leaf.shape) / 4).astype(np.float32)

    return jax.tree.map(lambda leaf: fill(np.empty(leaf.shape)), abstract)


def write_pma_snapshot(
    path: Path, made: Config, seed: int = 0, tokens: int = 4096, kind: str = "point", change=lambda params: None
):
    """Write a snapshot of random parameters on the configuration's mesh; return them, altered by `change`."""
    abstract = abstract_params(made.model, data_parallel_mesh() if made.mesh == MeshConfig() else make_mesh(made.mesh))
    params = random_tree(abstract, seed)
    change(params)
    placed = jax.tree.map(lambda values, leaf: jax.device_put(values, leaf.sharding), params, abstract)
    snapshot = Snapshot(absolute_path(path), tokens // 512, tokens, None, made, kind=kind)
    tiny.write_snapshot(placed, snapshot)
    return params


def pma_logits(path: Path, tokens_BxL: np.ndarray = TOKENS) -> np.ndarray:
    """Return the logits of a stored snapshot by pma_jax's decoder, on all devices."""
    mesh = data_parallel_mesh()
    snapshot = read_snapshot(path)
    params = snapshots.restore_params(snapshot, abstract_params(snapshot.config.model, mesh))
    with jax.set_mesh(mesh):
        graph = graph_definition(snapshot.config.model)
        tokens = jax.device_put(tokens_BxL, jax.NamedSharding(mesh, jax.P("data")))
        return np.asarray(jax.jit(apply)(graph, params, tokens))


def shapes(made: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor that transformers has for such a model."""
    D, F, V = made.width, made.expert_hidden if made.experts else made.hidden, made.vocabulary_size
    queries, keys = made.heads * made.head_dim, made.kv_heads * made.head_dim
    is_olmo = model_type(made) == "olmo2"
    block = {
        "post_feedforward_layernorm" if is_olmo else "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
        "self_attn.q_proj": (queries, D),
        "self_attn.k_proj": (keys, D),
        "self_attn.v_proj": (keys, D),
        "self_attn.o_proj": (D, queries),
    }
    mlp = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    for start in [f"mlp.experts.{e}" for e in range(made.experts)] or ["mlp"]:
        block |= {f"{start}.{name}": shape for name, shape in mlp.items()}
    if made.experts:
        block["mlp.gate"] = (made.experts, D)
    if made.qk_norm:
        normed = (queries, keys) if is_olmo else (made.head_dim, made.head_dim)
        block |= {"self_attn.q_norm": normed[:1], "self_attn.k_norm": normed[1:]}
    result = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not made.tie_embeddings:
        result["lm_head.weight"] = (V, D)
    for layer in range(made.layers):
        result |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return result


def write_random_hf_model(
    path: Path, made: ModelConfig, dtypes: tuple[str, ...] = ("float32",), shards: int = 1, **fields
) -> dict[str, np.ndarray]:
    """Write a Hugging Face directory of random tensors, cycling through the dtypes; return the tensors."""
    rng = np.random.default_rng(2)
    tensors = {
        name: (0.5 * (len(shape) == 1) + rng.standard_normal(shape) / 4).astype(dtypes[i % len(dtypes)])
        for i, (name, shape) in enumerate(shapes(made).items())
    }
    write_hf_tensors(path, made, tensors, shards, **fields)
    return tensors


def model_type(made: ModelConfig) -> str:
    """Return the name of such a model in transformers."""
    if made.norm_position == "after":
        return "olmo2"
    if made.no_rope_interval:
        return "smollm3"
    if not made.qk_norm:
        return "mistral" if made.attention_window_tokens else "llama"
    return "qwen3_moe" if made.experts else "qwen3"


def write_hf_tensors(path: Path, made: ModelConfig, tensors: dict[str, np.ndarray], shards: int = 1, **fields) -> None:
    """Write a Hugging Face directory of these tensors; `fields` change config.json, and None removes one."""
    path.mkdir(parents=True)
    described = {
        "architectures": [ARCHITECTURES[model_type(made)]],
        "model_type": model_type(made),
        "vocab_size": made.vocabulary_size,
        "hidden_size": made.width,
        "intermediate_size": made.hidden,
        "num_hidden_layers": made.layers,
        "num_attention_heads": made.heads,
        "num_key_value_heads": made.kv_heads,
        "head_dim": made.head_dim,
        "rms_norm_eps": made.norm_epsilon,
        "rope_theta": made.rope_theta,
        "tie_word_embeddings": made.tie_embeddings,
        "max_position_embeddings": 64,
    }
    if model_type(made) == "mistral":
        described |= {"sliding_window": made.attention_window_tokens}
    elif made.attention_window_tokens:
        described |= {"use_sliding_window": True, "sliding_window": made.attention_window_tokens}
        described |= {"layer_types": ["sliding_attention"] * made.layers}
    if made.no_rope_interval:
        described |= {"no_rope_layer_interval": made.no_rope_interval}
    if made.experts:
        described |= {
            "num_experts": made.experts,
            "num_experts_per_tok": made.experts_per_token,
            "moe_intermediate_size": made.expert_hidden,
            "norm_topk_prob": made.router_normalized,
        }
    described |= fields
    described = {name: value for name, value in described.items() if value is not None}
    (path / "config.json").write_text(json.dumps(described))
    names = list(tensors)
    files = [names[i::shards] for i in range(shards)]
    index = {}
    for number, held in enumerate(files, start=1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in held}, path / file, {"format": "pt"})
        index |= dict.fromkeys(held, file)
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def read_hf_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a directory with the parser of the reference implementation."""
    result = {}
    codes = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    for file in sorted(path.glob("*.safetensors")):
        for name, entry in safetensors.deserialize(file.read_bytes()):
            result[name] = np.frombuffer(entry["data"], codes[entry["dtype"]]).reshape(entry["shape"])
    return result


def as_reference(made: ModelConfig, tensors: dict[str, np.ndarray]) -> dict:
    """Convert Hugging Face tensors to the input of `reference.logits`, one head and row at a time."""
    wide = {name: values.astype(np.float64) for name, values in tensors.items()}
    is_olmo = model_type(made) == "olmo2"

    def columns(name: str, heads: int) -> np.ndarray:
        rows = wide[name]  # Row n * H + h becomes number h of head n.
        H = made.head_dim
        return np.stack([np.stack([rows[n * H + h] for h in range(H)], axis=-1) for n in range(heads)], axis=1)

    def block(layer: int) -> dict[str, np.ndarray]:
        start = f"model.layers.{layer}"
        out = wide[f"{start}.self_attn.o_proj.weight"]
        H = made.head_dim
        norms = ["input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"]
        attention_norm, mlp_norm = norms[1:] if is_olmo else norms[:2]
        result = {
            "attention_norm_D": wide[f"{start}.{attention_norm}.weight"],
            "query_DxNxH": columns(f"{start}.self_attn.q_proj.weight", made.heads),
            "key_DxKxH": columns(f"{start}.self_attn.k_proj.weight", made.kv_heads),
            "value_DxKxH": columns(f"{start}.self_attn.v_proj.weight", made.kv_heads),
            "output_NxHxD": np.stack([out[:, n * H : (n + 1) * H].T for n in range(made.heads)]),
            "mlp_norm_D": wide[f"{start}.{mlp_norm}.weight"],
        }
        if made.experts:
            result["moe"] = {"router_DxE": np.stack([*wide[f"{start}.mlp.gate.weight"]], axis=-1)}
            for name, ours in (("gate", "gate_ExDxF"), ("up", "up_ExDxF"), ("down", "down_ExFxD")):
                experts = (wide[f"{start}.mlp.experts.{e}.{name}_proj.weight"].T for e in range(made.experts))
                result["moe"][f"expert_{ours}"] = np.stack(list(experts))
        else:
            for name, ours in (("gate", "gate_DxF"), ("up", "up_DxF"), ("down", "down_FxD")):
                result[ours] = wide[f"{start}.mlp.{name}_proj.weight"].T
        if is_olmo:
            rows = {"query_norm_NxH": "q_norm", "key_norm_KxH": "k_norm"}
            for ours, name in rows.items():
                scale = wide[f"{start}.self_attn.{name}.weight"]
                result[ours] = np.stack([scale[n : n + H] for n in range(0, len(scale), H)])
        elif made.qk_norm:
            result["query_norm_H"] = wide[f"{start}.self_attn.q_norm.weight"]
            result["key_norm_H"] = wide[f"{start}.self_attn.k_norm.weight"]
        return result

    blocks = [block(layer) for layer in range(made.layers)]
    made_of = {
        "embedding_VxD": wide["model.embed_tokens.weight"],
        "blocks": jax.tree.map(lambda *layers: np.stack(layers), *blocks),
        "final_norm_D": wide["model.norm.weight"],
    }
    if not made.tie_embeddings:
        made_of["unembedding_DxV"] = wide["lm_head.weight"].T
    return made_of


def assert_logits(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    """Assert closeness by the largest difference relative to the largest logit."""
    assert actual.shape == expected.shape
    difference = np.abs(actual.astype(np.float64) - expected).max() / np.abs(expected).max()
    assert difference <= tolerance, difference
