"""One optimizer step, jitted, the state donated.

Legend: B batch, L positions, M = L + 1 tokens of a window, A microbatches, b = B / A.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import P

from pma_jax.config import Config
from pma_jax.model import moe
from pma_jax.model.decoder import Params
from pma_jax.model.loss import loss_sums
from pma_jax.runtime.mesh import RULES, platform_of
from pma_jax.training import averages, spikes
from pma_jax.training.optimizer import update_params
from pma_jax.training.state import TrainState

Metrics = dict[str, Any]  # arrays, and a spikes.Reading of arrays


def make_train_step(
    config: Config, graph: nnx.GraphDef
) -> Callable[[TrainState, jax.Array, float], tuple[TrainState, Metrics]]:
    """Return the jitted `step(state, tokens_BxM, rate) -> (state, metrics)`, which donates the state.

    Call under `jax.set_mesh`: it is compiled for the platform of that mesh. Equal arguments give the same function, so
    that a process which trains several times traces and compiles once.

    Args:
        config: The model, optimizer, training and spikes sections are read.
        graph: The model's static half (`graph_definition`).

    Returns:
        A function of a state, int32 tokens [B, M] and a learning rate. Its metrics are `loss`, `gradient_norm` and
        `count`; with experts also those of `moe.load_metrics`; with a detector also `spike`, a `spikes.Reading`.
    """
    training = dataclasses.replace(config.training, total_tokens=0, log_interval_tokens=0, seed=0, start_from="")
    used = Config(model=config.model, optimizer=config.optimizer, training=training, spikes=config.spikes)
    return _cached_train_step(used, graph, jax.sharding.get_mesh())


@functools.lru_cache(maxsize=8)
def _cached_train_step(config: Config, graph: nnx.GraphDef, mesh: jax.sharding.Mesh) -> Any:
    training = config.training
    half_life_tokens = config.optimizer.ema_half_life_tokens
    ema_decay = averages.ema_decay(half_life_tokens, config.batch_tokens) if half_life_tokens else 0.0

    def objective(params: Params, tokens_bxM: jax.Array) -> tuple[jax.Array, Metrics]:
        weights = (training.z_loss_weight, training.balance_loss_weight, training.router_z_loss_weight)
        return loss_sums(graph, params, tokens_bxM, *weights)

    def train_step(state: TrainState, tokens_BxM: jax.Array, rate: jax.Array) -> tuple[TrainState, Metrics]:
        gradients, sums = accumulate_gradients(objective, state.params, tokens_BxM, training.accumulation_steps)
        counted = jnp.maximum(sums["count"], 1)  # 0 if the batch has only prompts, which are not trained on
        gradients = jax.tree.map(lambda g: g / counted, gradients)
        params, opt_state = update_params(config.optimizer, gradients, state.optimizer, state.params, rate)
        metrics = {
            "loss": sums["nats"] / counted,
            "gradient_norm": optax.tree.norm(gradients),
            "count": sums["count"],
        }
        if config.model.experts:
            positions = tokens_BxM[:, 1:].size
            metrics |= moe.load_metrics(sums["load_TxE"], positions, config.model.experts_per_token)
        if config.model.experts and config.model.router_bias:
            # Its gradient is zero and it does not decay, so the optimizer did not change it.
            router = params["blocks"]["moe"]
            router[moe.ROUTER_BIAS] = moe.update_router_bias(
                router[moe.ROUTER_BIAS], sums["load_TxE"], training.router_bias_rate
            )
        detector = state.detector
        if detector is not None:
            loss, norm = metrics["loss"], metrics["gradient_norm"]
            detector, reading = spikes.observe(detector, config, state.step + 1, loss, norm)
            metrics["spike"] = reading
            if config.spikes.skip_gradient_z:
                # An element-wise select, fused with the update: no extra memory traffic.
                before, after = (state.params, state.optimizer), (params, opt_state)
                params, opt_state = jax.tree.map(lambda old, new: jnp.where(reading.skipped, old, new), before, after)
        mean = None if state.ema is None else averages.add_to_ema(state.ema, params, ema_decay)
        return TrainState(state.step + 1, params, opt_state, state.block, detector, mean), metrics

    return jax.jit(train_step, donate_argnums=0, compiler_options=compiler_options(platform_of(mesh)))


def compiler_options(platform: str) -> dict[str, bool | str]:
    """Return XLA's options for a train step.

    On CPU its library computes only matrix products, because XLA's own loops are faster for the rest; with several
    devices, each of one core, a product uses one thread.
    """
    if platform != "cpu":
        return {}
    one_thread = {"xla_cpu_multi_thread_eigen": False} if jax.local_device_count() > 1 else {}
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT", **one_thread}


def accumulate_gradients(
    objective: Callable[[Params, jax.Array], tuple[jax.Array, Metrics]],
    params: Params,
    tokens_BxM: jax.Array,
    accumulation_steps: int,
) -> tuple[Params, Metrics]:
    """Return the gradient of the summed objective and the sums, over `accumulation_steps` microbatches.

    Sums, not means: dividing by the count once, afterwards, is exact however many tokens each microbatch counts. Each
    shard of the mesh's `data` axis accumulates its own microbatches, so that there is one all-reduce per step.
    """
    gradient = jax.grad(objective, has_aux=True)

    def own_share(params: Params, tokens_BxM: jax.Array) -> tuple[Params, Metrics]:
        if accumulation_steps == 1:
            return gradient(params, tokens_BxM)
        # Microbatch a takes every A-th row, so each device splits the rows that it holds.
        strided = (tokens_BxM.shape[0] // accumulation_steps, accumulation_steps, tokens_BxM.shape[1])
        tokens_bxAxM = jnp.reshape(tokens_BxM, strided, out_sharding=RULES.spec("batch", None, None))
        tokens_AxbxM = jnp.moveaxis(tokens_bxAxM, 1, 0)

        def add(total, tokens_bxM):
            # XLA for TPU would hoist all-reduces out of the loop, and fails on reduce-scatters among them.
            share = jax.lax.platform_dependent(
                gradient(params, tokens_bxM), tpu=jax.lax.optimization_barrier, default=lambda share: share
            )
            return jax.tree.map(jnp.add, total, share), None

        shapes = jax.eval_shape(gradient, params, tokens_AxbxM[0])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding.spec), shapes)
        return jax.lax.scan(add, zeros, tokens_AxbxM)[0]

    def sum_of_shares(params: Params, tokens_BxM: jax.Array) -> tuple[Params, Metrics]:
        return jax.lax.psum(own_share(params, tokens_BxM), "data")

    if jax.sharding.get_abstract_mesh().shape["data"] == 1:  # XLA refuses a sum over one of the mesh's shards
        return own_share(params, tokens_BxM)
    over_data = jax.shard_map(
        sum_of_shares,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        # Unchecked, gradients stay local, not reduced use by use; and outputs of Pallas kernels cannot be checked.
        check_vma=False,
    )
    return over_data(params, tokens_BxM)
