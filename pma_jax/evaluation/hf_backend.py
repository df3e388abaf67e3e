"""Hugging Face models of any family, scored through lm-eval's `hf` backend (the extra `torch`)."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from pma_jax.config.errors import UserError, first_line
from pma_jax.evaluation.task_scores import TaskScores, quiet, score
from pma_jax.runs.directory import is_run
from pma_jax.runtime import hosts
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.paths import as_path, is_bucket

BATCH_SIZE = 16  # sequences


def is_model_directory(path: epath.PathLike) -> bool:
    """Return whether `path` is the directory of a Hugging Face model: its config.json names a `model_type`."""
    config = as_path(path) / "config.json"
    if is_bucket(path) or is_run(path) or not config.is_file():
        return False
    return "model_type" in read_json_object(config)


def check_installed() -> None:
    """Raise UserError if torch or transformers is not installed."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"a Hugging Face model is scored with {' and '.join(missing)}: pip install 'pma-jax[eval,torch]', or "
            "`pma import` it first if it is of a family that pma_jax has"
        )


def score_directory(path: str, tasks: Mapping[str, Any], limit: int | None) -> TaskScores:
    """Score a Hugging Face model on tasks. Code of the model's repository is not run.

    Raises:
        UserError: transformers cannot load it, or the command has several processes.
    """
    if hosts.process_index_and_count()[1] > 1:
        raise UserError(f"{path} is a Hugging Face model, which one process scores: leave out --distributed")
    harness = load_model(path)
    return {"tasks": score(harness, tasks, limit), "truncated": harness.truncated}


def load_model(path: str) -> Any:
    """Load a model as lm-eval's `hf` backend; its attribute `truncated` counts the sequences that were cut."""
    from lm_eval.models.huggingface import HFLM

    class CountingModel(HFLM):
        truncated = 0

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
            self.truncated += sum(len(request[1]) + len(request[2]) > self.max_length + 1 for request in requests)
            return super()._loglikelihood_tokens(requests, **options)

    with quiet():
        try:
            return CountingModel(
                pretrained=str(Path(path)), dtype="auto", batch_size=BATCH_SIZE, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"{path} is no model that transformers loads: {first_line(error)}") from error
