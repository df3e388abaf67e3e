"""Restore the models of a run's snapshots, and build a held-out loss that can be differentiated twice.

    run = pma.open_run("runs/demo")
    bench = open_workbench(run.config, tokens=8192)
    models = bench.models(run.snapshots[-10:])
    with jax.set_mesh(bench.mesh):
        plane = landscape.principal_plane(models)
        losses = landscape.loss_on_grid(bench.loss, plane, xs, ys)
        product = curvature.sum_products(bench.hessian, plane.origin, bench.batches)

Dimensions: B sequences, L positions, M = L + 1 tokens per window (inputs and shifted targets), V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from pma_jax.analysis import curvature
from pma_jax.config import Config
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.held_out import Evaluator, check_part_sizes, make_evaluator, prepare_tokens, put_sample
from pma_jax.model.decoder import Params, abstract_params, apply
from pma_jax.model.loss import decode_masked_ids
from pma_jax.runs.snapshots import Snapshot, restore_params
from pma_jax.runtime.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class Workbench:
    """Held-out text on a mesh. Call its functions under `jax.set_mesh(bench.mesh)`."""

    config: Config
    text: Evaluator

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of the text and of the models."""
        return self.text.mesh

    @property
    def batches(self) -> Sequence[jax.Array]:
        """The text in batches of equal shape, int32 [B, M]; negative targets are ignored."""
        return self.text.batches

    @functools.cached_property
    def loss(self) -> Callable[[Params], jax.Array]:
        """The function from parameters to the held-out loss in nats per token; it can be differentiated twice.

        Its derivatives need the memory of all text at once; those of `loss_of_batch` do not.
        """
        return text_loss(self.text.graph, self.batches)

    def loss_of_batch(self, params: Params, batch_BxM: jax.Array) -> jax.Array:
        """Return a batch's part of the loss; the parts of all `batches` add up to it."""
        logits_BxLxV, weights_BxL = self.outputs_of_batch(params, batch_BxM)
        return _sum_loss(logits_BxLxV, batch_BxM[:, 1:], weights_BxL)

    def outputs_of_batch(self, params: Params, batch_BxM: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logits of a batch [B, L, V] and the weight of each position in the loss [B, L]."""
        logits_BxLxV = apply(self.text.graph, params, decode_masked_ids(batch_BxM[:, :-1]))
        return logits_BxLxV, (batch_BxM[:, 1:] >= 0).astype(jnp.float32) / float(self.text.sample.counts_D.sum())

    def hessian(self, params: Params, batch_BxM: jax.Array) -> curvature.MatrixVectorProduct:
        """Return v -> H v for the Hessian H of a batch's part of the loss (`curvature.hessian`)."""
        return curvature.hessian(self.loss_of_batch, params, batch_BxM)

    def gauss_newton(self, params: Params, batch_BxM: jax.Array) -> curvature.MatrixVectorProduct:
        """Return v -> G v for the Gauss-Newton matrix G of a batch's part of the loss (`curvature.gauss_newton`)."""
        return curvature.gauss_newton(self.outputs_of_batch, params, batch_BxM)

    def document_batches(self, batch_size_sequences: int) -> list[list[jax.Array]]:
        """Return the batches of each document, in the order of `text.sample`; their targets are all from it."""
        sample = self.text.sample
        documents = [sample.of_document(d) for d in range(len(sample.counts_D))]
        with jax.set_mesh(self.mesh):
            return [put_sample(document, batch_size_sequences, self.mesh) for document in documents]

    def models(self, snapshots: Sequence[Snapshot]) -> list[Params]:
        """Restore the parameters of each snapshot onto the mesh. All of them are in device memory at the same time.

        Raises:
            UserError: A snapshot is corrupt, or does not fit the model.
        """
        abstract = abstract_params(self.config.model, self.mesh)
        return [restore_params(snapshot, abstract) for snapshot in snapshots]


def open_workbench(config: Config, tokens: int = 0, part: str = REPORT) -> Workbench:
    """Load held-out text onto the mesh of `config`, in batches of `config.evaluation.batch_size_sequences`.

    Args:
        config: Run configuration: the model, the data, the mesh and the batches.
        tokens: Number of predicted tokens; 0 means `config.evaluation.tokens`.
        part: The part of the held-out text (`data.sampling.PARTS`).

    Raises:
        UserError: The held-out text cannot be read, or has too few tokens.
    """
    prepared = prepare_tokens(config)
    if tokens:
        config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, tokens=tokens))
        check_part_sizes(prepared, config, part)
    return Workbench(config, make_evaluator(config, make_mesh(config.mesh), part, prepared))


def text_loss(graph: nnx.GraphDef, batches: Sequence[jax.Array]) -> Callable[[Params], jax.Array]:
    """Return the loss on text as a function of the parameters that can be differentiated twice.

    The function computes the same value as an `evaluation.held_out.Evaluator`. The training loss has a custom VJP (it
    never materialises the logits) and cannot be differentiated twice. This function materialises the logits of each
    batch; its gradient keeps those of all batches. Call it under `jax.set_mesh`.

    Args:
        graph: Graph definition of the model.
        batches: int32 [B, M] each; positions with a negative target are ignored.

    Returns:
        The function from parameters to the mean nats per token, [].
    """

    def loss(params: Params) -> jax.Array:
        nats, count = jnp.zeros(()), jnp.zeros(())
        for batch_BxM in batches:
            is_counted_BxL = (batch_BxM[:, 1:] >= 0).astype(jnp.float32)
            logits_BxLxV = apply(graph, params, decode_masked_ids(batch_BxM[:, :-1]))
            nats, count = nats + _sum_loss(logits_BxLxV, batch_BxM[:, 1:], is_counted_BxL), count + is_counted_BxL.sum()
        return nats / count

    return loss


def _sum_loss(logits_BxLxV: jax.Array, targets_BxL: jax.Array, weights_BxL: jax.Array) -> jax.Array:
    logits_BxLxV = logits_BxLxV.astype(jnp.float32)
    # A masked sum instead of a gather, because the vocabulary axis may be sharded.
    is_target_BxLxV = targets_BxL[..., None] == jnp.arange(logits_BxLxV.shape[-1])
    log_z_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    nats_BxL = log_z_BxL - jnp.sum(jnp.where(is_target_BxLxV, logits_BxLxV, 0), axis=-1)
    return jnp.sum(nats_BxL * weights_BxL)
