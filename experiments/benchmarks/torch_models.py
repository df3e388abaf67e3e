"""The PyTorch models of `train.py`: a plain decoder, and the models of Hugging Face transformers.

All are built from weights in pma_jax's layout. Legend: T layers, V vocabulary, D width, N query heads,
K key and value heads, H head dim, F hidden width, E experts.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def own_decoder(model, weights, length):
    """Return a dense decoder of nn.Linear, nn.RMSNorm and F.scaled_dot_product_attention, with N = K."""

    def linear(matrix):
        layer = nn.Linear(*matrix.shape, bias=False)
        layer.weight.data = torch.from_numpy(matrix.T.copy())
        return layer

    class Block(nn.Module):
        def __init__(self, w):
            super().__init__()
            D, N, H = w["query_DxNxH"].shape
            self.heads = (N, H)
            self.attention_norm, self.mlp_norm = (nn.RMSNorm(D, eps=model.norm_epsilon) for _ in range(2))
            names = ("query_DxNxH", "key_DxKxH", "value_DxKxH")
            self.query, self.key, self.value = (linear(w[name].reshape(D, -1)) for name in names)
            self.output = linear(w["output_NxHxD"].reshape(N * H, D))
            self.gate, self.up, self.down = (linear(w[name]) for name in ("gate_DxF", "up_DxF", "down_FxD"))

        def forward(self, x, cos, sin):
            h = self.attention_norm(x)
            q, k, v = (f(h).unflatten(-1, self.heads).transpose(1, 2) for f in (self.query, self.key, self.value))
            y = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
            x = x + self.output(y.transpose(1, 2).flatten(2))
            h = self.mlp_norm(x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    def rotate(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = weights["blocks"]
            self.embedding = nn.Embedding.from_pretrained(
                torch.from_numpy(weights["embedding_VxD"].copy()), freeze=False
            )
            self.blocks = nn.ModuleList(Block({name: w[i] for name, w in blocks.items()}) for i in range(model.layers))
            self.norm = nn.RMSNorm(model.width, eps=model.norm_epsilon)
            self.unembedding = linear(weights["unembedding_DxV"])
            angle = torch.outer(
                torch.arange(length), model.rope_theta ** (-torch.arange(0, model.head_dim, 2) / model.head_dim)
            )
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())

        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            return self.unembedding(self.norm(x))

    return Decoder()


def transformers_decoder(model, weights, length, experts_implementation="grouped_mm"):
    """Return transformers' Llama (dense) or Qwen3-MoE with its default attention; calling it returns logits.

    Args:
        model: The shape (ModelConfig).
        weights: Leaf name -> float32 array, in pma_jax's layout.
        length: Maximum number of positions.
        experts_implementation: "eager", a loop over the experts that have tokens, or "grouped_mm".
    """
    import transformers

    sizes = {
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    if model.experts:
        assert model.router_scores == "softmax" and not model.router_bias and not model.shared_experts
        config = transformers.Qwen3MoeConfig(
            **sizes,
            intermediate_size=model.expert_hidden,
            moe_intermediate_size=model.expert_hidden,
            num_experts=model.experts,
            num_experts_per_tok=model.experts_per_token,
            norm_topk_prob=model.router_normalized,
        )
        decoder = transformers.Qwen3MoeForCausalLM(config)
        decoder.set_experts_implementation(experts_implementation)
    else:
        decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=model.hidden))
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in transformers_tensors(model, weights)
    }
    decoder.load_state_dict(tensors, strict=True)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = decoder

        def forward(self, tokens):
            return self.decoder(input_ids=tokens).logits

    return Logits()


def transformers_tensors(model, weights):
    """Yield (name, values) of every tensor of transformers' models."""
    D, blocks = model.width, weights["blocks"]
    yield "model.embed_tokens.weight", weights["embedding_VxD"]
    yield "model.norm.weight", weights["final_norm_D"]
    yield "lm_head.weight", weights["unembedding_DxV"].T
    for i in range(model.layers):
        prefix = f"model.layers.{i}"
        yield f"{prefix}.input_layernorm.weight", blocks["attention_norm_D"][i]
        yield f"{prefix}.post_attention_layernorm.weight", blocks["mlp_norm_D"][i]
        for theirs, ours in (("q", "query_DxNxH"), ("k", "key_DxKxH"), ("v", "value_DxKxH")):
            yield f"{prefix}.self_attn.{theirs}_proj.weight", blocks[ours][i].reshape(D, -1).T
        yield f"{prefix}.self_attn.o_proj.weight", blocks["output_NxHxD"][i].reshape(-1, D).T
        if not model.experts:
            for name in ("gate_DxF", "up_DxF", "down_FxD"):
                yield f"{prefix}.mlp.{name.partition('_')[0]}_proj.weight", blocks[name][i].T
            continue
        yield f"{prefix}.self_attn.q_norm.weight", blocks["query_norm_H"][i]
        yield f"{prefix}.self_attn.k_norm.weight", blocks["key_norm_H"][i]
        moe = {name: leaf[i] for name, leaf in blocks["moe"].items()}
        yield f"{prefix}.mlp.gate.weight", moe["router_DxE"].T
        rows = [moe[name].transpose(0, 2, 1) for name in ("expert_gate_ExDxF", "expert_up_ExDxF")]
        yield f"{prefix}.mlp.experts.gate_up_proj", np.concatenate(rows, axis=1)
        yield f"{prefix}.mlp.experts.down_proj", moe["expert_down_ExFxD"].transpose(0, 2, 1)
