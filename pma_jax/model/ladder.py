"""The paper's model ladder (PMA, arXiv 2505.12082) and a few small sizes of each kind: shapes, intervals and windows.

The paper names sizes; it prints no shape, rate, batch or corpus. Those here are ours:

- Shapes are of today's open models: head dim 64 or 128, grouped queries, queries and keys normalised, SwiGLU of about
  3.5 widths; mixtures of 64 or 128 small experts of which 4 to 8 are chosen, the larger with a shared one, sigmoid
  scores balanced by a bias. Both counts, activated and total, are within 5% of the name.
- A run is 20 windows long, as the paper's 1.3B/13B is (80B tokens of 1.6T).
- Peak rate and batch follow the scaling laws of DeepSeek LLM (arXiv 2401.02954, Equation 1) for a run of that compute.

Snapshot interval and window are the paper's where it prints them (Section 4.3 and Appendix A), else
`recommend_interval`. What a run reads (`config.data`) and the mesh it runs on are the user's to set.
"""

import dataclasses

import ml_collections
import numpy as np

from pma_jax import config as configuration
from pma_jax.config import ModelConfig

# (activated parameters, interval in tokens, window) that the paper prints, for dense models and mixtures of experts.
DENSE_POINTS = ((411e6, 2e9, 6), (2e9, 5e9, 6), (8e9, 15e9, 10), (70e9, 40e9, 10))
MIXTURE_POINTS = ((0.7e9, 4e9, 10), (1.3e9, 8e9, 10), (10e9, 80e9, 10))
WINDOWS_A_RUN = 20


@dataclasses.dataclass(frozen=True)
class Size:
    """A rung: what its name promises, and its shape.

    Attributes:
        activated: parameters that a token meets, as named.
        total: all parameters, as named.
        model: the shape.
        sequence_length_tokens: of training.
        printed: the interval (tokens) and window that the paper prints for it, if it does.
    """

    activated: float
    total: float
    model: ModelConfig
    sequence_length_tokens: int
    printed: tuple[float, int] | None = None


def _dense(
    vocabulary: int, width: int, layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int
) -> ModelConfig:
    return ModelConfig(
        vocabulary_size=vocabulary,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        qk_norm=True,
        rope_theta=500_000.0,
        compute_dtype="bfloat16",
        remat="full",
    )


def _mixture(
    vocabulary: int,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: tuple[int, int, int],
    shared: int,
) -> ModelConfig:
    """`experts`: how many, how many a token, inner width of one."""
    return dataclasses.replace(
        _dense(vocabulary, width, layers, heads, kv_heads, head_dim, ModelConfig.hidden),
        experts=experts[0],
        experts_per_token=experts[1],
        expert_hidden=experts[2],
        shared_experts=shared,
        router_scores="sigmoid",
    )


SIZES = {
    "dense_125m": Size(125e6, 125e6, _dense(32_768, 768, 12, 12, 12, 64, 1_792), 2_048),
    "dense_411m": Size(411e6, 411e6, _dense(65_536, 1_024, 24, 16, 8, 64, 2_816), 2_048, (2e9, 6)),
    "dense_1b": Size(1e9, 1e9, _dense(65_536, 2_048, 16, 16, 8, 128, 5_632), 2_048),
    "dense_2b": Size(2e9, 2e9, _dense(131_072, 2_048, 26, 16, 8, 128, 7_168), 4_096, (5e9, 6)),
    "dense_8b": Size(8e9, 8e9, _dense(131_072, 4_096, 32, 32, 8, 128, 14_336), 8_192, (15e9, 10)),
    "dense_70b": Size(70e9, 70e9, _dense(131_072, 8_192, 80, 64, 8, 128, 28_672), 8_192, (40e9, 10)),
    "moe_125m_650m": Size(125e6, 650e6, _mixture(32_768, 512, 12, 8, 8, 64, (32, 4, 1_024), 0), 2_048),
    "moe_330m_3b": Size(330e6, 3.3e9, _mixture(65_536, 1_024, 16, 16, 8, 64, (128, 6, 512), 0), 2_048),
    "moe_700m_7b": Size(0.7e9, 7e9, _mixture(65_536, 1_536, 18, 12, 4, 128, (128, 6, 640), 1), 4_096, (4e9, 10)),
    "moe_1b_5b": Size(1e9, 5e9, _mixture(65_536, 2_048, 16, 16, 4, 128, (32, 4, 1_408), 0), 2_048),
    "moe_1b3_13b": Size(1.3e9, 13e9, _mixture(65_536, 2_048, 20, 16, 4, 128, (128, 8, 768), 1), 4_096, (8e9, 10)),
    "moe_3b_30b": Size(3e9, 30e9, _mixture(131_072, 2_048, 36, 32, 4, 128, (128, 8, 1_024), 0), 8_192),
    "moe_10b_100b": Size(10e9, 100e9, _mixture(131_072, 4_096, 48, 32, 8, 128, (128, 8, 1_280), 1), 8_192, (80e9, 10)),
    "moe_15b_150b": Size(15e9, 150e9, _mixture(131_072, 5_120, 48, 40, 8, 128, (128, 8, 1_536), 1), 8_192),
    "moe_20b_200b": Size(20e9, 200e9, _mixture(131_072, 5_120, 52, 40, 8, 128, (64, 4, 3_840), 1), 8_192),
}


def get_config(name: str) -> ml_collections.ConfigDict:
    """The configuration of a size, to be changed further: a `--config` file is one call of this."""
    size = SIZES[name]
    model = size.model
    interval, window = size.printed or recommend_interval(size.activated, mixture=model.experts > 0)
    total_tokens = WINDOWS_A_RUN * window * interval
    rate, batch_tokens = scaling_law(size.activated, total_tokens)
    c = configuration.defaults()
    c.model.update(dataclasses.asdict(model))
    c.training.sequence_length_tokens = size.sequence_length_tokens
    c.training.batch_size_sequences = max(8, _power_of_two(batch_tokens / size.sequence_length_tokens))
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
    c.evaluation.batch_size_sequences = 64
    c.evaluation.tokens = 64 * size.sequence_length_tokens
    c.mesh.data, c.mesh.fsdp = 1, -1
    return c


def recommend_interval(active_params: float, mixture: bool = False) -> tuple[int, int]:
    """Snapshot interval in tokens (two digits) and window for a model of so many activated parameters.

    The interval is a power law fitted to the paper's points in logarithms, of dense models or of mixtures of experts:
    together they follow none, as mixtures want much longer intervals. It is within a factor 1.3 of each point. Outside
    of the points (411M to 70B dense, 0.7B to 10B mixtures) it is an extrapolation. The window is 10, and 6 for dense
    models below 4B, halfway (in logarithms) between the paper's largest with 6 and its smallest with 10.
    """
    points = np.log(np.array([(params, tokens) for params, tokens, _ in (MIXTURE_POINTS if mixture else DENSE_POINTS)]))
    slope, offset = np.polyfit(points[:, 0], points[:, 1], 1)
    interval = float(f"{np.exp(offset + slope * np.log(active_params)):.1e}")
    return int(interval), 6 if not mixture and active_params < 4e9 else 10


def scaling_law(active_params: float, total_tokens: float) -> tuple[float, float]:
    """Peak rate and tokens a batch for a run of 6 N D FLOPs (DeepSeek LLM, arXiv 2401.02954, Equation 1)."""
    flops = 6 * active_params * total_tokens
    return float(f"{0.3118 * flops**-0.1250:.1e}"), 0.2920 * flops**0.3271


def _power_of_two(x: float) -> int:
    return 2 ** round(np.log2(x))
