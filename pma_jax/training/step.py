"""The jitted training step, which donates the state.

Dimensions: B sequences per batch (per data shard within `shard_map`), L positions, M = L + 1 tokens of a window,
A microbatches, b = B / A.
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
from pma_jax.training.optimizer import gradient_params, update_params
from pma_jax.training.state import TrainState
from pma_jax.training.worker_steps import compute_in_turn, map_over_workers

Metrics = dict[str, Any]  # arrays, except `spike`, which is a `spikes.Reading`


def make_train_step(
    config: Config, graph: nnx.GraphDef
) -> Callable[[TrainState, jax.Array, float], tuple[TrainState, Metrics]]:
    """Return the jitted `step(state, tokens_BxM, learning_rate) -> (state, metrics)`, which donates the state.

    Call under `jax.set_mesh`: the function is compiled for that mesh. It is cached by configuration, graph and mesh, so
    a process that trains several runs for which these are equal compiles it once.

    Args:
        config: Only the sections `model`, `optimizer`, `training`, `spikes` and `replicas` affect the function.
        graph: The model's `nnx.GraphDef`, from `decoder.graph_definition`.

    Returns:
        A function of a state, int32 tokens [B, M] and a learning rate. Its metrics are `loss`, `gradient_norm` and
        `count`; if the model has experts, also those of `moe.load_metrics`; if spikes are detected, also `spike`, a
        `spikes.Reading`. With `replicas`, each metric has a leading dim of the workers.
    """
    # Keys that do not affect the step are cleared, so that they are not part of the cache key.
    training = dataclasses.replace(config.training, total_tokens=0, log_interval_tokens=0, seed=0, start_from="")
    step_config = Config(model=config.model, optimizer=config.optimizer, training=training, spikes=config.spikes)
    mesh = jax.sharding.get_mesh()
    return _cached_train_step(step_config, graph, mesh, config.replicas.method != "none")


@functools.lru_cache(maxsize=8)
def _cached_train_step(config: Config, graph: nnx.GraphDef, mesh: jax.sharding.Mesh, has_workers: bool) -> Any:
    training = config.training
    half_life_tokens = config.optimizer.ema_half_life_tokens
    ema_decay = averages.ema_decay(half_life_tokens, config.batch_tokens) if half_life_tokens else 0.0

    def objective(params: Params, tokens_bxM: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss_weights = (training.z_loss_weight, training.balance_loss_weight, training.router_z_loss_weight)
        return loss_sums(graph, params, tokens_bxM, *loss_weights)

    def gradient_sums(params: Params, tokens_BxM: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
        return sum_gradients(objective, params, tokens_BxM, training.accumulation_steps)

    if has_workers:
        gradient_sums = compute_in_turn(gradient_sums)

    def train_step(state: TrainState, tokens_BxM: jax.Array, learning_rate: jax.Array) -> tuple[TrainState, Metrics]:
        point = gradient_params(config.optimizer, state.params, state.optimizer)
        gradients, sums = gradient_sums(point, tokens_BxM)
        divisor = jnp.maximum(sums["count"], 1)  # the count is 0 if all targets of the batch are masked
        gradients = jax.tree.map(lambda g: g / divisor, gradients)
        params, opt_state = update_params(
            config.optimizer, gradients, state.optimizer, state.params, learning_rate, config.batch_tokens
        )
        metrics: Metrics = {
            "loss": sums["nats"] / divisor,
            "gradient_norm": optax.tree.norm(gradients),
            "count": sums["count"],
        }
        if config.model.experts:
            metrics |= moe.load_metrics(sums["load_TxE"], tokens_BxM[:, 1:].size, config.model.experts_per_token)
        if config.model.experts and config.model.router_bias:
            # The bias has gradient zero and no weight decay, so the optimizer did not change it.
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
                # XLA fuses this element-wise select with the update, so it causes no extra memory traffic.
                before, after = (state.params, state.optimizer), (params, opt_state)
                params, opt_state = jax.tree.map(lambda old, new: jnp.where(reading.skip, old, new), before, after)
        ema = None if state.ema is None else averages.add_to_ema(state.ema, params, ema_decay)
        return TrainState(state.step + 1, params, opt_state, state.block, detector, ema, bema=state.bema), metrics

    if has_workers:
        train_step = map_over_workers(train_step)
    return jax.jit(train_step, donate_argnums=0, compiler_options=compiler_options(platform_of(mesh)))


def compiler_options(platform: str) -> dict[str, bool | str]:
    """Return XLA's compiler options for a train step; there are none for GPUs.

    On CPU, they make XLA use its library YNNPACK only for matrix products, because the loops that XLA generates are
    faster for other operations. If there are several simulated devices, one per core, they limit each matrix product
    to one thread.

    On TPU, they disable collective matrix products (windowed einsums). XLA would split a matrix product that is
    followed by a reduce-scatter into one product per device, to overlap computation with communication. Each part reads
    the activations again: of `dense_1b` on 16 chips of v6e, this is a third of the memory traffic. MaxText's
    configurations for v6e disable them too.
    """
    if platform == "tpu":
        return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
    if platform != "cpu":
        return {}
    one_thread = {"xla_cpu_multi_thread_eigen": False} if jax.local_device_count() > 1 else {}
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT", **one_thread}


def sum_gradients(
    objective: Callable[[Params, jax.Array], tuple[jax.Array, dict[str, jax.Array]]],
    params: Params,
    tokens_BxM: jax.Array,
    accumulation_steps: int,
) -> tuple[Params, dict[str, jax.Array]]:
    """Sum the gradient and the auxiliary outputs of `objective` over microbatches and data shards.

    To get means, divide both by the total number of targets. This is exact even if microbatches have different numbers
    of targets. Each shard of the mesh's `data` axis sums its own microbatches, so there is one all-reduce per step.

    Args:
        objective: Function of parameters and int32 tokens [b, M]. It returns the loss, summed over targets, and a
            dict of auxiliary sums.
        params: The parameters.
        tokens_BxM: int32 tokens of the global batch.
        accumulation_steps: Number of microbatches, A.
    """
    grad_fn = jax.grad(objective, has_aux=True)

    def local_gradients(params: Params, tokens_BxM: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
        if accumulation_steps == 1:
            return grad_fn(params, tokens_BxM)
        # Microbatch a takes every A-th row, so each device splits the rows that it holds.
        strided = (tokens_BxM.shape[0] // accumulation_steps, accumulation_steps, tokens_BxM.shape[1])
        tokens_bxAxM = jnp.reshape(tokens_BxM, strided, out_sharding=RULES.spec("batch", None, None))
        tokens_AxbxM = jnp.moveaxis(tokens_bxAxM, 1, 0)

        def add(total, tokens_bxM):
            # The barrier stops XLA for TPU from hoisting all-reduces out of the loop, which fails on reduce-scatters.
            microbatch_sums = jax.lax.platform_dependent(
                grad_fn(params, tokens_bxM), tpu=jax.lax.optimization_barrier, default=lambda unchanged: unchanged
            )
            return jax.tree.map(jnp.add, total, microbatch_sums), None

        shapes = jax.eval_shape(grad_fn, params, tokens_AxbxM[0])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding.spec), shapes)
        return jax.lax.scan(add, zeros, tokens_AxbxM)[0]

    if jax.sharding.get_abstract_mesh().shape["data"] == 1:  # XLA rejects a psum over a mesh axis of size 1
        return local_gradients(params, tokens_BxM)
    return jax.shard_map(
        lambda params, tokens_BxM: jax.lax.psum(local_gradients(params, tokens_BxM), "data"),
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        # With check_vma=True, JAX would insert a psum for the gradient at every use of a parameter. With False,
        # gradients stay local until the psum above. The outputs of Pallas kernels do not support the check either.
        check_vma=False,
    )(params, tokens_BxM)
