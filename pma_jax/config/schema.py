"""Dataclasses of a run's configuration, one per section.

Durations are configured in tokens; only the methods of `Config` convert them to steps. The name of a field contains its
unit. The comment above or after a field is its entry in the documentation's table of keys, so it must be
self-contained.
"""

import dataclasses
from typing import Annotated, Literal

from pma_jax.config.bounds import (
    MAX_INTEGER,
    AxisSize,
    NonNegativeFloat,
    Number,
    NumberOrNone,
    PositiveFloat,
    PositiveTokens,
    Range,
    Sequences,
    Text,
    TokenCount,
    Width,
)
from pma_jax.config.optimizer_schema import OptimizerConfig
from pma_jax.config.replicas_schema import ReplicasConfig


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Source of the text, and how it is tokenized."""

    # Where the text comes from. `packaged`: the sources of an installed Python package; `files`: local files;
    # `tokens`: files of ids, which `tokenizer` has made; `hub`: a Hugging Face dataset.
    source: Literal["packaged", "files", "tokens", "hub"] = "packaged"
    # For `packaged`: name of an installed package, such as scipy; or `stdlib-without-tests`; or, for the packages that
    # pma_jax requires, `libraries-without-tests`; empty: Python's standard library, half of which is its tests.
    package: str = ""
    # For `files`: globs of .txt, .jsonl or .parquet files; for `tokens`: of .npy or .bin files (docs/training.md).
    files: tuple[Text, ...] = ()
    text_field: str = "text"  # for `files` and `hub`: field (JSONL) or column (Parquet, dataset) that holds the text
    hub_name: str = ""  # for `hub`: name of a dataset, or local path of one
    hub_subset: str = ""  # for `hub`: name of the dataset's configuration (subset); empty: its default one
    hub_split: str = "train"  # for `hub`: name of the dataset's split
    # Training task. `text`: predict every token of a document; `functions`: documents are single Python functions, and
    # only the body is predicted, from the signature and the docstring.
    task: Literal["text", "functions"] = "text"
    # For `functions`: maximum size of a function in bytes; longer functions are dropped.
    pair_bytes: Annotated[int, Range(1, 2**30)] = 1024
    # `bytes`: one token per byte of UTF-8; `bpe`: a byte-level BPE trained on the corpus; any other value: path of a
    # Hugging Face tokenizer.json.
    tokenizer: Text = "bytes"
    bpe_vocabulary_size: Annotated[int, Range(257, 2**24)] = 4096  # for `bpe`: number of tokens
    # Percentage of documents that are held out for evaluation, between 0 and 100, chosen by a hash of their names. They
    # are divided into three parts: to choose models, to report losses, and to fit weights. Lower it for large text.
    held_out_percent: Annotated[float, Range(0, 100, True, True)] = 15.0
    cache_dir: Text = "~/.cache/pma_jax"  # prepared tokens, which runs on the same data share; may be in a bucket


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocabulary_size: Width = 256  # V: rows of the embedding table; at least the tokenizer's vocabulary size
    width: Width = 128  # D: width of the residual stream
    layers: Number = 4  # number of transformer blocks
    heads: Number = 4  # N: number of query heads
    kv_heads: Number = 4  # K: number of key and value heads; must divide `heads`
    head_dim: Annotated[int, Range(2, 2**16)] = 32  # H: width of one attention head; must be even, for rotary positions
    hidden: Width = 384  # F: inner width of the gated MLP; unused by a mixture of experts
    experts: NumberOrNone = 0  # E: routed experts per block, which replace the MLP; 0: a dense model
    experts_per_token: Number = 2  # number of routed experts that process each token; at most `experts`
    expert_hidden: Width = 128  # inner width of one expert's gated MLP
    shared_experts: NumberOrNone = 0  # number of additional experts per block that process every token
    router_scores: Literal["softmax", "sigmoid"] = "softmax"  # function that maps the router's logits to scores
    # true: normalise the scores of a token's chosen experts to sum to 1 before weighting; false: use them unchanged.
    router_normalized: bool = True
    # Auxiliary-loss-free load balancing: add a per-expert bias to the scores when choosing experts, and adjust it at
    # every step. The weights of the chosen experts do not depend on the bias.
    router_bias: bool = True
    # Place of a block's norms. `before`: on the inputs of attention and MLP; `after`: on their outputs, before they are
    # added to the residual stream (arXiv 2501.00656).
    norm_position: Literal["before", "after"] = "before"
    qk_norm: bool = False  # normalise queries and keys by RMSNorm, with learned scales
    # For `qk_norm`: dims of one norm. `head`: those of a head, and all heads share the scale; `projection`: all heads'.
    qk_norm_over: Literal["head", "projection"] = "head"
    tie_embeddings: bool = False  # use the transposed embedding as output projection
    # Sliding window: number of positions that a token attends to, including its own; 0: full causal attention.
    attention_window_tokens: Annotated[int, Range(0, 2**31 - 1)] = 0
    # Id of the token that ends a document, so that tokens attend only to tokens of their own document; -1: attend
    # across document boundaries.
    separator_token: Annotated[int, Range(-1, 2**24)] = -1
    rope_theta: PositiveFloat = 10_000.0  # base of the wavelengths of the rotary position embedding
    no_rope_interval: NumberOrNone = 0  # every n-th block has no rotary positions (arXiv 2501.18795); 0: all have them
    norm_epsilon: Annotated[float, Range(0, 1)] = 1e-6  # constant that RMSNorm adds to the mean square
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of activations; parameters stay float32
    # Activations that the backward pass recomputes to save memory. `none`: none; `full`: all inside a block;
    # `dots`: all inside a block except the results of matrix products.
    remat: Literal["none", "full", "dots"] = "none"
    # Chunk size of the loss: number of positions per device whose float32 logits are in memory at the same time.
    logits_chunk_tokens: Annotated[int, Range(1, 2**31 - 1)] = 2048
    scan_layers: bool = True  # true: lax.scan over the stacked blocks; false: unroll them, which compiles more slowly

    @property
    def unrouted_hidden(self) -> int:
        """Inner width of the MLP that is applied to every token.

        In a dense model `hidden`; in a mixture of experts that of all shared experts together, 0 if there are none.
        """
        return self.shared_experts * self.expert_hidden if self.experts else self.hidden


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a function of tokens: linear warm-up, constant, decay."""

    peak_rate: PositiveFloat = 3e-3  # learning rate between warm-up and decay
    warmup_tokens: TokenCount = 200_000  # length of the linear warm-up from 0 to the peak rate
    # Shape of the decay. none: constant to the end; inverse_sqrt: needs no horizon, see `decay_start_tokens`.
    decay: Literal["none", "cosine", "linear", "minus_sqrt", "inverse_sqrt"] = "none"
    # Tokens trained at which the decay starts. It ends at `training.total_tokens`, but for inverse_sqrt, which does not
    # end: the rate is then the peak rate times the square root of `decay_start_tokens` / tokens.
    decay_start_tokens: TokenCount = 0
    final_rate: NonNegativeFloat = 0.0  # learning rate at the end of the decay; inverse_sqrt has none

    @property
    def is_annealed(self) -> bool:
        """Whether the rate decays to `final_rate` at the horizon."""
        return self.decay not in ("none", "inverse_sqrt")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length of a run, size of its steps, auxiliary losses and initial parameters."""

    total_tokens: PositiveTokens = 6_000_000  # length of the run; it ends with the first step that reaches it
    sequence_length_tokens: Annotated[int, Range(1, 2**27)] = 128  # L: tokens per sequence
    batch_size_sequences: Sequences = 16  # B: sequences per optimizer step, over all devices
    accumulation_steps: Sequences = 1  # microbatches per optimizer step; must divide `batch_size_sequences`
    # Weight of the z-loss in the objective. The z-loss is the mean over tokens of the squared log-sum-exp of the output
    # logits.
    z_loss_weight: NonNegativeFloat = 0.0
    # Change per step of an expert's bias (`model.router_bias`): up if its load is below the mean, down if above.
    router_bias_rate: NonNegativeFloat = 1e-3
    # Weight of the experts' load-balancing loss in the objective. The loss is summed over layers; a layer contributes 1
    # if its load is balanced.
    balance_loss_weight: NonNegativeFloat = 0.0
    # Weight of the routers' z-loss in the objective. This z-loss is the mean over tokens of the squared log-sum-exp of
    # the router logits, summed over layers.
    router_z_loss_weight: NonNegativeFloat = 0.0
    log_interval_tokens: PositiveTokens = 100_000  # tokens between training records in metrics.jsonl
    seed: Annotated[int, Range(-MAX_INTEGER - 1)] = 0  # seed of the initial parameters and of the order of the data
    start_from: str = ""  # path of a snapshot, such as an imported model, with the initial weights; empty: random ones
    # Token counts at which three steps are profiled. The trace of JAX's profiler is stored in RUN/tensorboard, whose
    # Profile page shows it. Process 0 records its devices.
    profile_at_tokens: tuple[PositiveTokens, ...] = ()


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and how many to keep, of snapshots and training states.

    Snapshots contain only parameters and are the input of merges. A training state contains everything needed to resume
    the run, or to fork it: to start a new run from that state.
    """

    interval_tokens: PositiveTokens = 100_000  # tokens between snapshots
    # What snapshots contain. `point`: the parameters at that step; `block_mean`: their mean over the interval
    # since the previous snapshot; or both: `point,block_mean`. Previews merge the first kind. `replica` after these:
    # also the parameters of each worker of `replicas`.
    kinds: tuple[str, ...] = ("point",)
    # j: a block mean averages the parameters after every j-th step. The running mean takes as much memory as the
    # parameters in float32.
    block_every_steps: Annotated[int, Range(1, 10**12)] = 4
    # Snapshots per merge: the unit of `keep_windows`, the merge in the output of `pma plan`, and the window of
    # `pma watch` if `preview.windows` is empty.
    window: Number = 10
    # Keep the newest `keep_windows` * `window` snapshots, and until the end of the run those that the previews of a
    # resumed run need; 0: keep all.
    keep_windows: NumberOrNone = 0
    # Also keep snapshots at multiples of this number of tokens permanently; 0: none.
    archive_interval_tokens: TokenCount = 0
    state_interval_tokens: PositiveTokens = 1_000_000  # tokens between training states
    keep_states: Number = 2  # number of newest training states to keep; see also `spikes.optimizer`
    # Token counts at which an additional training state is saved and kept permanently, for example to fork from.
    keep_states_at_tokens: tuple[TokenCount, ...] = ()


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Validation loss on held-out text, computed at every snapshot."""

    # Held-out tokens per evaluation, a sample of all documents of a part; every evaluation of a part uses the same.
    tokens: PositiveTokens = 65_536
    batch_size_sequences: Sequences = 64  # sequences per evaluation batch, over all devices
    # Tasks of lm-eval that each point snapshot and each preview is scored on, such as pma:last_line; needs the extra
    # `eval`. None by default.
    tasks: tuple[Text, ...] = ()
    tasks_limit: Number = 100  # documents of each task, from its first


@dataclasses.dataclass(frozen=True)
class PreviewConfig:
    """Merges of the newest snapshots, evaluated during the run."""

    recipe: Text = "sma"  # recipe of the merges, such as sma or ema:alpha=0.2
    # Exclude snapshots taken before this number of trained tokens: early in training the parameters change too fast
    # for averaging to help.
    start_tokens: TokenCount = 0
    # Window sizes in snapshots; each gives one preview per snapshot. Host memory holds as many models as the largest
    # window.
    windows: tuple[Number, ...] = (10,)


@dataclasses.dataclass(frozen=True)
class SpikesConfig:
    """Detection of loss spikes, and recovery from irrecoverable ones by rolling back to a merge.

    A step is an outlier if the robust z-score of its loss or of its log gradient norm exceeds a threshold. The z-score
    is the distance from the median of the window (the recent steps outside spikes), in robust standard deviations. One
    robust standard deviation is 1.4826 times the median absolute deviation, which estimates the standard deviation of
    Gaussian noise.
    """

    detect: bool = True  # monitor loss and gradient norm of every step; log spikes; see also `attempts`
    window_tokens: PositiveTokens = 400_000  # length of the window; nothing is detected before it is full
    loss_z: PositiveFloat = 6.0  # threshold of the loss, in robust standard deviations above the median
    # Threshold of the log gradient norm (before clipping), in robust standard deviations above its median.
    gradient_z: PositiveFloat = 8.0
    # A step is an outlier by its loss only if the loss is also at least this far above the median, in nats per token.
    minimum_rise_nats: NonNegativeFloat = 0.1
    # A spike starts when more than half of the last `confirm_steps` steps are outliers; at most 30: the detector keeps
    # one bit per step in an int32.
    confirm_steps: Annotated[int, Range(1, 30)] = 5
    # A spike is declared irrecoverable if its loss has not recovered after this number of tokens.
    patience_tokens: PositiveTokens = 200_000
    # Skip the update of a step if its gradient norm is not finite, or its log gradient norm exceeds this threshold, in
    # robust standard deviations above the median; 0: never.
    skip_gradient_z: NonNegativeFloat = 0.0
    # Maximum number of rollbacks per irrecoverable spike; the run then stops with an error. 0: only log spikes.
    attempts: NumberOrNone = 0
    snapshots: Number = 3  # snapshots before the spike that a rollback merges; each retry drops the newest one
    recipe: Text = "sma"  # recipe of the merge that a rollback starts from
    # Optimizer moments after a rollback. `reset`: initialised; `keep`: unchanged; `restore`: read from the training
    # state closest to the merge, among those before the spike; one is kept while a spike is open.
    optimizer: Literal["reset", "keep", "restore"] = "reset"
    # Length of the linear warm-up from 0 to the scheduled learning rate after a rollback; 0: none.
    warmup_tokens: TokenCount = 0
    # Data after a rollback. false: the same batches again; true: continue after the batch at which the spike was
    # declared irrecoverable.
    skip_data: bool = False


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each axis of the mesh. One axis may be -1: all remaining devices."""

    data: AxisSize = -1  # shards the batch, replicates the parameters; may span several TPU slices
    fsdp: AxisSize = 1  # shards the batch and the parameters (fully sharded data parallelism)
    tensor: AxisSize = 1  # shards attention heads, the MLP's inner width and the vocabulary (tensor parallelism)
    expert: AxisSize = 1  # shards the batch and the experts; its devices exchange tokens (all-to-all)
    # Splits the workers of `replicas`, which communicate only when they average; goes across TPU slices first.
    replica: AxisSize = 1
    # Devices to simulate on a CPU backend; fastest with one per core. 0: leave JAX's setting unchanged.
    cpu_devices: Annotated[int, Range(0, 1024)] = 0


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """What stays on a disk or in a bucket for the next process. Its keys do not affect the results of a run."""

    # Directory of compiled programs, local or in a bucket, which all processes of a run and its restarts share: a
    # program that is there is loaded, not compiled. Empty: the one that JAX_COMPILATION_CACHE_DIR names, if any.
    # Whoever can write to it can run code in the processes that read it.
    compile_cache_dir: str = ""


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """An experiment tracker that gets the metrics of a run, as TensorBoard does. It does not affect the results."""

    # Library to log to, from process 0; it needs the extra of its name. Its own environment variables apply, such as
    # WANDB_MODE=offline and TRACKIO_DIR.
    name: Literal["none", "wandb", "trackio"] = "none"
    project: Text = "pma_jax"  # project of the tracker to which the run belongs


@dataclasses.dataclass(frozen=True)
class Config:
    """The complete, validated configuration of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()  # noqa: RUF009 (a frozen dataclass, in another file)
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    preview: PreviewConfig = PreviewConfig()
    spikes: SpikesConfig = SpikesConfig()
    replicas: ReplicasConfig = ReplicasConfig()  # noqa: RUF009 (a frozen dataclass, in another file)
    mesh: MeshConfig = MeshConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.training.batch_size_sequences * self.training.sequence_length_tokens

    def tokens_to_steps(self, tokens: int) -> int:
        """Convert a duration in tokens to full optimizer steps, at least one."""
        return max(tokens // self.batch_tokens, 1)

    def is_mark(self, tokens: int, interval_tokens: int) -> bool:
        """Return whether the step that ends at `tokens` reaches a mark: a multiple of `interval_tokens`.

        The interval is not rounded to steps, so rounding errors do not accumulate.
        """
        return tokens // interval_tokens > (tokens - self.batch_tokens) // interval_tokens

    def is_run_complete(self, tokens: int) -> bool:
        """Return whether a run that has trained on `tokens` is complete."""
        return tokens >= self.training.total_tokens

    def is_snapshot_due(self, tokens: int) -> bool:
        """Return whether a snapshot is saved after the step that ends at `tokens`.

        Snapshots are saved at the marks of `checkpoint.interval_tokens` and at the end of the run.
        """
        return self.is_mark(tokens, self.checkpoint.interval_tokens) or self.is_run_complete(tokens)

    def snapshot_number(self, tokens: int) -> int:
        """Return the number of the snapshot saved at `tokens`: the first mark has 1, and each later snapshot one more.

        Snapshots of a run whose numbers are not consecutive have another one between them, which is missing.
        """
        marks = tokens // self.checkpoint.interval_tokens
        return marks + (not self.is_mark(tokens, self.checkpoint.interval_tokens))  # the horizon may lie between marks

    @property
    def snapshots_to_resume(self) -> int:
        """Number of snapshots up to a training state that a run needs in order to resume from that state exactly.

        Previews merge the newest ones, and a rollback those from before the spike.
        """
        return max([self.snapshots_to_roll_back, *self.preview.windows])

    @property
    def snapshots_to_roll_back(self) -> int:
        """Number of newest snapshots that a rollback may need; 0 without rollbacks.

        A spike is declared irrecoverable about `spikes.patience_tokens` after it begins. The snapshots from before it
        must exist then: `spikes.snapshots`, and one more for each retry.
        """
        if not self.spikes.attempts:
            return 0
        during_patience = self.spikes.patience_tokens // self.checkpoint.interval_tokens + 1
        return during_patience + self.spikes.snapshots + self.spikes.attempts - 1

    def is_block_mean_step(self, tokens: int) -> bool:
        """Return whether the parameters after the step that ends at `tokens` are added to the block mean.

        Every `checkpoint.block_every_steps`-th step after a mark is added. Steps are counted from the mark, not from
        the start of the run, so that the means of intervals of equal length average equally many steps.
        """
        steps_since_mark = ((tokens - self.batch_tokens) % self.checkpoint.interval_tokens) // self.batch_tokens + 1
        return "block_mean" in self.checkpoint.kinds and steps_since_mark % self.checkpoint.block_every_steps == 0

    def is_bema_step(self, tokens: int) -> bool:
        """Return whether the bias-corrected average begins with, or adds, the parameters after the step at `tokens`.

        It begins with the step that reaches `optimizer.bema_start_tokens`, from which its intervals are counted.
        """
        since_start = tokens - self.optimizer.bema_start_tokens
        return since_start >= 0 and self.is_mark(since_start, self.optimizer.bema_interval_tokens)

    def is_state_due(self, tokens: int) -> bool:
        """Return whether a training state is saved after the step that ends at `tokens`.

        States are saved at the marks of `checkpoint.state_interval_tokens`, at `checkpoint.keep_states_at_tokens` and
        at the end of the run.
        """
        is_mark = self.is_mark(tokens, self.checkpoint.state_interval_tokens)
        return is_mark or self.is_permanent_state(tokens) or self.is_run_complete(tokens)

    def is_permanent_state(self, tokens: int) -> bool:
        """Return whether the step that ends at `tokens` reaches one of `checkpoint.keep_states_at_tokens`."""
        return any(tokens - self.batch_tokens < t <= tokens for t in self.checkpoint.keep_states_at_tokens)
