"""Evaluation of the targets of `pma evaluate`: snapshots, or runs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.held_out import describe_few_documents, make_evaluator, prepare_tokens
from pma_jax.model.decoder import abstract_params
from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.runs import snapshots
from pma_jax.runs.directory import newest_snapshot
from pma_jax.runtime.mesh import make_mesh


def evaluate_targets(
    paths: Sequence[epath.PathLike], overrides: Sequence[str], part: str = REPORT
) -> list[dict[str, Any]]:
    """Compute the held-out loss of each snapshot in `paths`, and of the newest snapshot of each run.

    Args:
        paths: Directories of snapshots and runs.
        overrides: Changes of each configuration as `section.key=value`, such as another held-out text or more tokens.
        part: The part of the held-out text (`data.sampling.PARTS`), or `ALL`.

    Returns:
        One dict per path: target (the path), tokens, loss (nats per token), standard_error (of the loss, over
        documents), perplexity, bits_per_byte, held_out (how the text was sampled, `Sample.describe`).

    Raises:
        UserError: A path is neither a run nor a snapshot, or a key is unknown.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        snapshot = newest_snapshot(path)
        config = configuration.resolve(snapshot.config, overrides)
        mesh = make_mesh(config.mesh)
        params = snapshots.restore_params(snapshot, abstract_params(snapshot.config.model, mesh))
        prepared = prepare_tokens(config)
        evaluator = make_evaluator(config, mesh, part, prepared)
        evaluated = evaluator(params)
        rows.append(
            {
                "target": str(path),
                "tokens": snapshot.tokens,
                **dataclasses.asdict(evaluated),
                "perplexity": perplexity(evaluated.loss),
                "bits_per_byte": bits_per_byte(evaluated.loss, prepared.validation.bytes_per_token),
                "held_out": evaluator.sample.describe(),
            }
        )
    return rows


def describe_texts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return notes on the held-out text of the rows of `evaluate_targets`: few documents, or different texts."""
    notes = [note for row in rows for note in describe_few_documents(row["held_out"])]
    targets = {row["held_out"]["digest"]: row["target"] for row in rows}
    if len(targets) > 1:
        texts = ", ".join(f"{target} on {digest}" for digest, target in targets.items())
        notes.append(f"these losses cannot be compared: the targets were evaluated on different text ({texts})")
    return list(dict.fromkeys(notes))
