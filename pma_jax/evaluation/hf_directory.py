"""Directories of Hugging Face models, and the packages that score them. Does not import JAX."""

import importlib.util

from etils import epath

from pma_jax.config.errors import UserError
from pma_jax.merging.listing import is_run_directory
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.paths import expand_user, is_bucket


def is_model_directory(path: epath.PathLike) -> bool:
    """Return whether `path` is the directory of a Hugging Face model: its config.json names a `model_type`."""
    if is_bucket(path):
        return False
    config = expand_user(path) / "config.json"
    if not config.is_file() or is_run_directory(config.parent):
        return False
    return "model_type" in read_json_object(config)


def check_installed() -> None:
    """Raise UserError if lm-eval, or a package that its `hf` backend imports, is not installed."""
    needed = ("lm_eval", "torch", "transformers", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"a Hugging Face model is scored with {' and '.join(missing)}: pip install 'pma-jax[eval,torch]', or "
            "`pma import` it first if it is of a family that pma_jax has"
        )
