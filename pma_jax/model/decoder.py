"""A decoder-only transformer: RMSNorm, rotary grouped-query attention, and SwiGLU or mixture-of-experts layers.

The parameters of all layers are stacked along a first dim.
Shape suffixes: B batch, L positions, S = B L, V vocabulary, D width, N query heads, K key and value heads, H head dim,
F hidden width of the dense MLP or of all shared experts (0: neither), T layers, E the dims of a matrix other than D:
[N, H], [K, H] or [F].

Parameters are float32 and sharded by their initialisers. The matrices of all layers are cast to the compute dtype at
once, before the first layer; each is gathered along `fsdp` where it is used.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from pma_jax.config import ModelConfig
from pma_jax.model.attention import apply_rotary, attention, rotary_tables, rotary_tables_of_layer
from pma_jax.model.kernels.matmul import MATMUL_CHECKPOINT_NAME, sharded_matmul
from pma_jax.model.layers import embed_tokens, ones_param, rms_norm, swiglu, truncated_normal_param
from pma_jax.model.moe import MixtureOfExperts, RouterBias, RouterSums
from pma_jax.runtime.mesh import RULES, abstract_arrays, check_model_on_mesh, gather_batch_axes

Params = dict  # nested dict, name -> array: the pytree that is trained, saved and merged
# Maps rotated queries [B, L, N, H], rotated keys [B, L, K, H] and values [B, L, K, H] to [B, L, N, H].
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Block(nnx.Module):
    """One layer: attention and MLP, each with a norm before or after it, added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, spec = config, RULES.spec
        D, N, K, H, F = c.width, c.heads, c.kv_heads, c.head_dim, c.unrouted_hidden
        # Scale down the initial output projections, so that the norm of the residual stream does not grow with depth.
        residual_scale = 1 / math.sqrt(2 * c.layers)
        self.config = nnx.static(config)
        self.attention_norm_D = ones_param(D)
        self.query_DxNxH = truncated_normal_param(rngs, (D, N, H), spec("width", "heads", None), D)
        self.key_DxKxH = truncated_normal_param(rngs, (D, K, H), spec("width", "heads", None), D)
        self.value_DxKxH = truncated_normal_param(rngs, (D, K, H), spec("width", "heads", None), D)
        self.output_NxHxD = truncated_normal_param(rngs, (N, H, D), spec("heads", None, "width"), N * H, residual_scale)
        self.mlp_norm_D = ones_param(D)
        if F:
            self.gate_DxF = truncated_normal_param(rngs, (D, F), spec("width", "hidden"), D)
            self.up_DxF = truncated_normal_param(rngs, (D, F), spec("width", "hidden"), D)
            self.down_FxD = truncated_normal_param(rngs, (F, D), spec("hidden", "width"), F, residual_scale)
        if c.experts:
            self.moe = MixtureOfExperts(c, rngs)
        if c.qk_norm:
            if c.qk_norm_over == "projection":
                self.query_norm_NxH = ones_param(N, H, spec=spec("heads", None))
                self.key_norm_KxH = ones_param(K, H, spec=spec("heads", None))
            else:
                self.query_norm_H = ones_param(H)
                self.key_norm_H = ones_param(H)

    def __call__(
        self, x_BxLxD: jax.Array, rotary: tuple[jax.Array, jax.Array], attend: Attention
    ) -> tuple[jax.Array, RouterSums]:
        """Map [B, L, D] to [B, L, D], and return the router's statistics (`RouterSums`; empty for a dense model).

        `rotary` is the rows of `rotary_tables` at the L positions; `attend` computes the attention of all heads.
        """
        c, router = self.config, {}
        if c.norm_position == "after":  # a dense model
            y_BxLxD = self._attend(x_BxLxD, rotary, attend)
            x_BxLxD = x_BxLxD + rms_norm(y_BxLxD, self.attention_norm_D[...], c.norm_epsilon)
            return x_BxLxD + rms_norm(self._mlp(x_BxLxD), self.mlp_norm_D[...], c.norm_epsilon), router
        normed_BxLxD = rms_norm(x_BxLxD, self.attention_norm_D[...], c.norm_epsilon)
        x_BxLxD = x_BxLxD + self._attend(normed_BxLxD, rotary, attend)
        y_BxLxD = rms_norm(x_BxLxD, self.mlp_norm_D[...], c.norm_epsilon)
        if c.unrouted_hidden:
            x_BxLxD = x_BxLxD + self._mlp(y_BxLxD)
        if c.experts:
            mixed_BxLxD, router = self.moe(y_BxLxD)
            x_BxLxD = x_BxLxD + mixed_BxLxD
        return x_BxLxD, router

    def _attend(self, x_BxLxD: jax.Array, rotary: tuple[jax.Array, jax.Array], attend: Attention) -> jax.Array:
        c = self.config
        q_BxLxNxH, k_BxLxKxH, v_BxLxKxH = (
            _project_in(x_BxLxD, w[...], "heads") for w in (self.query_DxNxH, self.key_DxKxH, self.value_DxKxH)
        )
        if c.qk_norm:
            is_joint = c.qk_norm_over == "projection"
            query_norm, key_norm = (
                (self.query_norm_NxH, self.key_norm_KxH) if is_joint else (self.query_norm_H, self.key_norm_H)
            )
            q_BxLxNxH = rms_norm(q_BxLxNxH, query_norm[...], c.norm_epsilon)
            k_BxLxKxH = rms_norm(k_BxLxKxH, key_norm[...], c.norm_epsilon)
        q_BxLxNxH, k_BxLxKxH = apply_rotary(q_BxLxNxH, *rotary), apply_rotary(k_BxLxKxH, *rotary)
        return _project_out(attend(q_BxLxNxH, k_BxLxKxH, v_BxLxKxH), self.output_NxHxD[...], "heads")

    def _mlp(self, x_BxLxD: jax.Array) -> jax.Array:
        gate_BxLxF = _project_in(x_BxLxD, self.gate_DxF[...], "hidden")
        up_BxLxF = _project_in(x_BxLxD, self.up_DxF[...], "hidden")
        return _project_out(swiglu(gate_BxLxF, up_BxLxF), self.down_FxD[...], "hidden")


class Decoder(nnx.Module):
    """The language model: token ids to logits.

    Raises:
        UserError: A dim is not divisible by the size of the mesh axis over which it is sharded.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c = config
        check_model_on_mesh(c, jax.sharding.get_abstract_mesh().shape)
        self.config = nnx.static(config)
        self.embedding_VxD = truncated_normal_param(
            rngs, (c.vocabulary_size, c.width), RULES.spec("vocabulary", "width"), c.width
        )
        self.blocks = jax.vmap(functools.partial(Block, c))(rngs.split(c.layers))
        self.final_norm_D = ones_param(c.width)
        if not c.tie_embeddings:
            self.unembedding_DxV = truncated_normal_param(
                rngs, (c.width, c.vocabulary_size), RULES.spec("width", "vocabulary"), c.width
            )

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        """Map int32 [B, L] to float32 logits [B, L, V].

        The losses use `hidden_states` and `head` instead, so that the logits of all positions are never stored at once.
        """
        x_BxLxD, _ = self.hidden_states(tokens_BxL)
        head_DxV = gather_batch_axes(self.head())
        spec = RULES.spec("batch", None, "vocabulary")
        return jnp.einsum("bld,dv->blv", x_BxLxD, head_DxV, out_sharding=spec, preferred_element_type=jnp.float32)

    def hidden_states(self, tokens_BxL: jax.Array) -> tuple[jax.Array, RouterSums]:
        """Map int32 tokens [B, L] to the final hidden states, from which the logits are computed.

        Returns:
            Hidden states after the final norm, [B, L, D] in the compute dtype. Their product with the matrix that
                `head` returns is the logits.
            Router statistics of each layer (`RouterSums`), stacked along a first dim T; empty for a dense model.
        """
        c = self.config
        x_BxLxD = embed_tokens(self.embedding_VxD[...], tokens_BxL, jnp.dtype(c.compute_dtype))
        segment_ids_BxL = None if c.separator_token < 0 else segment_ids(tokens_BxL, c.separator_token)
        x_BxLxD, router = _apply_blocks(self.blocks, x_BxLxD, segment_ids_BxL, c)
        return rms_norm(x_BxLxD, self.final_norm_D[...], c.norm_epsilon), router

    def head(self) -> jax.Array:
        """Return the output projection [D, V] in the compute dtype, with the sharding of its parameter."""
        head_DxV = self.embedding_VxD[...].T if self.config.tie_embeddings else self.unembedding_DxV[...]
        return head_DxV.astype(jnp.dtype(self.config.compute_dtype))


def graph_definition(config: ModelConfig) -> nnx.GraphDef:
    """Return the graph definition of a `Decoder`: its structure without parameters. Call it under `jax.set_mesh`."""
    return _graph_definition(config, jax.sharding.get_abstract_mesh())


@functools.lru_cache(maxsize=16)
def _graph_definition(config: ModelConfig, mesh: jax.sharding.AbstractMesh) -> nnx.GraphDef:
    del mesh  # it is the current one; part of the key, because it decides which configurations are refused
    return nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=jax.random.key(0)))))


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Initialise the float32 parameters; traceable, so that `jax.eval_shape` gives shapes and shardings.

    They include the router's bias (`moe.ROUTER_BIAS`), which is saved and merged like parameters.
    """
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(params=key)), (nnx.Param, RouterBias)))


def abstract_params(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """Describe the shape, dtype and sharding on `mesh` of every parameter."""
    return jax.tree.map(lambda leaf: leaf, _abstract_params(config, mesh))  # a caller may change its dicts


@functools.lru_cache(maxsize=16)  # tracing takes longer than reading a small snapshot
def _abstract_params(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    # Create the key inside the traced function. Outside, it would run on a device, but the devices of a mesh for
    # ahead-of-time compilation cannot run anything.
    return abstract_arrays(mesh, lambda: init_params(config, jax.random.key(0)))


def apply(graph: nnx.GraphDef, params: Params, tokens_BxL: jax.Array) -> jax.Array:
    """Compute the logits [B, L, V] of a model for int32 tokens [B, L]."""
    return make_decoder(graph, params)(tokens_BxL)


def make_decoder(graph: nnx.GraphDef, params: Params) -> Decoder:
    """Build a `Decoder` from its graph definition and parameters."""
    return nnx.merge(graph, nnx.State(params))


def parameter_count(params: Params) -> int:
    """Count the scalars in a tree of arrays or abstract arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def activated_parameter_count(params: Params, config: ModelConfig) -> int:
    """Count the parameters used for one token, with only `experts_per_token` of the routed experts."""
    if not config.experts:
        return parameter_count(params)
    routed = {name: leaf for name, leaf in params["blocks"]["moe"].items() if name.startswith("expert_")}
    idle = config.experts - config.experts_per_token
    return parameter_count(params) - parameter_count(routed) * idle // config.experts


def segment_ids(tokens_BxL: jax.Array, separator_token: int) -> jax.Array:
    """Return the document number of each token: int32 [B, L], from 0. A separator belongs to the document it ends."""
    ends_BxL = (tokens_BxL == separator_token).astype(jnp.int32)
    return jnp.cumsum(ends_BxL, axis=1) - ends_BxL


def _apply_blocks(
    blocks: Block, x_BxLxD: jax.Array, segment_ids_BxL: jax.Array | None, config: ModelConfig
) -> tuple[jax.Array, RouterSums]:
    # Computed once, outside the scan and outside rematerialised code. If each layer cast its own matrices, the scan
    # would copy them in float32 in both passes, and stack their gradients in float32.
    blocks = cast_matrices(blocks, x_BxLxD.dtype)
    rotary = rotary_tables(x_BxLxD.shape[1], config.head_dim, config.rope_theta)
    attend = functools.partial(attention, segment_ids_BxL=segment_ids_BxL, window_tokens=config.attention_window_tokens)

    def step(x_BxLxD, layer):
        block, number = layer
        return block(x_BxLxD, rotary_tables_of_layer(rotary, number, config.no_rope_interval), attend)

    policies = {
        "none": step,
        "full": jax.checkpoint(step),
        "dots": jax.checkpoint(step, policy=jax.checkpoint_policies.save_only_these_names(MATMUL_CHECKPOINT_NAME)),
    }
    step = policies[config.remat]
    if config.scan_layers:
        return jax.lax.scan(step, x_BxLxD, (blocks, jnp.arange(config.layers)))
    leaves, structure = jax.tree.flatten(blocks)
    routers = []
    for number, layer in enumerate(zip(*map(_unstack, leaves), strict=True)):
        x_BxLxD, router = step(x_BxLxD, (jax.tree.unflatten(structure, layer), number))
        routers.append(router)
    return x_BxLxD, jax.tree.map(lambda *sums: jnp.stack(sums), *routers)


@jax.custom_vjp
def _unstack(leaf_Tx: jax.Array) -> tuple[jax.Array, ...]:
    """Return the T parts of an array along its first dim."""
    return tuple(jnp.squeeze(part, 0) for part in jax.lax.split(leaf_Tx, (1,) * leaf_Tx.shape[0]))


def _unstack_forward(leaf_Tx: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
    return _unstack(leaf_Tx), None


def _unstack_backward(_: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    # The barrier stops XLA for GPU from fusing the stack into each of its uses, where every element would be chosen
    # among those of all layers: the gradient's norm took a third of the step of a mixture of 5B.
    stacked_Tx = jnp.stack(gradients)
    barrier = jax.lax.optimization_barrier
    return (jax.lax.platform_dependent(stacked_Tx, cuda=barrier, default=lambda unchanged: unchanged),)


_unstack.defvjp(_unstack_forward, _unstack_backward)


def cast_matrices(blocks: Block, dtype: jnp.dtype) -> Block:
    """Cast what multiplies activations, which blocks expect; norms, the router and its bias are used in float32."""

    def cast(path: tuple, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return leaf if "norm" in name or "router" in name else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, blocks)


def _project_in(x_BxLxD: jax.Array, matrix: jax.Array, sharded_axis: str) -> jax.Array:
    """Project [B, L, D] with a matrix [D, *E] to [B, L, *E]; `sharded_axis` is the logical axis (`RULES`) of E[0]."""
    B, L, D = x_BxLxD.shape
    matrix_DxE = jnp.reshape(matrix, (D, -1), out_sharding=RULES.spec("width", sharded_axis))
    # Flatten to 2D: for 3D operands, XLA on CPU transposes the output's gradient to compute the matrix's gradient.
    y_SxE = sharded_matmul(x_BxLxD.reshape(B * L, D), matrix_DxE, RULES.spec("batch", sharded_axis))
    sharding = RULES.spec("batch", None, sharded_axis, *[None] * (matrix.ndim - 2))
    return jnp.reshape(y_SxE, (B, L, *matrix.shape[1:]), out_sharding=sharding)


def _project_out(x_BxLxE: jax.Array, matrix: jax.Array, sharded_axis: str) -> jax.Array:
    """Project [B, L, *E] with a matrix [*E, D] to [B, L, D]; `sharded_axis` is the logical axis (`RULES`) of E[0]."""
    B, L, D = *x_BxLxE.shape[:2], matrix.shape[-1]
    matrix_ExD = jnp.reshape(matrix, (-1, D), out_sharding=RULES.spec(sharded_axis, "width"))
    x_SxE = jnp.reshape(x_BxLxE, (B * L, -1), out_sharding=RULES.spec("batch", sharded_axis))
    y_SxD = sharded_matmul(x_SxE, matrix_ExD, RULES.spec("batch", None))
    return jnp.reshape(y_SxD, (B, L, D), out_sharding=RULES.spec("batch", None, None))
