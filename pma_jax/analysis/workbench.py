"""A run's models in memory, and the loss on held-out text as a function that can be differentiated twice.

    run = pma.open_run("runs/demo")
    bench = open_workbench(run.config, tokens=8192)
    models = bench.models(run.snapshots[-10:])
    with jax.set_mesh(bench.mesh):
        plane = landscape.principal_plane(models)
        losses = landscape.loss_on_grid(bench.loss, plane, xs, ys)

Dimensions: B sequences, L positions, M = L + 1 tokens of a window, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from pma_jax.config import Config
from pma_jax.data import shards
from pma_jax.evaluation.held_out import held_out_batches
from pma_jax.model.decoder import Params, abstract_params, apply, graph_definition
from pma_jax.model.loss import unmask_ids
from pma_jax.runs.snapshots import Snapshot, restore_params
from pma_jax.runtime.mesh import RULES, make_mesh


@dataclasses.dataclass(frozen=True)
class Workbench:
    """One batch of held-out text on a mesh. Call its functions under `jax.set_mesh(bench.mesh)`."""

    config: Config
    mesh: jax.sharding.Mesh
    graph: nnx.GraphDef
    batch: jax.Array  # int32 [B, M]; negative targets are not counted

    @property
    def loss(self) -> Callable[[Params], jax.Array]:
        """The held-out loss in nats per token as a function of the parameters; can be differentiated twice."""
        return text_loss(self.graph, [self.batch])

    @property
    def outputs(self) -> Callable[[Params], tuple[jax.Array, jax.Array]]:
        """Logits [B, L, V] and weights [B, L] of the text as a function, for `curvature.gauss_newton_product`."""
        weights_BxL = (self.batch[:, 1:] >= 0).astype(jnp.float32)
        return lambda params: (apply(self.graph, params, unmask_ids(self.batch[:, :-1])), weights_BxL)

    def models(self, snapshots: Sequence[Snapshot]) -> list[Params]:
        """Restore the parameters of each snapshot onto the mesh, all in memory at once; raises as `restore_params`."""
        abstract = abstract_params(self.config.model, self.mesh)
        return [restore_params(snapshot, abstract) for snapshot in snapshots]


def open_workbench(config: Config, tokens: int = 0) -> Workbench:
    """Place held-out text of `config` on its mesh as one batch.

    The logits and activations of the complete batch are in memory when the loss is differentiated.

    Args:
        config: Configuration of the model, the held-out text and the mesh.
        tokens: Number of predictions; 0 takes `evaluation.tokens`.

    Raises:
        ValueError: The text cannot be read, or is shorter.
    """
    wanted = tokens or config.evaluation.tokens
    mesh = make_mesh(config.mesh)
    shares = math.prod(mesh.shape[axis] for axis in RULES.batch)
    rows = -(-wanted // (config.training.sequence_length_tokens * shares)) * shares
    evaluation = dataclasses.replace(config.evaluation, tokens=wanted, batch_size_sequences=rows)
    prepared = shards.prepare_tokens(config.data)
    shards.check_tokens_match_model(prepared, config.model)
    with jax.set_mesh(mesh):
        (batch_BxM,) = held_out_batches(prepared, dataclasses.replace(config, evaluation=evaluation), mesh)
        return Workbench(config, mesh, graph_definition(config.model), batch_BxM)


def text_loss(graph: nnx.GraphDef, batches: Sequence[jax.Array]) -> Callable[[Params], jax.Array]:
    """Return the loss on text as a function of the parameters that can be differentiated twice.

    It equals `model.loss.evaluate`. Training's cross-entropy never stores the logits and so has a custom gradient,
    which has no second derivative; this one stores them, one batch at a time. Call it under `jax.set_mesh`.

    Args:
        graph: Graph definition of the model.
        batches: int32 [B, M] each; negative targets are not counted.

    Returns:
        Function of the parameters: mean nats per token, [].
    """

    def loss(params: Params) -> jax.Array:
        sums = [_sums(apply(graph, params, unmask_ids(b[:, :-1])), b[:, 1:]) for b in batches]
        nats, count = jnp.sum(jnp.stack([jnp.stack(pair) for pair in sums]), axis=0)
        return nats / count

    return loss


def _sums(logits_BxLxV: jax.Array, targets_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits_BxLxV = logits_BxLxV.astype(jnp.float32)
    # Not a gather: the vocabulary may be sharded.
    hit_BxLxV = targets_BxL[..., None] == jnp.arange(logits_BxLxV.shape[-1])
    log_z_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    nats_BxL = log_z_BxL - jnp.sum(jnp.where(hit_BxLxV, logits_BxLxV, 0), axis=-1)
    counted_BxL = (targets_BxL >= 0).astype(jnp.float32)
    return jnp.sum(nats_BxL * counted_BxL), jnp.sum(counted_BxL)
