"""Evaluation of the targets of `pma evaluate`: snapshots, or runs."""

from collections.abc import Sequence
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.data import shards
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.model.decoder import abstract_params
from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.runs import snapshots
from pma_jax.runs.directory import newest_snapshot
from pma_jax.runtime.mesh import make_mesh


def evaluate_targets(paths: Sequence[epath.PathLike], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Compute the held-out loss of each snapshot in `paths`, and of the newest snapshot of each run.

    Args:
        paths: Directories of snapshots and runs.
        overrides: Changes of each configuration as `section.key=value`, such as another held-out text or more tokens.

    Returns:
        One dict per path: target (the path), tokens, loss (nats per token), perplexity, bits_per_byte.

    Raises:
        UserError: A path is neither a run nor a snapshot, or a key is unknown.
    """
    rows = []
    for path in paths:
        snapshot = newest_snapshot(path)
        config = configuration.resolve(snapshot.config, overrides)
        mesh = make_mesh(config.mesh)
        params = snapshots.restore_params(snapshot, abstract_params(snapshot.config.model, mesh))
        loss = make_evaluator(config, mesh)(params)
        bytes_per_token = shards.prepare_tokens(config.data).validation.bytes_per_token
        rows.append(
            {
                "target": str(path),
                "tokens": snapshot.tokens,
                "loss": loss,
                "perplexity": perplexity(loss),
                "bits_per_byte": bits_per_byte(loss, bytes_per_token),
            }
        )
    return rows
