"""Hugging Face models of any family, scored through lm-eval's `hf` backend (the extra `torch`)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError, first_line
from pma_jax.evaluation.task_scores import TaskScores, quiet, score
from pma_jax.runtime import hosts
from pma_jax.storage.paths import expand_user

BATCH_SIZE = 16  # sequences
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")  # how the names of their files begin


def score_directory(path: str, tasks: Mapping[str, Any], limit: int | None) -> TaskScores:
    """Score a Hugging Face model on tasks. Code of the model's repository is not run.

    Raises:
        UserError: transformers cannot load it, or the command has several processes.
    """
    if hosts.process_index_and_count()[1] > 1:
        raise UserError(f"{path} is a Hugging Face model, which one process scores: leave out --distributed")
    harness = load_model(path)
    return {"tasks": score(harness, tasks, limit, by_document=True), "truncated": harness.truncated}


def load_model(path: str, softmax_dtype: str | None = None) -> Any:
    """Load a model as lm-eval's `hf` backend; its attribute `truncated` counts the sequences that were cut.

    Args:
        path: The model's directory.
        softmax_dtype: The dtype of log-probabilities; None: the model's, as in lm-eval.

    Raises:
        UserError: transformers cannot load it, or would leave weights at random values; or its weights are not finite.
            Its scores raise it if the tokenizer gives ids that the model does not have.
    """
    import torch
    from lm_eval.models.huggingface import HFLM
    from safetensors import SafetensorError

    class CheckedModel(HFLM):
        truncated = 0

        def _create_model(self, *arguments: Any, **options: Any) -> None:
            checked = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # `_check_weights` refuses them
            super()._create_model(*arguments, **options, **checked)
            self._model, loading = self._model
            _check_weights(path, self._model, loading)

        def tok_batch_encode(self, *arguments: Any, **options: Any) -> Any:
            encoded = super().tok_batch_encode(*arguments, **options)
            _check_ids(path, self.model, encoded[0].flatten().tolist())
            return encoded

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
            _check_ids(path, self.model, (i for _, context, target in requests for i in (*context, *target)))
            self.truncated += sum(len(request[1]) + len(request[2]) > self.max_length + 1 for request in requests)
            return super()._loglikelihood_tokens(requests, **options)

    folder = Path(expand_user(path))
    if not any(file.name.startswith(_TOKENIZER_FILES) for file in folder.iterdir()):
        raise UserError(f"{path} has no tokenizer: copy tokenizer.json and tokenizer_config.json of its model into it")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with quiet():
        try:
            return CheckedModel(
                pretrained=str(folder),
                device=device,
                dtype="auto",
                softmax_dtype=softmax_dtype,
                batch_size=BATCH_SIZE,
                trust_remote_code=False,
            )
        except UserError:
            raise
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{path} is no model that transformers loads: {first_line(error)}") from error


def _check_weights(path: str, model: Any, loading: Mapping[str, Any]) -> None:
    """Raise UserError if transformers gave weights random values, or a weight has a NaN or an infinity."""
    import torch

    absent = sorted({*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])})
    if absent:
        raise UserError(
            f"{path} lacks {len(absent)} weights of {type(model).__name__}, or has them in another shape "
            f"({', '.join(absent[:3])}): transformers would give them random values; complete the directory"
        )
    for name, weight in model.named_parameters():
        # Weights of one byte are codes of a quantisation.
        if weight.is_floating_point() and weight.itemsize > 1 and not torch.isfinite(weight).all():
            raise UserError(f"{path} has parameters that are not finite, do not use it: {name}")


def _check_ids(path: str, model: Any, ids: Iterable[int]) -> None:
    """Raise UserError if the model has no embedding of a token."""
    largest, size = max(ids, default=0), model.get_input_embeddings().num_embeddings
    if largest >= size:
        raise UserError(
            f"{path}: the tokenizer gives the id {largest}, and the model has {size} tokens: replace the tokenizer's "
            "files with those of the model"
        )
