"""The held-out loss of a Hugging Face model of any family, through lm-eval's `hf` backend (the extra `torch`).

The model reads the windows that a snapshot with the same text and tokenizer reads (`data.sampling`), so that losses on
samples with equal digests are comparable.

Dimensions: R windows of a sample, L targets per window, M = L + 1 tokens, D documents.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.data import shards
from pma_jax.data.sampling import Sample
from pma_jax.evaluation import hf_backend, hf_directory
from pma_jax.evaluation.held_out import check_part_sizes, read_sample
from pma_jax.evaluation.task_scores import quiet
from pma_jax.merging.tokenizer_files import FILE_NAME
from pma_jax.runtime import hosts
from pma_jax.storage.paths import expand_user


def read_text(path: str, overrides: Sequence[str], part: str) -> tuple[shards.TokenSet, Sample]:
    """Read the held-out text of the default configuration, as the model's tokenizer encodes it.

    Args:
        path: The directory of a Hugging Face model.
        overrides: Changes of the default configuration as `section.key=value`, such as `data.files`.
        part: The part of the held-out text (`data.sampling.PARTS`), or `ALL`.

    Raises:
        UserError: A package is not installed, the directory has no tokenizer.json, or the text cannot be read.
    """
    hf_directory.check_installed()
    tokenizer = expand_user(path) / FILE_NAME
    config = configuration.resolve({"data": {"tokenizer": str(tokenizer)}}, overrides)
    if config.data.tokenizer == str(tokenizer) and not tokenizer.is_file():
        raise UserError(f"{path} has no {FILE_NAME}: name the model's with --config.data.tokenizer=FILE")
    tokens = shards.prepare_tokens(config.data)
    if config.evaluation.tokens != Config().evaluation.tokens:
        check_part_sizes(tokens, config, part)
    return tokens, read_sample(tokens, config, part)


def sum_by_document(path: str, sample: Sample) -> np.ndarray:
    """Compute the summed loss of each document of the sample, in nats: float64 [D].

    Raises:
        UserError: transformers cannot load the model, it cannot read the windows of the sample, or the command has
            several processes.
    """
    if hosts.process_index_and_count()[1] > 1:
        raise UserError(f"{path} is a Hugging Face model, which one process evaluates: leave out --distributed")
    harness = hf_backend.load_model(path, softmax_dtype="float32")
    length = sample.windows.shape[1] - 1
    if length > harness.max_length:
        raise UserError(
            f"{path} reads {harness.max_length} tokens at once, and a window of the held-out text has {length}: lower "
            "--config.training.sequence_length_tokens"
        )
    largest, size = int(sample.windows.max()), harness.model.get_input_embeddings().num_embeddings
    if largest >= size:
        raise UserError(
            f"{path}: the tokenizer gives the id {largest}, and the model has {size} tokens: name its own with "
            "--config.data.tokenizer=FILE"
        )
    documents, requests = zip(*_segments(sample), strict=True)
    with quiet():
        scores = harness._loglikelihood_tokens(list(requests), disable_tqdm=True)
    nats = [-log_probability for log_probability, _ in scores]
    return np.bincount(documents, weights=nats, minlength=len(sample.counts_D))


def _segments(sample: Sample) -> Iterator[tuple[int, tuple[Any, list[int], list[int]]]]:
    """Yield the document of each run of counted targets in a window, and a request of lm-eval that scores the run.

    A request is a triple of no text, the window's tokens before the run, and the run.
    """
    for window_M, documents_L in zip(sample.windows, sample.documents, strict=True):
        ids_M = np.where(window_M < 0, ~window_M, window_M).tolist()  # the ids of targets that are not counted
        starts = np.flatnonzero(np.diff(documents_L, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(documents_L)], strict=True):
            if documents_L[start] >= 0:
                yield int(documents_L[start]), (None, ids_M[: start + 1], ids_M[start + 1 : end + 1])
