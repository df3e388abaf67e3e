"""Peak rates of TPU chips, FLOPs of a decoder, and the roofline (lower bound of the time) of a compiled program."""

import dataclasses
import math
import re

from pma_jax.config import ModelConfig
from pma_jax.config.errors import UserError
from pma_jax.planning import counts, hlo

_TOPOLOGIES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_TOPOLOGIES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published specification of a type of TPU chip. Rates are per chip."""

    flops_per_second: float  # peak rate of bfloat16 matrix products
    memory_bytes: int  # HBM
    memory_bytes_per_second: float
    network_bytes_per_second: float  # ICI: bandwidth of sending, over all links of a chip
    slice_network_bytes_per_second: float | None  # a chip's share of the network between slices; None: not published
    devices: int  # JAX devices per chip, which share its memory and links
    topologies: tuple[str, ...]  # of the slices that Google Cloud lists; others may compile too
    source: str  # web page of the specification
    libtpu_config: str = ""  # libtpu's name of the configuration with one device per chip; "": the default


CHIPS_PER_HOST = 4  # of every machine type of a slice with several hosts, such as ct6e-standard-4t
# The sources state ICI bandwidth either for one direction or for the sum of both: for v5e, 1600 Gbit/s and 400 GB/s.
CHIPS = {
    "v4": Chip(
        flops_per_second=275e12,
        memory_bytes=32 * 2**30,
        memory_bytes_per_second=1.2e12,
        network_bytes_per_second=300e9,
        slice_network_bytes_per_second=None,
        devices=1,
        topologies=_TOPOLOGIES_3D,
        source="cloud.google.com/tpu/docs/v4: 2400 Gbit/s of ICI",
        libtpu_config="megacore",
    ),
    "v5e": Chip(
        flops_per_second=197e12,
        memory_bytes=16 * 2**30,
        memory_bytes_per_second=819e9,
        network_bytes_per_second=200e9,
        slice_network_bytes_per_second=6.4e12 / 8 / 256,
        devices=1,
        topologies=_TOPOLOGIES_2D,
        source="cloud.google.com/tpu/docs/v5e: ICI 400 GB/s both ways, 6.4 Tbit/s to the data center per 256 chips",
    ),
    "v5p": Chip(
        flops_per_second=459e12,
        memory_bytes=95 * 2**30,
        memory_bytes_per_second=2765e9,
        network_bytes_per_second=600e9,
        slice_network_bytes_per_second=None,
        devices=1,
        topologies=(*_TOPOLOGIES_3D, "16x16x16", "16x16x24"),
        source="cloud.google.com/tpu/docs/v5p: ICI 1200 GB/s in both directions",
    ),
    "v6e": Chip(
        flops_per_second=918e12,
        memory_bytes=32 * 2**30,
        memory_bytes_per_second=1638e9,
        network_bytes_per_second=400e9,
        slice_network_bytes_per_second=25.6e12 / 8 / 256,
        devices=1,
        topologies=_TOPOLOGIES_2D,
        source="cloud.google.com/tpu/docs/v6e: ICI 800 GB/s both ways, 25.6 Tbit/s to the data center per 256 chips",
    ),
    "tpu7x": Chip(
        flops_per_second=2307e12,
        memory_bytes=192 * 2**30,
        memory_bytes_per_second=7380e9,
        network_bytes_per_second=600e9,
        slice_network_bytes_per_second=None,
        devices=2,
        topologies=_TOPOLOGIES_3D,
        source="cloud.google.com/tpu/docs/tpu7x: ICI 1200 GB/s in both directions",
    ),
}


def format_known_topologies(chip: str | None = None) -> str:
    """Format the topologies of one type of chip, or of all types, in one line."""
    return "; ".join(f"{name}:{{{','.join(c.topologies)}}}" for name, c in CHIPS.items() if chip in (None, name))


def parse_topology(name: str) -> tuple[int, str, tuple[int, ...]]:
    """Split a name such as `2*v5p:4x4x8` into the number of slices, the type of chip, and the shape of a slice.

    Raises:
        UserError: It is not of this form, or there is no such chip.
    """
    parts = re.fullmatch(r"(?:([1-9]\d{0,5})\*)?([^:*]+):([1-9]\d{0,5}(?:x[1-9]\d{0,5}){1,2})", name)
    if parts is None or parts[2] not in CHIPS:
        raise UserError(
            f"unknown topology {name!r}: give a chip and a shape, one of {format_known_topologies()}; prefix the "
            "number of slices if there are several, such as 2*v5e:4x4"
        )
    return int(parts[1] or 1), parts[2], tuple(map(int, parts[3].split("x")))


def active_matrix_parameters(model: ModelConfig) -> int:
    """Return the number of parameters, in matrices of the blocks, that one token is multiplied by.

    In a mixture of experts these are the attention, the shared experts, the router, and K of the routed experts.
    Embedding and output projection are not counted.
    """
    attention = 2 * model.width * (model.heads + model.kv_heads) * model.head_dim
    routed = model.experts_per_token * model.expert_hidden if model.experts else 0
    router = model.width * model.experts
    return model.layers * (attention + 3 * model.width * (model.unrouted_hidden + routed) + router)


def forward_flops_per_token(model: ModelConfig, sequence_length_tokens: int) -> dict[str, float]:
    """Return the FLOPs per token of the forward pass, by part, counting 2 per multiply-add.

    Norms, rotations and the softmax are not counted, as in Kaplan et al. (arXiv 2001.08361, Section 2.1).

    Args:
        model: The model.
        sequence_length_tokens: Positions per sequence, L.

    Returns:
        `parameters`: the matrices of the blocks. `attention`: the scores and the weighted sum of values, for the keys
        that a position attends to; without a window these are (L + 1) / 2 on average, where PaLM (arXiv 2204.02311,
        Appendix B) counts all L. `output_projection`: the projection to the vocabulary.
    """
    L, window = sequence_length_tokens, model.attention_window_tokens or sequence_length_tokens
    first = min(window, L)  # positions that attend to all before them; later ones attend to `window` keys
    keys_per_query = (first * (first + 1) / 2 + (L - first) * window) / L
    return {
        "parameters": 2.0 * active_matrix_parameters(model),
        "attention": 4.0 * model.layers * model.heads * model.head_dim * keys_per_query,
        "output_projection": 2.0 * model.width * model.vocabulary_size,
    }


def training_flops_per_token(model: ModelConfig, sequence_length_tokens: int) -> float:
    """Return the FLOPs per token of training: the forward pass and twice as many for the backward, no recomputation."""
    return 3 * sum(forward_flops_per_token(model, sequence_length_tokens).values())


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds that each kind of work of a program takes at the peak rate of a device."""

    compute_seconds: float  # matrix products
    memory_seconds: float  # HBM traffic
    network_seconds: float  # collectives
    slice_network_seconds: float  # collectives between slices; 0 if the rate is unknown

    @property
    def seconds(self) -> float:
        """Lower bound of the program's time: the largest part, because all parts can overlap."""
        return max(dataclasses.astuple(self))

    @property
    def limit(self) -> str:
        """Name of the largest part: "compute", "memory", "network" or "slice network"."""
        names = [field.name for field in dataclasses.fields(self)]
        return max(names, key=lambda name: getattr(self, name)).removesuffix("_seconds").replace("_", " ")


def roofline(program: hlo.Program, chip: Chip, kernel_flops: float = 0.0) -> Roofline:
    """Compute a lower bound of the time of a program on one device of `chip`.

    Args:
        program: The compiled program; its collectives are assumed to be rings.
        chip: The peak rates.
        kernel_flops: FLOPs of the program's custom kernels, which the compiled text does not state.
    """
    sent = sum(c.executions * c.sent_bytes_per_execution for c in counts.collectives(program))
    return Roofline(
        (counts.matmul_flops(program) + kernel_flops) / (chip.flops_per_second / chip.devices),
        counts.memory_traffic_bytes(program) / (chip.memory_bytes_per_second / chip.devices),
        sent / (chip.network_bytes_per_second / chip.devices),
        counts.inter_slice_sent_bytes(program) * chip.devices / (chip.slice_network_bytes_per_second or math.inf),
    )
