"""The held-out loss of parameters: samples of held-out text on the mesh, and the function that evaluates on them.

Dimensions: R windows of a sample, B sequences per batch, b of which this process reads; M = L + 1 tokens per sequence.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from pma_jax.config import Config, EvaluationConfig
from pma_jax.config.errors import UserError
from pma_jax.data import shards, shared_tokens
from pma_jax.data.sampling import (
    MINIMUM_DOCUMENTS,
    PADDING_ID,
    HeldOutLoss,
    Sample,
    count_tokens,
    estimate,
    sample_text,
)
from pma_jax.model.decoder import graph_definition
from pma_jax.model.loss import evaluate
from pma_jax.runs.directory import Run
from pma_jax.runtime.mesh import local_rows, put_batch, round_up_to_batch_axes


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A function from parameters on `mesh` to their loss on a sample of held-out text.

    The loss in bits per byte is the loss divided by ln(2) * `tokens.validation.bytes_per_token`
    (`model.loss.bits_per_byte`), where `tokens` is the result of `shards.prepare_tokens`. It is exact for the bytes
    tokenizer; for others, the divisor is an average over the split.
    """

    sample: Sample
    batches: Sequence[jax.Array]  # int32 [B, M] each: the windows of the sample, then padding
    graph: nnx.GraphDef
    mesh: jax.sharding.Mesh

    def __call__(self, params: Any) -> HeldOutLoss:
        """Compute the loss in nats per token, with its standard error over documents."""
        return estimate(self.sum_by_document(params), self.sample.counts_D)

    def sum_by_document(self, params: Any) -> np.ndarray:
        """Compute the summed loss of each document of the sample, in nats: float64 [D]."""
        with jax.set_mesh(self.mesh):
            nats_RxL = evaluate(self.graph, params, self.batches)
        return self.sample.sum_by_document(nats_RxL[: len(self.sample.windows)])


def make_evaluator(
    config: Config, mesh: jax.sharding.Mesh, part: str, tokens: shards.TokenSet | None = None
) -> Evaluator:
    """Read a sample of a part of the held-out text (`read_sample`) and place it on the mesh.

    Args:
        config: Determines the model, the held-out text and the batch size.
        mesh: The mesh of the parameters.
        part: One of `data.sampling.PARTS`, or `ALL`.
        tokens: The tokenised corpus, if it is prepared already.

    Raises:
        UserError: The corpus cannot be read, has tokens outside the model's vocabulary, or the part is empty.
    """
    tokens = tokens or prepare_tokens(config)
    sample = read_sample(tokens, config, part)
    with jax.set_mesh(mesh):
        batches = put_sample(sample, config.evaluation.batch_size_sequences, mesh)
        return Evaluator(sample, batches, graph_definition(config.model), mesh)


def prepare_tokens(config: Config) -> shards.TokenSet:
    """Open the tokenised corpus of `config`, tokenise it if needed, and check that the model can use its ids."""
    tokens = shared_tokens.prepare_tokens_in_all(config.data)
    shards.check_tokens_match_model(tokens, config.model)
    return tokens


def read_sample(tokens: shards.TokenSet, config: Config, part: str) -> Sample:
    """Read the sample of a part that `config` asks for: `evaluation.tokens` tokens in windows of a training sequence.

    If the part has fewer tokens, all are read: versions before the parts accepted as many as all held-out text has.
    `check_part_sizes` refuses such a configuration where a run is created.

    Raises:
        UserError: The part is empty.
    """
    wanted = min(config.evaluation.tokens, max(count_tokens(tokens, part), 1))
    return sample_text(tokens, part, wanted, config.training.sequence_length_tokens)


def check_part_sizes(tokens: shards.TokenSet, config: Config, *parts: str) -> None:
    """Check that each of the parts has `evaluation.tokens` tokens.

    Raises:
        UserError: A part has fewer.
    """
    for part in parts:
        sample_text(tokens, part, config.evaluation.tokens, config.training.sequence_length_tokens)


def read_sample_of_run(run: Run, part: str, evaluation: EvaluationConfig) -> Sample:
    """Read a sample of the held-out text that the run was trained without.

    Raises:
        UserError: The corpus on this machine is not the one that the run was trained on, or the part is empty.
    """
    config = dataclasses.replace(run.config, evaluation=evaluation)
    tokens = prepare_tokens(config)
    check_corpus(run, tokens)
    return read_sample(tokens, config, part)


def check_corpus(run: Run, tokens: shards.TokenSet) -> None:
    """Raise UserError unless the tokens are those that the run was trained on and without."""
    trained_on = run.metadata.get("corpus")
    if trained_on != tokens.digest:
        raise UserError(
            f"{run.path} was trained on another corpus ({trained_on}) than the one that its configuration finds here "
            f"({tokens.digest}): restore the old text"
        )


def put_sample(sample: Sample, batch_size_sequences: int, mesh: jax.sharding.Mesh) -> list[jax.Array]:
    """Place the windows of a sample on the mesh in int32 [B, M] batches, sharded over the batch axes.

    The last batch is filled with padding, so the loss does not depend on the batch size. B is `batch_size_sequences`,
    or the next multiple of the number of devices that split a batch.
    """
    B = round_up_to_batch_axes(mesh, batch_size_sequences)
    count = math.ceil(len(sample.windows) / B)
    padding = ((0, count * B - len(sample.windows)), (0, 0))
    batches_KxBxM = np.split(np.pad(sample.windows, padding, constant_values=PADDING_ID), count)
    rows_b = local_rows(mesh, B)
    return [put_batch(mesh, tokens_BxM[rows_b]) for tokens_BxM in batches_KxBxM]


def describe_few_documents(text: Mapping[str, Any]) -> list[str]:
    """Return a note if the part of a sample (`Sample.describe`) has too few documents for a reliable standard error."""
    if text["part_documents"] >= MINIMUM_DOCUMENTS:
        return []
    return [
        f"the part {text['part']!r} of the held-out text has {text['part_documents']} documents: standard errors over "
        f"fewer than {MINIMUM_DOCUMENTS} are rough; add documents or raise data.held_out_percent"
    ]


def describe_text_of_marks(run: Run, tokens: shards.TokenSet, sample: Sample) -> list[str]:
    """Return notes on the text of a run's evaluations: too few documents, all of a part, other text than before."""
    notes, wanted = describe_few_documents(sample.describe()), run.config.evaluation.tokens
    available = count_tokens(tokens, sample.part)
    if available < wanted:
        notes.append(
            f"evaluations read all {available:,} tokens of the part {sample.part!r} of the held-out text, not the "
            f"{wanted:,} of evaluation.tokens"
        )
    marked_on = run.metadata.get("evaluation")
    if marked_on != sample.digest:
        notes.append(
            f"earlier held-out losses of this run are on other text ({marked_on}) than those from here on "
            f"({sample.digest}), so they are not comparable: `pma report` evaluates all snapshots on one text"
        )
    return notes
