"""Every key of a run's configuration: type, choices, sign, unit (in its name), default and effect.

Durations are configured in tokens; `Config` derives steps from them, here and nowhere else. Comments of keys say only
what name and type do not.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Literal

ABOVE_ZERO, NOT_NEGATIVE = "above 0", "0 or more"  # annotations that config.rules checks
PositiveInt = Annotated[int, ABOVE_ZERO]
PositiveFloat = Annotated[float, ABOVE_ZERO]
NonNegativeInt = Annotated[int, NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, NOT_NEGATIVE]

# Decay shapes: the remaining share of (peak - final) after the fraction t in [0, 1] of the decay.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,  # PMA's annealing (arXiv 2505.12082, Section 3)
    "minus_sqrt": lambda t: 1 - math.sqrt(t),  # arXiv 2405.18392, Section 3
    "exponential": lambda t: 1 - 0.1 ** (1 - t),  # WSM's Figure 2 (arXiv 2507.17634); for merging only
}


@dataclasses.dataclass(frozen=True)
class SnapshotKind:
    """One kind of snapshot: its names on disk, in the metrics and in reports."""

    name: str  # in configurations and metadata
    folder: str  # subdirectory of a run directory
    record: str  # `kind` of its loss records in metrics.jsonl
    prefix: str  # of a merge's text in sweeps and reports, such as block/sma:10
    title: str  # in figures


SNAPSHOT_KINDS = {
    kind.name: kind
    for kind in (
        SnapshotKind("point", "snapshots", "evaluation", "", "points"),
        SnapshotKind("block_mean", "block_means", "block_mean", "block/", "block means"),
    )
}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Source of the text, and its conversion to tokens."""

    source: Literal["packaged", "files", "hub"] = "packaged"  # installed Python sources | globs | Hugging Face dataset
    package: str = ""  # for `packaged`: an installed package, such as scipy; empty: Python's standard library
    files: tuple[str, ...] = ()  # for `files`: globs of .txt, .jsonl or .parquet files
    text_field: str = "text"  # the field (JSONL) or column (Parquet, hub) with the document text
    hub_name: str = ""  # for `hub`: dataset name or local path
    hub_subset: str = ""  # for `hub`: dataset configuration; empty: the default one
    hub_split: str = "train"  # for `hub`: dataset split
    task: Literal["text", "functions"] = "text"  # all tokens | Python functions: signature and docstring -> body
    pair_bytes: PositiveInt = 1024  # for `functions`: drop functions longer than this in total
    tokenizer: str = "bytes"  # bytes | bpe (trained on the corpus) | path of a Hugging Face tokenizer.json
    bpe_vocabulary_size: int = 4096  # for `bpe`: number of entries
    held_out_percent: float = 2.0  # share of documents held out for evaluation, chosen by a hash of their name
    cache_dir: str = "~/.cache/pma_jax"  # prepared tokens, one subdirectory per digest


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocabulary_size: PositiveInt = 256  # V: rows of the embedding; at least the tokenizer's
    width: PositiveInt = 128  # D: residual stream
    layers: PositiveInt = 4  # number of blocks
    heads: PositiveInt = 4  # N: query heads
    kv_heads: PositiveInt = 4  # K: key and value heads; divides `heads`
    head_dim: PositiveInt = 32  # H
    hidden: PositiveInt = 384  # F: inner width of the gated MLP; unused by a mixture of experts
    experts: NonNegativeInt = 0  # E: routed experts per block, replacing the MLP; 0: dense
    experts_per_token: PositiveInt = 2  # routed experts that each token is sent to
    expert_hidden: PositiveInt = 128  # inner width of one expert
    shared_experts: NonNegativeInt = 0  # additional experts that process every token
    router_scores: Literal["softmax", "sigmoid"] = "softmax"  # maps the router's logits to scores
    router_normalized: bool = True  # normalise the weights of a token's experts to sum to 1; else use the scores
    router_bias: bool = True  # a load-adjusted bias per expert that affects the choice of experts, not their weights
    qk_norm: bool = False  # RMSNorm on queries and keys, with a scale per head dim
    tie_embeddings: bool = False  # use the embedding as output projection
    attention_window_tokens: NonNegativeInt = 0  # visible positions, including the current one; 0: all previous ones
    separator_token: int = -1  # id that ends a document and limits attention to within documents; -1: no limit
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    norm_epsilon: float = 1e-6
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # parameters stay float32
    remat: Literal["none", "full", "dots"] = "none"  # what the backward pass recomputes; dots: all but matmuls
    logits_chunk_tokens: PositiveInt = 2048  # positions whose float32 logits a device holds at once in the loss
    scan_layers: bool = True  # lax.scan over the stacked blocks; False unrolls them

    @property
    def shared_hidden(self) -> int:
        """Inner width of the MLP that processes every token; 0 if there is none."""
        return self.shared_experts * self.expert_hidden if self.experts else self.hidden


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with weight decay on matrices only, and averaging during training (used by snapshots and evaluation)."""

    name: Literal["adamw", "schedule_free_adamw"] = "adamw"  # schedule-free: arXiv 2405.15682
    b1: float = 0.9  # schedule-free: interpolation between iterate and average where gradients are evaluated
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # multiplied by the learning rate; applies to leaves with two or more dims
    clip_norm: float = 1.0  # global gradient norm; 0 turns clipping off
    ema_half_life_tokens: NonNegativeInt = 0  # half-life of a moving average of the weights; 0: no average


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a function of tokens: warm-up, stable, decay."""

    peak_rate: PositiveFloat = 3e-3
    warmup_tokens: int = 200_000  # linear from 0
    decay: Literal["none", "cosine", "linear", "minus_sqrt"] = "none"  # none: constant
    decay_start_tokens: int = 0  # start of the decay, which ends at training.total_tokens
    final_rate: float = 0.0  # at the end of the decay


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Sizes of the training loop."""

    total_tokens: PositiveInt = 6_000_000  # the horizon
    sequence_length_tokens: PositiveInt = 128  # L
    batch_size_sequences: PositiveInt = 16  # B: sequences per optimizer step, over all devices
    accumulation_steps: PositiveInt = 1  # microbatches per optimizer step; divides the batch
    z_loss_weight: float = 0.0  # of log(Z)^2, averaged over tokens
    router_bias_rate: NonNegativeFloat = 1e-3  # change per step of the bias of an over- or underloaded expert
    balance_loss_weight: NonNegativeFloat = 0.0  # of the load-balancing loss (1 when even), summed over layers
    router_z_loss_weight: NonNegativeFloat = 0.0  # of log(Z)^2 of router logits, mean over tokens, sum over layers
    log_interval_tokens: PositiveInt = 100_000  # tokens between records in metrics.jsonl
    seed: int = 0  # of initialisation and data order
    start_from: str = ""  # a snapshot with the initial weights, such as an imported model; empty: random weights


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Snapshots (what merging reads) and states (what resuming and forking need)."""

    interval_tokens: PositiveInt = 100_000  # V: tokens between snapshots
    kinds: tuple[str, ...] = ("point",)  # point: the weights; block_mean: their mean since the last mark; or both
    block_every_steps: PositiveInt = 4  # j: a block mean adds every j-th step since its mark; costs a float32 model
    window: PositiveInt = 10  # N: snapshots that a merge needs; retention keeps at least these
    keep_windows: int = 0  # newest windows (N snapshots each) kept; 0 keeps every snapshot
    archive_interval_tokens: int = 0  # also keep snapshots at multiples of this permanently; 0: none
    state_interval_tokens: PositiveInt = 1_000_000  # tokens between full states
    keep_states: PositiveInt = 2  # newest states kept
    keep_states_at_tokens: tuple[int, ...] = ()  # also save a state at each of these and keep it permanently, for forks


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Validation loss, computed at every snapshot."""

    tokens: PositiveInt = 65_536  # held-out tokens per evaluation, always the same ones
    batch_size_sequences: PositiveInt = 64


@dataclasses.dataclass(frozen=True)
class PreviewConfig:
    """Merged models evaluated during the run."""

    recipe: str = "sma"
    start_tokens: int = 0  # leave out earlier snapshots: early in training, weights drift more than they jitter
    windows: tuple[int, ...] = (10,)  # one preview per window; host memory: the largest window times the model


@dataclasses.dataclass(frozen=True)
class SpikesConfig:
    """Detection of loss spikes, and recovery from irrecoverable ones.

    A step is an outlier if its loss or gradient norm exceeds the median of the window by the given number of spreads.
    """

    detect: bool = True  # watch loss and gradient norm of every step; transient spikes are only logged
    window_tokens: PositiveInt = 400_000  # normal steps that give median and spread; detection starts once it is full
    loss_z: PositiveFloat = 6.0  # spreads above the median loss that make a step an outlier
    gradient_z: PositiveFloat = 8.0  # the same for the logarithm of the gradient norm (before clipping)
    minimum_rise_nats: NonNegativeFloat = 0.1  # a smaller rise of the loss is no outlier, however narrow the spread
    confirm_steps: PositiveInt = 5  # a spike starts when a majority of the last N steps are outliers; at most 30
    patience_tokens: PositiveInt = 200_000  # a spike whose loss has not recovered after this is irrecoverable
    skip_gradient_z: NonNegativeFloat = 0.0  # skip updates with an outlying or non-finite gradient norm; 0: never
    attempts: NonNegativeInt = 0  # rollbacks to before a spike, after which the run stops; 0: only log
    snapshots: PositiveInt = 3  # N: newest snapshots before the spike to merge; each retry drops the newest
    recipe: str = "sma"  # of that merge
    optimizer: Literal["reset", "keep", "restore"] = "reset"  # after a rollback; restore: from the nearest state
    warmup_tokens: NonNegativeInt = 0  # after a rollback: length of the linear warm-up to the scheduled rate
    skip_data: bool = False  # after a rollback: skip the data up to where the spike was declared irrecoverable


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis; one may be -1: all remaining devices."""

    data: int = -1  # splits the batch and replicates parameters; the only axis that crosses TPU slices
    fsdp: int = 1  # splits batch and parameters
    tensor: int = 1  # splits heads, hidden and vocabulary
    expert: int = 1  # splits batch and experts; tokens are exchanged between their devices
    cpu_devices: NonNegativeInt = 0  # devices to simulate on a CPU backend, best one per core; 0: JAX's default


@dataclasses.dataclass(frozen=True)
class Config:
    """A resolved, validated run configuration."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    preview: PreviewConfig = PreviewConfig()
    spikes: SpikesConfig = SpikesConfig()
    mesh: MeshConfig = MeshConfig()

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.training.batch_size_sequences * self.training.sequence_length_tokens

    def steps(self, tokens: int) -> int:
        """Convert a duration to full optimizer steps, at least one."""
        return max(tokens // self.batch_tokens, 1)

    def is_mark(self, tokens: int, interval_tokens: int) -> bool:
        """Whether the step that ended at `tokens` reached a multiple of `interval_tokens`.

        Marks are multiples in tokens, not of a rounded step count, and so do not drift.
        """
        return tokens // interval_tokens > (tokens - self.batch_tokens) // interval_tokens

    def is_horizon(self, tokens: int) -> bool:
        """Whether the run is complete."""
        return tokens >= self.training.total_tokens

    def is_snapshot(self, tokens: int) -> bool:
        """Whether a snapshot is saved at `tokens`: at every multiple of V and at the horizon."""
        return self.is_mark(tokens, self.checkpoint.interval_tokens) or self.is_horizon(tokens)

    def is_block_add(self, tokens: int) -> bool:
        """Whether the step that ended at `tokens` is added to the block mean: every j-th since the last snapshot mark.

        Counting from the mark, not from the start, gives intervals of equal length equally many summands.
        """
        since_mark = (tokens - self.batch_tokens) % self.checkpoint.interval_tokens // self.batch_tokens + 1
        return "block_mean" in self.checkpoint.kinds and since_mark % self.checkpoint.block_every_steps == 0

    def is_state(self, tokens: int) -> bool:
        """Whether a full state is saved at `tokens`: at its own marks, at configured tokens, and at the horizon."""
        every = self.is_mark(tokens, self.checkpoint.state_interval_tokens)
        return every or self.is_named_state(tokens) or self.is_horizon(tokens)

    def is_named_state(self, tokens: int) -> bool:
        """Whether the step that ended at `tokens` reached one of `checkpoint.keep_states_at_tokens`."""
        return any(tokens - self.batch_tokens < t <= tokens for t in self.checkpoint.keep_states_at_tokens)
