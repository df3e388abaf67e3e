"""The decoder in float64 numpy with loops over heads: the reference for the tests."""

import jax
import numpy as np

from pma_jax.config import ModelConfig
from pma_jax.model.decoder import Params


def logits(config: ModelConfig, params: Params, tokens_BxL: np.ndarray) -> np.ndarray:
    """Return logits, float64 [B, L, V]."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x_BxLxD = params["embedding_VxD"][tokens_BxL]
    apart = documents(config, tokens_BxL)
    for layer in range(config.layers):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        is_rotated = not config.no_rope_interval or (layer + 1) % config.no_rope_interval > 0
        if config.norm_position == "after":
            x_BxLxD = x_BxLxD + norm(
                config, attend(config, block, x_BxLxD, apart, is_rotated), block["attention_norm_D"]
            )
            y_BxLxD = mlp(x_BxLxD, block["gate_DxF"], block["up_DxF"], block["down_FxD"])
            x_BxLxD = x_BxLxD + norm(config, y_BxLxD, block["mlp_norm_D"])
            continue
        y_BxLxD = norm(config, x_BxLxD, block["attention_norm_D"])
        x_BxLxD = x_BxLxD + attend(config, block, y_BxLxD, apart, is_rotated)
        y_BxLxD = norm(config, x_BxLxD, block["mlp_norm_D"])
        if config.unrouted_hidden:
            x_BxLxD = x_BxLxD + mlp(y_BxLxD, block["gate_DxF"], block["up_DxF"], block["down_FxD"])
        if config.experts:
            x_BxLxD = x_BxLxD + mixture(config, block["moe"], y_BxLxD)[0]
    x_BxLxD = norm(config, x_BxLxD, params["final_norm_D"])
    return x_BxLxD @ (params["embedding_VxD"].T if config.tie_embeddings else params["unembedding_DxV"])


def mlp(x: np.ndarray, gate_DxF: np.ndarray, up_DxF: np.ndarray, down_FxD: np.ndarray) -> np.ndarray:
    """Return SwiGLU's output."""
    gate = x @ gate_DxF
    return (gate / (1 + np.exp(-gate)) * (x @ up_DxF)) @ down_FxD


def mixture(config: ModelConfig, moe: dict[str, np.ndarray], x_BxLxD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the routed experts' output [B, L, D], token by token and expert by expert, and tokens per expert."""
    out_BxLxD, load_E = np.zeros_like(x_BxLxD), np.zeros(config.experts, int)
    for b, l in np.ndindex(x_BxLxD.shape[:2]):
        x_D = x_BxLxD[b, l]
        logits_E = x_D @ moe["router_DxE"]
        exp_E = np.exp(logits_E - logits_E.max())
        score_E = exp_E / exp_E.sum() if config.router_scores == "softmax" else 1 / (1 + np.exp(-logits_E))
        chosen = np.argsort(-(score_E + moe.get("router_bias_E", 0)))[: config.experts_per_token]
        total = score_E[chosen].sum() if config.router_normalized else 1
        for e in chosen:
            load_E[e] += 1
            weights = (moe[f"expert_{name}"][e] for name in ("gate_ExDxF", "up_ExDxF", "down_ExFxD"))
            out_BxLxD[b, l] += score_E[e] / total * mlp(x_D, *weights)
    return out_BxLxD, load_E


def norm(config: ModelConfig, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return RMSNorm over the last dim."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon) * scale


def documents(config: ModelConfig, tokens_BxL: np.ndarray) -> np.ndarray | None:
    """Return the index of each token's document in its window, counted token by token."""
    if config.separator_token < 0:
        return None
    numbers_BxL = np.zeros_like(tokens_BxL)
    for position in range(1, tokens_BxL.shape[1]):
        ended_B = tokens_BxL[:, position - 1] == config.separator_token
        numbers_BxL[:, position] = numbers_BxL[:, position - 1] + ended_B
    return numbers_BxL


def attend(
    config: ModelConfig,
    block: dict[str, np.ndarray],
    x_BxLxD: np.ndarray,
    segment_ids_BxL: np.ndarray | None,
    is_rotated: bool = True,
) -> np.ndarray:
    """Return the attention of one block, computed one head at a time; [B, L, D]."""
    out_BxLxD = np.zeros_like(x_BxLxD)
    if config.qk_norm_over == "projection":  # one number per token, from all columns of the matrix
        q_rms_BxLx1, k_rms_BxLx1 = (
            np.sqrt(
                np.mean((x_BxLxD @ block[name].reshape(config.width, -1)) ** 2, -1, keepdims=True) + config.norm_epsilon
            )
            for name in ("query_DxNxH", "key_DxKxH")
        )
    for head in range(config.heads):
        shared = head // (config.heads // config.kv_heads)
        q_BxLxH = x_BxLxD @ block["query_DxNxH"][:, head]
        k_BxLxH = x_BxLxD @ block["key_DxKxH"][:, shared]
        if config.qk_norm_over == "projection":
            q_BxLxH = q_BxLxH / q_rms_BxLx1 * block["query_norm_NxH"][head]
            k_BxLxH = k_BxLxH / k_rms_BxLx1 * block["key_norm_KxH"][shared]
        elif config.qk_norm:
            q_BxLxH = norm(config, q_BxLxH, block["query_norm_H"])
            k_BxLxH = norm(config, k_BxLxH, block["key_norm_H"])
        v_BxLxH = x_BxLxD @ block["value_DxKxH"][:, shared]
        if is_rotated:
            q_BxLxH, k_BxLxH = rotate(q_BxLxH, config.rope_theta), rotate(k_BxLxH, config.rope_theta)
        y_BxLxH = one_head(q_BxLxH, k_BxLxH, v_BxLxH, segment_ids_BxL, config.attention_window_tokens)
        out_BxLxD += y_BxLxH @ block["output_NxHxD"][head]
    return out_BxLxD


def one_head(
    q_BxLxH: np.ndarray,
    k_BxLxH: np.ndarray,
    v_BxLxH: np.ndarray,
    segment_ids_BxL: np.ndarray | None = None,
    window_tokens: int = 0,
) -> np.ndarray:
    """Return causal softmax attention within a document and a window; [B, L, H]."""
    length, head_dim = q_BxLxH.shape[1:]
    scores_BxLxL = q_BxLxH @ k_BxLxH.swapaxes(1, 2) / np.sqrt(head_dim)
    for query in range(length):
        for key in range(length):
            if key > query or (window_tokens and query - key >= window_tokens):
                scores_BxLxL[:, query, key] = -np.inf
            elif segment_ids_BxL is not None:
                apart_B = segment_ids_BxL[:, query] != segment_ids_BxL[:, key]
                scores_BxLxL[apart_B, query, key] = -np.inf
    weights_BxLxL = np.exp(scores_BxLxL - scores_BxLxL.max(axis=-1, keepdims=True))
    return weights_BxLxL / weights_BxLxL.sum(axis=-1, keepdims=True) @ v_BxLxH


def rotate(x_BxLxH: np.ndarray, theta: float) -> np.ndarray:
    """Apply rotary positions: the pair (x_i, x_{i + H/2}), as a complex number, turns by position / theta^(2i/H)."""
    half = x_BxLxH.shape[-1] // 2
    angle_Lxh = np.arange(x_BxLxH.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    z_BxLxh = (x_BxLxH[..., :half] + 1j * x_BxLxH[..., half:]) * np.exp(1j * angle_Lxh)
    return np.concatenate([z_BxLxh.real, z_BxLxh.imag], axis=-1)
