"""A run's models in memory and the loss that can be differentiated: what the functions of this folder take.

run = pma.open_run("runs/demo")
bench = open_workbench(run.config, tokens=8192)
models = bench.models(run.snapshots[-10:])
with jax.set_mesh(bench.mesh):
    plane = landscape.principal_plane(models)
    losses = landscape.loss_over(bench.loss, plane, xs, ys)
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
from flax import nnx

from pma_jax.analysis.text_loss import text_loss, text_outputs
from pma_jax.config import Config
from pma_jax.data import shards
from pma_jax.evaluation.held_out import held_out_batches
from pma_jax.model.decoder import Params, abstract_params, graph_definition
from pma_jax.runs.snapshots import Snapshot, restore_params
from pma_jax.runtime.mesh import RULES, make_mesh


@dataclasses.dataclass(frozen=True)
class Workbench:
    """One batch of held-out text on a mesh; its functions are to be called under `jax.set_mesh(bench.mesh)`."""

    config: Config
    mesh: jax.sharding.Mesh
    graph: nnx.GraphDef
    batch: jax.Array  # int32 [B, M], below 0: not counted

    @property
    def loss(self) -> Callable[[Params], jax.Array]:
        """Held-out nats a token of a parameter tree; can be differentiated twice."""
        return text_loss(self.graph, [self.batch])

    @property
    def outputs(self) -> Callable[[Params], tuple[jax.Array, jax.Array]]:
        """Logits and weights of the same text, for `curvature.gauss_newton_product`."""
        return text_outputs(self.graph, self.batch)

    def models(self, snapshots: Sequence[Snapshot]) -> list[Params]:
        """The parameters of each snapshot on the mesh, all in memory at once; raises as `restore_params` does."""
        abstract = abstract_params(self.config.model, self.mesh)
        return [restore_params(snapshot, abstract) for snapshot in snapshots]


def open_workbench(config: Config, tokens: int = 0) -> Workbench:
    """Put the first `tokens` held-out predictions of `config` on its mesh as one batch (0: `evaluation.tokens`).

    The whole batch's logits and activations are in memory when the loss is differentiated. Raises ValueError when the
    text cannot be read or is shorter.
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
