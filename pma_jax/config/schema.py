"""Every key of a run: its type, its unit (in its name), its default and what it does.

Durations are configured in tokens; `Config` derives steps from them, here and nowhere else.
"""

import dataclasses


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
    """Where text comes from and how it becomes tokens."""

    source: str = "packaged"  # packaged (Python sources that are here) | files (globs) | hub (a Hugging Face dataset)
    package: str = ""  # for `packaged`: an installed package, such as scipy; empty: Python's standard library
    files: tuple[str, ...] = ()  # globs of .txt, .jsonl or .parquet files, for `files`
    text_field: str = "text"  # the field (JSONL) or column (Parquet, hub) that holds a document
    hub_name: str = ""  # dataset name or local path, for `hub`
    hub_subset: str = ""  # dataset configuration; empty: the default one
    hub_split: str = "train"  # dataset split
    task: str = "text"  # text (all is learned) | functions (of Python sources: signature and docstring -> body)
    pair_bytes: int = 1024  # for `functions`: a signature, docstring and body that are longer together are left out
    tokenizer: str = "bytes"  # bytes | bpe (trained on the corpus) | a path to a Hugging Face tokenizer.json
    bpe_vocabulary_size: int = 4096  # entries, for `bpe`
    held_out_percent: float = 2.0  # share of documents held out for evaluation, chosen by a hash of their name
    cache_dir: str = "~/.cache/pma_jax"  # prepared tokens live here, one folder a digest


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocabulary_size: int = 256  # V: rows of the embedding; at least the tokenizer's
    width: int = 128  # D: residual stream
    layers: int = 4  # number of blocks
    heads: int = 4  # N: query heads
    kv_heads: int = 4  # K: key and value heads; divides `heads`
    head_dim: int = 32  # H
    hidden: int = 384  # F: inner width of the gated MLP; not used by a mixture of experts
    experts: int = 0  # E: routed experts of a block, in place of the MLP; 0: dense
    experts_per_token: int = 2  # experts that a token is sent to
    expert_hidden: int = 128  # inner width of one expert
    shared_experts: int = 0  # experts that every token goes through, besides
    router_scores: str = "softmax"  # softmax | sigmoid: from the router's logits to scores
    router_normalized: bool = True  # the weights of a token's experts add up to 1; else they are the scores
    router_bias: bool = True  # a bias of each expert, moved by its load, helps to choose (never to weigh) experts
    qk_norm: bool = False  # RMSNorm on queries and keys, a scale per head dim
    tie_embeddings: bool = False  # the output projection is the embedding
    attention_window_tokens: int = 0  # positions that one sees, itself included; 0: all before it
    separator_token: int = -1  # the id that ends a document: packed ones then do not see each other; -1: they do
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    norm_epsilon: float = 1e-6
    compute_dtype: str = "float32"  # float32 | bfloat16; parameters stay float32
    remat: str = "none"  # what the backward pass recomputes: none | full | dots (all but matrix products)
    logits_chunk_tokens: int = 2048  # positions whose logits (times V, float32) a device holds at once in the loss
    scan_layers: bool = True  # lax.scan over the stacked blocks; False unrolls the same blocks

    @property
    def shared_hidden(self) -> int:
        """Inner width of the MLP that all tokens go through; 0: there is none."""
        return self.shared_experts * self.expert_hidden if self.experts else self.hidden


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, with weight decay on matrices only; and averaging while training, which snapshots and evaluation see."""

    name: str = "adamw"  # adamw | schedule_free_adamw (arXiv 2405.15682): the model is the average of its iterates
    b1: float = 0.9  # of schedule-free: how far gradients are taken towards the average
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # times the learning rate, on leaves with two or more dims
    clip_norm: float = 1.0  # global gradient norm; 0 turns clipping off
    ema_half_life_tokens: int = 0  # the model is a moving average over all steps, half of it so recent; 0: the weights


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a function of tokens: warm-up, stable, decay."""

    peak_rate: float = 3e-3
    warmup_tokens: int = 200_000  # linear from 0
    decay: str = "none"  # none (constant) | cosine | linear | minus_sqrt
    decay_start_tokens: int = 0  # where the decay begins; it ends at training.total_tokens
    final_rate: float = 0.0  # at the end of the decay


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The loop's own sizes."""

    total_tokens: int = 6_000_000  # the horizon
    sequence_length_tokens: int = 128  # L
    batch_size_sequences: int = 16  # B: sequences an optimizer step, over all devices
    accumulation_steps: int = 1  # microbatches an optimizer step; divides the batch
    z_loss_weight: float = 0.0  # times log(Z)^2, averaged over tokens
    router_bias_rate: float = 1e-3  # what a step adds to the bias of an expert with too few tokens, or takes away
    balance_loss_weight: float = 0.0  # times the auxiliary load-balancing loss (1 when even), summed over layers
    router_z_loss_weight: float = 0.0  # times log(Z)^2 of the router's logits, averaged over tokens, summed over layers
    log_interval_tokens: int = 100_000  # a line of metrics this often
    seed: int = 0  # of initialisation and data order
    start_from: str = ""  # a snapshot whose weights training begins with, such as an imported model; empty: random ones


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Snapshots (what merging reads) and states (what resuming and forking need)."""

    interval_tokens: int = 100_000  # V: tokens between snapshots
    kinds: tuple[str, ...] = ("point",)  # point: the weights; block_mean: their mean since the last mark; or both
    block_every_steps: int = 4  # j: a block mean adds every j-th step since its mark; one float32 model of memory
    window: int = 10  # N: snapshots that a merge needs; retention never goes below it
    keep_windows: int = 0  # newest windows (N snapshots each) kept; 0 keeps every snapshot
    archive_interval_tokens: int = 0  # besides, keep snapshots at multiples of this for good; 0: none
    state_interval_tokens: int = 1_000_000  # tokens between full states
    keep_states: int = 2  # newest states kept
    keep_states_at_tokens: tuple[int, ...] = ()  # besides, a state is saved and kept at each of these (for forks)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Validation loss, computed at every snapshot."""

    tokens: int = 65_536  # held-out tokens read each time, always the same ones
    batch_size_sequences: int = 64


@dataclasses.dataclass(frozen=True)
class PreviewConfig:
    """Merged models evaluated while the run goes on."""

    recipe: str = "sma"
    start_tokens: int = 0  # snapshots from before are left out: early on the weights drift more than they jitter
    windows: tuple[int, ...] = (10,)  # one preview each; empty: none. Host memory: the largest times the model


@dataclasses.dataclass(frozen=True)
class SpikesConfig:
    """What counts as a loss spike, and what the run does about one that does not recover by itself."""

    detect: bool = True  # watch loss and gradient norm of every step; transient spikes are told, and no more
    window_tokens: int = 400_000  # calm steps that give the median and its spread; nothing is flagged before it is full
    loss_z: float = 6.0  # spreads above the median loss, from which on a step is far out
    gradient_z: float = 8.0  # the same of the logarithm of the gradient norm (before clipping)
    minimum_rise_nats: float = 0.1  # a loss is not far out that rose by less, however quiet the window is
    confirm_steps: int = 5  # a spike begins when most of so many steps, the last ones, are far out; at most 30
    patience_tokens: int = 200_000  # a spike is irrecoverable whose loss has not come back after this
    skip_gradient_z: float = 0.0  # leave out updates whose gradient norm is this far out or not finite; 0: none
    attempts: int = 0  # times to go back to before a spike until the run is past it, then it stops; 0: only tell
    snapshots: int = 3  # N: newest snapshots from before the spike that are merged; a retry leaves out the newest
    recipe: str = "sma"  # of that merge
    optimizer: str = "reset"  # after going back: reset | keep (as the spike left it) | restore (the nearest state's)
    warmup_tokens: int = 0  # after going back: the rate rises linearly from 0 to the schedule's over this
    skip_data: bool = False  # after going back: pass over the data up to where the spike was declared irrecoverable


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1: all that are left."""

    data: int = -1  # replicas: batch is split, each part has whole parameters; goes across slices of TPUs
    fsdp: int = 1  # batch and parameters are split
    tensor: int = 1  # heads, hidden and vocabulary are split
    expert: int = 1  # batch and experts are split; tokens travel to their experts and back
    cpu_devices: int = 0  # where there is only a CPU: devices that it counts as (0: as JAX says, one); best one a core


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
        """Tokens an optimizer step."""
        return self.training.batch_size_sequences * self.training.sequence_length_tokens

    def steps(self, tokens: int) -> int:
        """Whole optimizer steps in a duration, at least one."""
        return max(tokens // self.batch_tokens, 1)

    def is_mark(self, tokens: int, interval_tokens: int) -> bool:
        """Whether the step that ended at `tokens` reached a multiple of `interval_tokens`.

        Marks are the k-th multiples, not k times a rounded step count: they never drift.
        """
        return tokens // interval_tokens > (tokens - self.batch_tokens) // interval_tokens

    def is_horizon(self, tokens: int) -> bool:
        """Whether the run is complete."""
        return tokens >= self.training.total_tokens

    def is_snapshot(self, tokens: int) -> bool:
        """Whether a snapshot is taken at `tokens`: at every V tokens and at the horizon."""
        return self.is_mark(tokens, self.checkpoint.interval_tokens) or self.is_horizon(tokens)

    def is_block_add(self, tokens: int) -> bool:
        """Whether the step that ended at `tokens` goes into the block mean: every j-th since the last snapshot mark.

        Counted from the mark, not from the start, so that intervals of equal steps add equally many.
        """
        since_mark = (tokens - self.batch_tokens) % self.checkpoint.interval_tokens // self.batch_tokens + 1
        return "block_mean" in self.checkpoint.kinds and since_mark % self.checkpoint.block_every_steps == 0

    def is_state(self, tokens: int) -> bool:
        """Whether a full state is saved at `tokens`: at its own marks, where one is named, and at the horizon."""
        every = self.is_mark(tokens, self.checkpoint.state_interval_tokens)
        return every or self.is_named_state(tokens) or self.is_horizon(tokens)

    def is_named_state(self, tokens: int) -> bool:
        """Whether the step that ended at `tokens` reached one of `checkpoint.keep_states_at_tokens`."""
        return any(tokens - self.batch_tokens < t <= tokens for t in self.checkpoint.keep_states_at_tokens)
