"""What chips can do, what a decoder needs, and the time that the one takes for the other at the very least."""

import dataclasses
import math

from pma_jax.config import ModelConfig
from pma_jax.planning import counts, hlo

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_TORUS = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


@dataclasses.dataclass(frozen=True)
class Chip:
    """Public figures of one chip."""

    flops_per_second: float  # bfloat16 products, the peak
    memory_bytes: int  # HBM
    memory_bytes_per_second: float
    network_bytes_per_second: float  # ICI: what a chip can send over all its links at once
    slice_network_bytes_per_second: (
        float | None
    )  # a chip's share of its hosts' network, between slices; None: not known
    devices: int  # that JAX sees in a chip; memory and links are shared out among them
    shapes: tuple[str, ...]  # of slices that Google Cloud names; others may compile too
    source: str
    config: str = ""  # what libtpu calls the chip when it is one device, where that is not its default


# ICI is published as what one direction carries (1600 Gbit/s) or both together (400 GB/s): the same links.
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
    """The slices that have a name, in one line; of one chip, or of all."""
    return "; ".join(f"{name}:{{{','.join(c.shapes)}}}" for name, c in CHIPS.items() if chip in (None, name))


def matrix_parameter_count(model: ModelConfig) -> int:
    """Parameters of the blocks' matrices, which each token is multiplied by; neither embedding nor output.

    Of a mixture of experts: those of the shared experts, of the ones that a token is sent to, and of the router.
    """
    attention = 2 * model.width * (model.heads + model.kv_heads) * model.head_dim
    routed = model.experts_per_token * model.expert_hidden if model.experts else 0
    router = model.width * model.experts
    return model.layers * (attention + 3 * model.width * (model.shared_hidden + routed) + router)


def forward_flops_per_token(model: ModelConfig, sequence_length_tokens: int) -> dict[str, float]:
    """FLOPs of one token's forward pass, 2 a multiply-add, by part; training takes three times as many.

    `parameters`: the blocks' matrices. `attention`: scores and weighted values, of the keys that a position sees and no
    others: (L + 1) / 2 on average without a window, where PaLM (arXiv 2204.02311, Appendix B) counts all L.
    `output_projection`: to the vocabulary. Norms, rotations and the softmax are left out, as Kaplan et al. do (arXiv
    2001.08361, Section 2.1).
    """
    L, window = sequence_length_tokens, model.attention_window_tokens or sequence_length_tokens
    first = min(window, L)  # positions that see all before them; the rest see `window`
    seen = (first * (first + 1) / 2 + (L - first) * window) / L
    return {
        "parameters": 2.0 * matrix_parameter_count(model),
        "attention": 4.0 * model.layers * model.heads * model.head_dim * seen,
        "output_projection": 2.0 * model.width * model.vocabulary_size,
    }


def training_flops_per_token(model: ModelConfig, sequence_length_tokens: int) -> float:
    """FLOPs that training needs a token: the forward pass, and twice that for the backward; nothing recomputed."""
    return 3 * sum(forward_flops_per_token(model, sequence_length_tokens).values())


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds that a program's products, memory traffic and collectives each take at a chip's peak."""

    compute_seconds: float
    memory_seconds: float
    network_seconds: float  # inside a slice
    slice_network_seconds: float  # between slices; 0 where a chip's figure is not known

    @property
    def seconds(self) -> float:
        """The program is not quicker: everything overlaps, and the slowest of them goes at its peak."""
        return max(dataclasses.astuple(self))

    @property
    def limit(self) -> str:
        """Which of them that is."""
        names = [field.name for field in dataclasses.fields(self)]
        return max(names, key=lambda name: getattr(self, name)).removesuffix("_seconds").replace("_", " ")


def roofline(program: hlo.Program, chip: Chip, kernel_flops: float = 0.0) -> Roofline:
    """The least time on one device of `chip`: its compiled products, memory traffic and collectives (as rings).

    `kernel_flops` are those of its hand-written kernels.
    """
    sent = sum(c.times * c.sent_bytes for c in counts.collectives(program))
    return Roofline(
        (counts.matmul_flops(program) + kernel_flops) / (chip.flops_per_second / chip.devices),
        counts.memory_traffic_bytes(program) / (chip.memory_bytes_per_second / chip.devices),
        sent / (chip.network_bytes_per_second / chip.devices),
        counts.inter_slice_bytes(program) * chip.devices / (chip.slice_network_bytes_per_second or math.inf),
    )
