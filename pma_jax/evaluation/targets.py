"""Evaluation of the targets of `pma evaluate`: snapshots, runs, and directories of Hugging Face models."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.data.sampling import REPORT, Sample, estimate
from pma_jax.data.shards import TokenSet
from pma_jax.evaluation import hf_directory, hf_held_out
from pma_jax.evaluation.held_out import (
    check_part_sizes,
    describe_few_documents,
    make_evaluator,
    prepare_tokens,
    read_sample,
)
from pma_jax.model.decoder import abstract_params
from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.runs import snapshots
from pma_jax.runs.directory import newest_snapshot
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime.formatting import format_text
from pma_jax.runtime.mesh import make_mesh
from pma_jax.runtime.progress import Progress


def evaluate_targets(
    paths: Sequence[epath.PathLike], overrides: Sequence[str], part: str = REPORT, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Compute the held-out loss of each model in `paths`, and of the newest snapshot of each run.

    Args:
        paths: Directories of snapshots, runs and Hugging Face models.
        overrides: Changes of each configuration as `section.key=value`, such as another held-out text or more tokens.
        part: The part of the held-out text (`data.sampling.PARTS`), or `ALL`.
        progress: Called after each model, with the number of models so far and in all.

    Returns:
        One dict per path: target (the path), tokens (None for a Hugging Face model), loss (nats per token),
        standard_error (of the loss, over documents), difference (the loss minus that of the first path),
        difference_standard_error (over documents, each of which is read by both models; None for the first path),
        perplexity, bits_per_byte, held_out (how the text was sampled, `Sample.describe`), notes (lines on what makes
        the loss unreliable).

    Raises:
        UserError: A path is no model, a package is missing, a key is unknown, or the paths' held-out texts differ; then
            the message has both digests.
    """
    targets = [_open_target(path, overrides, part) for path in paths]
    _check_same_text(targets)
    rows: list[dict[str, Any]] = []
    first_D: Any = None
    for target in targets:
        nats_D = target.sum_by_document()
        if progress:
            progress(len(rows) + 1, len(targets))
        first_D = nats_D if first_D is None else first_D
        evaluated = estimate(nats_D, target.sample.counts_D)
        difference = estimate(nats_D - first_D, target.sample.counts_D)
        rows.append(
            {
                "target": target.path,
                "tokens": target.trained_tokens,
                **dataclasses.asdict(evaluated),
                "difference": difference.loss,
                "difference_standard_error": difference.standard_error if rows else None,
                "perplexity": perplexity(evaluated.loss),
                "bits_per_byte": bits_per_byte(evaluated.loss, target.tokens.validation.bytes_per_token),
                "held_out": target.sample.describe(),
                "notes": [*describe_few_documents(target.sample.describe()), *target.notes],
            }
        )
    return rows


@dataclasses.dataclass(frozen=True)
class _Target:
    """A model to evaluate, and the text to evaluate it on."""

    path: str
    trained_tokens: int | None
    tokens: TokenSet
    sample: Sample
    notes: Sequence[str]  # on data that the model may have been trained on
    sum_by_document: Callable[[], np.ndarray]  # computes the summed loss of each document, float64 [D]


def _open_target(path: epath.PathLike, overrides: Sequence[str], part: str) -> _Target:
    if hf_directory.is_model_directory(path):
        tokens, sample = hf_held_out.read_text(str(path), overrides, part)
        notes = [f"{path} may have been trained on this text: a Hugging Face model does not say on what it was trained"]
        return _Target(str(path), None, tokens, sample, notes, lambda: hf_held_out.sum_by_document(str(path), sample))
    snapshot = newest_snapshot(path)
    config = configuration.resolve(snapshot.config, overrides)
    mesh = make_mesh(config.mesh)  # sets the number of simulated devices, which is fixed after the first use of JAX
    tokens = prepare_tokens(config)
    if config.evaluation.tokens != snapshot.config.evaluation.tokens:
        check_part_sizes(tokens, config, part)

    def sum_by_document() -> np.ndarray:
        params = snapshots.restore_params(snapshot, abstract_params(snapshot.config.model, mesh))
        return make_evaluator(config, mesh, part, tokens).sum_by_document(params)

    sample = read_sample(tokens, config, part)
    return _Target(str(path), snapshot.tokens, tokens, sample, _describe_data(path, snapshot, config), sum_by_document)


def _check_same_text(targets: Sequence[_Target]) -> None:
    first = targets[0]
    for other in targets[1:]:
        if other.sample.digest != first.sample.digest:
            texts = [f"{format_text(x.sample.describe())} with digest {x.sample.digest}" for x in (first, other)]
            raise UserError(
                f"{first.path} and {other.path} cannot be compared: their held-out text differs ({texts[0]}; "
                f"{texts[1]}): evaluate one at a time, or give all the same text with --config.evaluation.tokens and "
                "--config.data keys"
            )


def _describe_data(path: epath.PathLike, snapshot: Snapshot, config: Config) -> list[str]:
    """Return a note if the text of `config` may be among what the snapshot was trained on."""
    if dataclasses.replace(config.data, cache_dir=snapshot.config.data.cache_dir) == snapshot.config.data:
        return []
    return [f"{path} may have been trained on this text: it was trained with other data keys"]
