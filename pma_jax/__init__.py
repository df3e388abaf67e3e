"""Pre-trained model averaging in JAX: train by tokens, snapshot, merge, and see what annealing would give.

import pma_jax as pma
run = pma.open_run("runs/demo")
params = pma.average(run.snapshots[-10:], pma.recipes.sma(10))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pma_jax.merging import recipes
    from pma_jax.merging.api import average, merge
    from pma_jax.reporting import frames
    from pma_jax.runs.directory import open_run
    from pma_jax.runs.snapshots import read_snapshot
    from pma_jax.training.loop import train

__all__ = ["average", "frames", "merge", "open_run", "read_snapshot", "recipes", "train"]

__version__ = "0.1.0"

_HOMES = {
    "average": "pma_jax.merging.api",
    "merge": "pma_jax.merging.api",
    "open_run": "pma_jax.runs.directory",
    "read_snapshot": "pma_jax.runs.snapshots",
    "train": "pma_jax.training.loop",
}
_MODULES = {"frames": "pma_jax.reporting.frames", "recipes": "pma_jax.merging.recipes"}


def __getattr__(name: str) -> Any:
    # Imported when first used: `pma --help` must not wait for JAX.
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pma_jax' has no attribute {name!r}")
