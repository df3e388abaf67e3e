"""Peak rates of TPU chips, FLOPs of a decoder, and the roofline (the minimum time) of a compiled program."""

import dataclasses
import math

from pma_jax.config import ModelConfig
from pma_jax.planning import counts, hlo

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_TORUS = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip."""

    flops_per_second: float  # peak of bfloat16 matrix products
    memory_bytes: int  # HBM
    memory_bytes_per_second: float
    network_bytes_per_second: float  # ICI: send bandwidth over all links of a chip
    slice_network_bytes_per_second: float | None  # a chip's share of the network between slices; None: unknown
    devices_per_chip: int  # JAX devices, which share its memory and links
    shapes: tuple[str, ...]  # topologies of slices that Google Cloud lists; others may compile too
    source: str
    config: str = ""  # libtpu's name of the configuration with one device per chip, if it is not the default


# Sources state ICI bandwidth for one direction (1600 Gbit/s) or for both together (400 GB/s) of the same links.
CHIPS = {
    "v4": Chip(
        275e12,
        32 * 2**30,
        1.2e12,
        300e9,
        None,
        1,
        _TORUS,
        "cloud.google.com/tpu/docs/v4: 2400 Gbit/s of ICI",
        "megacore",
    ),
    "v5e": Chip(
        197e12,
        16 * 2**30,
        819e9,
        200e9,
        6.4e12 / 8 / 256,
        1,
        _FLAT,
        "cloud.google.com/tpu/docs/v5e: ICI 400 GB/s in both directions, 6.4 Tbit/s to the data center from 256 chips",
    ),
    "v5p": Chip(
        459e12,
        95 * 2**30,
        2765e9,
        600e9,
        None,
        1,
        (*_TORUS, "16x16x16", "16x16x24"),
        "cloud.google.com/tpu/docs/v5p: ICI 1200 GB/s in both directions",
    ),
    "v6e": Chip(
        918e12,
        32 * 2**30,
        1638e9,
        400e9,
        25.6e12 / 8 / 256,
        1,
        _FLAT,
        "cloud.google.com/tpu/docs/v6e: ICI 800 GB/s in both directions, 25.6 Tbit/s to the data center from 256 chips",
    ),
    "tpu7x": Chip(
        2307e12,
        192 * 2**30,
        7380e9,
        600e9,
        None,
        2,
        _TORUS,
        "cloud.google.com/tpu/docs/tpu7x: ICI 1200 GB/s in both directions",
    ),
}


def format_known_topologies(chip: str | None = None) -> str:
    """List the known topologies of one chip, or of all chips, in one line."""
    return "; ".join(f"{name}:{{{','.join(c.shapes)}}}" for name, c in CHIPS.items() if chip in (None, name))


def matrix_parameter_count(model: ModelConfig) -> int:
    """Return the number of matrix parameters in the blocks that multiply each token, without embedding and output.

    A mixture of experts counts the shared experts, the experts that a token is routed to, and the router.
    """
    attention = 2 * model.width * (model.heads + model.kv_heads) * model.head_dim
    routed = model.experts_per_token * model.expert_hidden if model.experts else 0
    router = model.width * model.experts
    return model.layers * (attention + 3 * model.width * (model.unrouted_hidden + routed) + router)


def forward_flops_per_token(model: ModelConfig, sequence_length_tokens: int) -> dict[str, float]:
    """Return the FLOPs of one token's forward pass by part, 2 per multiply-add. Training takes three times as many.

    Norms, rotations and the softmax are not counted, as in Kaplan et al. (arXiv 2001.08361, Section 2.1).

    Args:
        model: The model.
        sequence_length_tokens: L.

    Returns:
        `parameters`: the matrices of the blocks. `attention`: scores and weighted values of the keys that a position
        attends to, (L + 1) / 2 on average without a window, where PaLM (arXiv 2204.02311, Appendix B) counts all L.
        `output_projection`: the projection to the vocabulary.
    """
    L, window = sequence_length_tokens, model.attention_window_tokens or sequence_length_tokens
    first = min(window, L)  # positions that attend to all before them; the rest attend to `window`
    keys_per_query = (first * (first + 1) / 2 + (L - first) * window) / L
    return {
        "parameters": 2.0 * matrix_parameter_count(model),
        "attention": 4.0 * model.layers * model.heads * model.head_dim * keys_per_query,
        "output_projection": 2.0 * model.width * model.vocabulary_size,
    }


def training_flops_per_token(model: ModelConfig, sequence_length_tokens: int) -> float:
    """Return the FLOPs per trained token: the forward pass plus twice that for the backward, without recomputation."""
    return 3 * sum(forward_flops_per_token(model, sequence_length_tokens).values())


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds that the products, memory traffic and collectives of a program take at the peak rates of a chip."""

    compute_seconds: float
    memory_seconds: float
    network_seconds: float  # inside a slice
    slice_network_seconds: float  # between slices; 0 where the rate of the chip is unknown

    @property
    def seconds(self) -> float:
        """Lower bound of the time of the program: all parts overlap, and the slowest runs at its peak rate."""
        return max(dataclasses.astuple(self))

    @property
    def limit(self) -> str:
        """Name of the slowest part: compute, memory, network or slice network."""
        names = [field.name for field in dataclasses.fields(self)]
        return max(names, key=lambda name: getattr(self, name)).removesuffix("_seconds").replace("_", " ")


def roofline(program: hlo.Program, chip: Chip, kernel_flops: float = 0.0) -> Roofline:
    """Compute the minimum time of a program on one device of `chip`.

    Args:
        program: The compiled program; its collectives are assumed to be rings.
        chip: The peak rates.
        kernel_flops: FLOPs of the program's custom kernels, which its text does not contain.
    """
    sent = sum(c.executions * c.sent_bytes_per_execution for c in counts.collectives(program))
    return Roofline(
        (counts.matmul_flops(program) + kernel_flops) / (chip.flops_per_second / chip.devices_per_chip),
        counts.memory_traffic_bytes(program) / (chip.memory_bytes_per_second / chip.devices_per_chip),
        sent / (chip.network_bytes_per_second / chip.devices_per_chip),
        counts.inter_slice_sent_bytes(program)
        * chip.devices_per_chip
        / (chip.slice_network_bytes_per_second or math.inf),
    )
