"""Run configuration: `defaults()` creates a mutable one, `resolve` validates and freezes it."""

from pma_jax.config.choices import DECAY_SHAPES as DECAY_SHAPES
from pma_jax.config.choices import SNAPSHOT_KINDS as SNAPSHOT_KINDS
from pma_jax.config.choices import SnapshotKind as SnapshotKind
from pma_jax.config.load import defaults as defaults
from pma_jax.config.load import differences_affecting_results as differences_affecting_results
from pma_jax.config.load import digest as digest
from pma_jax.config.load import from_json as from_json
from pma_jax.config.load import load as load
from pma_jax.config.load import override as override
from pma_jax.config.load import resolve as resolve
from pma_jax.config.load import resolve_stored as resolve_stored
from pma_jax.config.load import to_json as to_json
from pma_jax.config.schema import CheckpointConfig as CheckpointConfig
from pma_jax.config.schema import Config as Config
from pma_jax.config.schema import DataConfig as DataConfig
from pma_jax.config.schema import EvaluationConfig as EvaluationConfig
from pma_jax.config.schema import MeshConfig as MeshConfig
from pma_jax.config.schema import ModelConfig as ModelConfig
from pma_jax.config.schema import OptimizerConfig as OptimizerConfig
from pma_jax.config.schema import PreviewConfig as PreviewConfig
from pma_jax.config.schema import RuntimeConfig as RuntimeConfig
from pma_jax.config.schema import ScheduleConfig as ScheduleConfig
from pma_jax.config.schema import SpikesConfig as SpikesConfig
from pma_jax.config.schema import TrackingConfig as TrackingConfig
from pma_jax.config.schema import TrainingConfig as TrainingConfig
