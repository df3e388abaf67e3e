"""The held-out loss of runs and snapshots, for `pma evaluate`."""

from collections.abc import Sequence
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.data import shards
from pma_jax.evaluation.held_out import evaluate_all
from pma_jax.model.decoder import abstract_params
from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.runs import snapshots
from pma_jax.runs.directory import find_snapshots
from pma_jax.runtime.mesh import make_mesh


def evaluate_targets(paths: Sequence[epath.PathLike], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """One row a target: a snapshot, or a run's newest. `overrides` (`section.key=value`) change the text or its length.

    Raises ValueError when a target is neither, or a key is unknown.
    """
    rows = []
    for path in paths:
        snapshot = find_snapshots([path])[-1]
        config = configuration.resolve(snapshot.config, overrides)
        mesh = make_mesh(config.mesh)
        params = snapshots.restore_params(snapshot, abstract_params(snapshot.config.model, mesh))
        (loss,) = evaluate_all(config, [params], mesh)
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
