"""Hugging Face models of any family, scored through lm-eval's `hf` backend (the extra `torch`)."""

from collections.abc import Mapping
from typing import Any

from pma_jax.config.errors import UserError, first_line
from pma_jax.evaluation.task_scores import TaskScores, quiet, score
from pma_jax.runtime import hosts
from pma_jax.storage.paths import expand_user

BATCH_SIZE = 16  # sequences


def score_directory(path: str, tasks: Mapping[str, Any], limit: int | None) -> TaskScores:
    """Score a Hugging Face model on tasks. Code of the model's repository is not run.

    Raises:
        UserError: transformers cannot load it, or the command has several processes.
    """
    if hosts.process_index_and_count()[1] > 1:
        raise UserError(f"{path} is a Hugging Face model, which one process scores: leave out --distributed")
    harness = load_model(path)
    return {"tasks": score(harness, tasks, limit), "truncated": harness.truncated}


def load_model(path: str, softmax_dtype: str | None = None) -> Any:
    """Load a model as lm-eval's `hf` backend; its attribute `truncated` counts the sequences that were cut.

    Args:
        path: The model's directory.
        softmax_dtype: The dtype of log-probabilities; None: the model's, as in lm-eval.
    """
    import torch
    from lm_eval.models.huggingface import HFLM

    class CountingModel(HFLM):
        truncated = 0

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
            self.truncated += sum(len(request[1]) + len(request[2]) > self.max_length + 1 for request in requests)
            return super()._loglikelihood_tokens(requests, **options)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with quiet():
        try:
            return CountingModel(
                pretrained=str(expand_user(path)),
                device=device,
                dtype="auto",
                softmax_dtype=softmax_dtype,
                batch_size=BATCH_SIZE,
                trust_remote_code=False,
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"{path} is no model that transformers loads: {first_line(error)}") from error
