"""The paper's ladder of model sizes (PMA, arXiv 2505.12082) and a few smaller ones, as training configurations.

The paper publishes model sizes, but no shapes, learning rates or batch sizes. They are chosen as follows:

- Shapes resemble current open models: head dim 64 or 128; attention heads that share keys and values in groups
  (grouped-query attention), with RMSNorm on queries and keys; a SwiGLU MLP whose hidden width is 2.3 to 3.5 times the
  model width. Mixtures of experts (MoE) have 32 to 128 experts, of which each token uses 4 to 8; some of these models
  also have a shared expert, which every token uses; the router uses sigmoid scores and a per-expert bias for load
  balancing. Activated parameters (those used for one token) and total parameters are within 5% of the nominal numbers
  in `SIZES`.
- Training lasts `RUN_LENGTH_WINDOWS` merge windows, as for the paper's 1.3B/13B model (windows of 80B tokens, 1.6T
  tokens in total).
- Peak learning rate and batch size follow the scaling laws of DeepSeek LLM (arXiv 2401.02954, Equation 1) for the
  resulting number of FLOPs.

Snapshot interval and window are those of the paper if it publishes them (Section 4.3 and Appendix A), else those of
`recommend_interval_and_window`. The user sets the data (`config.data`) and, if needed, the mesh.
"""

import dataclasses
from typing import Any

import ml_collections
import numpy as np

from pma_jax import config as configuration
from pma_jax.config import ModelConfig

# (activated parameters, snapshot interval in tokens, window in snapshots) that the paper publishes for dense models and
# for MoE models. `get_config` uses the point with the same number of activated parameters, if there is one.
DENSE_POINTS = ((411e6, 2e9, 6), (2e9, 5e9, 6), (8e9, 15e9, 10), (70e9, 40e9, 10))
MOE_POINTS = ((0.7e9, 4e9, 10), (1.3e9, 8e9, 10), (10e9, 80e9, 10))
# Length of training in merge windows: total_tokens = RUN_LENGTH_WINDOWS * window * interval.
RUN_LENGTH_WINDOWS = 20


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """One model size of the ladder.

    Attributes:
        activated_params: Nominal number of parameters that are used for one token.
        total_params: Nominal number of all parameters, including those of inactive experts.
        model: Model configuration.
        sequence_length_tokens: Sequence length in training.
    """

    activated_params: float
    total_params: float
    model: ModelConfig
    sequence_length_tokens: int


_SIZE_FIELDS = ("vocabulary_size", "width", "layers", "heads", "kv_heads", "head_dim", "hidden")


def _dense(*sizes: int, **fields: Any) -> ModelConfig:
    """Build the configuration of a dense model; `sizes` contains the values of the fields in `_SIZE_FIELDS`."""
    fields |= dict(zip(_SIZE_FIELDS, sizes, strict=True))
    return ModelConfig(**fields, qk_norm=True, rope_theta=500_000.0, compute_dtype="bfloat16", remat="full")


def _moe(*sizes: int, experts: tuple[int, int, int], shared: int = 0) -> ModelConfig:
    """Build the configuration of an MoE model.

    Args:
        *sizes: The values of the fields in `_SIZE_FIELDS` except the last.
        experts: (number of experts, experts per token, hidden width of one expert).
        shared: Number of shared experts.
    """
    number, per_token, hidden = experts
    return _dense(
        *sizes,
        ModelConfig.hidden,  # placeholder for `hidden`, which MoE models do not use
        experts=number,
        experts_per_token=per_token,
        expert_hidden=hidden,
        shared_experts=shared,
        router_scores="sigmoid",
    )


# The positional arguments of `_dense` and `_moe` are the `_SIZE_FIELDS`: vocabulary size, width, layers, query heads,
# key and value heads, head dim, and (dense models only) hidden width of the MLP.
SIZES = {
    "dense_125m": ModelSize(125e6, 125e6, _dense(32_768, 768, 12, 12, 12, 64, 1_792), 2_048),
    "dense_411m": ModelSize(411e6, 411e6, _dense(65_536, 1_024, 24, 16, 8, 64, 2_816), 2_048),
    "dense_1b": ModelSize(1e9, 1e9, _dense(65_536, 2_048, 16, 16, 8, 128, 5_632), 2_048),
    "dense_2b": ModelSize(2e9, 2e9, _dense(131_072, 2_048, 26, 16, 8, 128, 7_168), 4_096),
    "dense_8b": ModelSize(8e9, 8e9, _dense(131_072, 4_096, 32, 32, 8, 128, 14_336), 8_192),
    "dense_70b": ModelSize(70e9, 70e9, _dense(131_072, 8_192, 80, 64, 8, 128, 28_672), 8_192),
    "moe_125m_650m": ModelSize(125e6, 650e6, _moe(32_768, 512, 12, 8, 8, 64, experts=(32, 4, 1_024)), 2_048),
    "moe_330m_3b": ModelSize(330e6, 3.3e9, _moe(65_536, 1_024, 16, 16, 8, 64, experts=(128, 6, 512)), 2_048),
    "moe_700m_7b": ModelSize(0.7e9, 7e9, _moe(65_536, 1_536, 18, 12, 4, 128, experts=(128, 6, 640), shared=1), 4_096),
    "moe_1b_5b": ModelSize(1e9, 5e9, _moe(65_536, 2_048, 16, 16, 4, 128, experts=(32, 4, 1_408)), 2_048),
    "moe_1b3_13b": ModelSize(1.3e9, 13e9, _moe(65_536, 2_048, 20, 16, 4, 128, experts=(128, 8, 768), shared=1), 4_096),
    "moe_3b_30b": ModelSize(3e9, 30e9, _moe(131_072, 2_048, 36, 32, 4, 128, experts=(128, 8, 1_024)), 8_192),
    "moe_10b_100b": ModelSize(
        10e9, 100e9, _moe(131_072, 4_096, 48, 32, 8, 128, experts=(128, 8, 1_280), shared=1), 8_192
    ),
    "moe_15b_150b": ModelSize(
        15e9, 150e9, _moe(131_072, 5_120, 48, 40, 8, 128, experts=(128, 8, 1_536), shared=1), 8_192
    ),
    "moe_20b_200b": ModelSize(
        20e9, 200e9, _moe(131_072, 5_120, 52, 40, 8, 128, experts=(64, 4, 3_840), shared=1), 8_192
    ),
}


def get_config(name: str) -> ml_collections.ConfigDict:
    """Return the training configuration of a key of `SIZES`; the user sets `data`, and `mesh` if needed."""
    size = SIZES[name]
    model = size.model
    published = {params: point for params, *point in (MOE_POINTS if model.experts else DENSE_POINTS)}
    interval, window = published.get(size.activated_params) or recommend_interval_and_window(
        size.activated_params, moe=model.experts > 0
    )
    total_tokens = RUN_LENGTH_WINDOWS * window * interval
    rate, batch_tokens = scaling_law_rate_and_batch(size.activated_params, total_tokens)
    c = configuration.defaults()
    c.model.update(dataclasses.asdict(model))
    c.training.sequence_length_tokens = size.sequence_length_tokens
    c.training.batch_size_sequences = max(8, _nearest_power_of_two(batch_tokens / size.sequence_length_tokens))
    step_tokens = c.training.batch_size_sequences * size.sequence_length_tokens
    c.training.total_tokens = int(total_tokens)
    c.training.log_interval_tokens = 10 * step_tokens
    c.schedule.peak_rate = rate
    c.schedule.warmup_tokens = int(total_tokens / 100)
    c.checkpoint.interval_tokens = int(interval)
    c.checkpoint.window = window
    c.checkpoint.keep_windows = 2
    c.checkpoint.state_interval_tokens = int(interval)
    c.preview.windows = (window,)
    c.preview.start_tokens = int(window * interval)
    c.data.held_out_percent = 2.0  # of large text; the default suits a small corpus
    c.evaluation.batch_size_sequences = 64
    c.evaluation.tokens = 64 * size.sequence_length_tokens
    c.mesh.data, c.mesh.fsdp = 1, -1
    return c


def recommend_interval_and_window(activated_params: float, moe: bool = False) -> tuple[int, int]:
    """Recommend a snapshot interval in tokens (two significant digits) and a window in snapshots for a model size.

    The interval follows a power law of the activated parameters, fitted by least squares in log-log space to the
    paper's `DENSE_POINTS`, or to `MOE_POINTS` if `moe`, because MoE models need much longer intervals. The fitted
    interval is within a factor of 1.3 of each point; outside the range of the points (411M to 70B dense, 0.7B to 10B
    MoE) it is an extrapolation. The window is 6 for dense models below 4B parameters, else 10. In the paper, dense
    models up to 2B have 6 and those from 8B have 10; 4B is the geometric mean of 2B and 8B.
    """
    points = np.log(np.array([(params, tokens) for params, tokens, _ in (MOE_POINTS if moe else DENSE_POINTS)]))
    slope, offset = np.polyfit(points[:, 0], points[:, 1], 1)
    interval = float(f"{np.exp(offset + slope * np.log(activated_params)):.1e}")
    return int(interval), 6 if not moe and activated_params < 4e9 else 10


def scaling_law_rate_and_batch(activated_params: float, total_tokens: float) -> tuple[float, float]:
    """Return (peak learning rate, tokens per batch) for training with 6 * activated_params * total_tokens FLOPs.

    The formulas are those of DeepSeek LLM, arXiv 2401.02954, Equation 1. The rate is rounded to two significant digits.
    """
    flops = 6 * activated_params * total_tokens
    return float(f"{0.3118 * flops**-0.1250:.1e}"), 0.2920 * flops**0.3271


def _nearest_power_of_two(x: float) -> int:
    return 2 ** round(np.log2(x))
