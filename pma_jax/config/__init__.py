"""A run's configuration: `defaults()` starts one, `resolve` checks and freezes it."""

from pma_jax.config.load import (
    defaults,
    differences,
    digest,
    from_json,
    load,
    override,
    resolve,
    to_json,
)
from pma_jax.config.schema import (
    FOLDERS,
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PreviewConfig,
    ScheduleConfig,
    SpikesConfig,
    TrainingConfig,
)

__all__ = [
    "FOLDERS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PreviewConfig",
    "ScheduleConfig",
    "SpikesConfig",
    "TrainingConfig",
    "defaults",
    "differences",
    "digest",
    "from_json",
    "load",
    "override",
    "resolve",
    "to_json",
]
