"""A decoder-only transformer: RMSNorm, rotary grouped-query attention, SwiGLU; blocks stacked and scanned.

Legend: B batch, L positions, S = B L, V vocabulary, D width, N query heads, K key and value heads, H head dim, F hidden
width, T layers, E … the dims that a matrix maps D to, or to D. Parameters are float32 and carry their sharding from the
initialiser on; a matrix is cast to the compute dtype and gathered along `fsdp` where it is used.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from pma_jax.config import ModelConfig
from pma_jax.model.attention import attention, rotary_tables, rotate
from pma_jax.model.kernels.matmul import MATMUL_NAME, sharded_matmul
from pma_jax.model.layers import embed_tokens, normal_param, ones_param, rms_norm, swiglu
from pma_jax.model.moe import MixtureOfExperts, RouterBias, RouterSums
from pma_jax.runtime.mesh import RULES, abstract_arrays, gather_batch_axes

Params = dict  # nested: name -> array; the plain pytree that is trained, saved and merged


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, spec = config, RULES.spec
        D, N, K, H, F = c.width, c.heads, c.kv_heads, c.head_dim, c.shared_hidden
        # The two matrices that write to the residual stream start smaller, so that its size does not grow with depth.
        shrink = 1 / math.sqrt(2 * c.layers)
        self.config = nnx.static(config)
        self.attention_norm_D = ones_param(D)
        self.query_DxNxH = normal_param(rngs, (D, N, H), spec("width", "heads", None), D)
        self.key_DxKxH = normal_param(rngs, (D, K, H), spec("width", "heads", None), D)
        self.value_DxKxH = normal_param(rngs, (D, K, H), spec("width", "heads", None), D)
        self.output_NxHxD = normal_param(rngs, (N, H, D), spec("heads", None, "width"), N * H, shrink)
        self.mlp_norm_D = ones_param(D)
        if F:
            self.gate_DxF = normal_param(rngs, (D, F), spec("width", "hidden"), D)
            self.up_DxF = normal_param(rngs, (D, F), spec("width", "hidden"), D)
            self.down_FxD = normal_param(rngs, (F, D), spec("hidden", "width"), F, shrink)
        if c.experts:
            self.moe = MixtureOfExperts(c, rngs)
        if c.qk_norm:
            self.query_norm_H = ones_param(H)
            self.key_norm_H = ones_param(H)

    def __call__(
        self, x_BxLxD: jax.Array, rotary: tuple[jax.Array, jax.Array], segment_ids_BxL: jax.Array | None
    ) -> tuple[jax.Array, RouterSums]:
        """[B, L, D] -> [B, L, D], and what its router sums up.

        `rotary` is what `rotary_tables` gives for L and H, documents are `attention`'s.
        """
        c, router = self.config, {}
        normed_BxLxD = rms_norm(x_BxLxD, self.attention_norm_D[...], c.norm_epsilon)
        x_BxLxD = x_BxLxD + self._attend(normed_BxLxD, rotary, segment_ids_BxL)
        y_BxLxD = rms_norm(x_BxLxD, self.mlp_norm_D[...], c.norm_epsilon)
        if c.shared_hidden:
            x_BxLxD = x_BxLxD + self._mlp(y_BxLxD)
        if c.experts:
            mixed_BxLxD, router = self.moe(y_BxLxD)
            x_BxLxD = x_BxLxD + mixed_BxLxD
        return x_BxLxD, router

    def _attend(
        self, x_BxLxD: jax.Array, rotary: tuple[jax.Array, jax.Array], segment_ids_BxL: jax.Array | None
    ) -> jax.Array:
        c = self.config
        q_BxLxNxH, k_BxLxKxH, v_BxLxKxH = (
            _widen(x_BxLxD, w[...], "heads") for w in (self.query_DxNxH, self.key_DxKxH, self.value_DxKxH)
        )
        if c.qk_norm:
            q_BxLxNxH = rms_norm(q_BxLxNxH, self.query_norm_H[...], c.norm_epsilon)
            k_BxLxKxH = rms_norm(k_BxLxKxH, self.key_norm_H[...], c.norm_epsilon)
        q_BxLxNxH, k_BxLxKxH = rotate(q_BxLxNxH, *rotary), rotate(k_BxLxKxH, *rotary)
        y_BxLxNxH = attention(q_BxLxNxH, k_BxLxKxH, v_BxLxKxH, segment_ids_BxL, c.attention_window_tokens)
        return _narrow(y_BxLxNxH, self.output_NxHxD[...], "heads")

    def _mlp(self, x_BxLxD: jax.Array) -> jax.Array:
        gate_BxLxF = _widen(x_BxLxD, self.gate_DxF[...], "hidden")
        up_BxLxF = _widen(x_BxLxD, self.up_DxF[...], "hidden")
        return _narrow(swiglu(gate_BxLxF, up_BxLxF), self.down_FxD[...], "hidden")


class Decoder(nnx.Module):
    """Tokens to logits.

    Raises ValueError when a dim does not divide by the mesh axis that splits it.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c = config
        _check_divides(c)
        self.config = nnx.static(config)
        self.embedding_VxD = normal_param(
            rngs, (c.vocabulary_size, c.width), RULES.spec("vocabulary", "width"), c.width
        )
        self.blocks = jax.vmap(functools.partial(Block, c))(rngs.split(c.layers))
        self.final_norm_D = ones_param(c.width)
        if not c.tie_embeddings:
            self.unembedding_DxV = normal_param(
                rngs, (c.width, c.vocabulary_size), RULES.spec("width", "vocabulary"), c.width
            )

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        """int32 [B, L] -> float32 logits [B, L, V]. A loss takes `hidden` and `head`, and never holds all logits."""
        (x_BxLxD, _), head_DxV = self.hidden(tokens_BxL), gather_batch_axes(self.head())
        spec = RULES.spec("batch", None, "vocabulary")
        return jnp.einsum("bld,dv->blv", x_BxLxD, head_DxV, out_sharding=spec, preferred_element_type=jnp.float32)

    def hidden(self, tokens_BxL: jax.Array) -> tuple[jax.Array, RouterSums]:
        """int32 [B, L] -> normed states [B, L, D] in the compute dtype: what the head turns into logits.

        And what each layer's router sums up, stacked over T; no entries where the model is dense.
        """
        c = self.config
        x_BxLxD = embed_tokens(self.embedding_VxD[...], tokens_BxL, jnp.dtype(c.compute_dtype))
        segment_ids_BxL = None if c.separator_token < 0 else segment_ids(tokens_BxL, c.separator_token)
        x_BxLxD, router = _through_blocks(self.blocks, x_BxLxD, segment_ids_BxL, c)
        return rms_norm(x_BxLxD, self.final_norm_D[...], c.norm_epsilon), router

    def head(self) -> jax.Array:
        """The output projection [D, V] in the compute dtype, split as its parameter is."""
        head_DxV = self.embedding_VxD[...].T if self.config.tie_embeddings else self.unembedding_DxV[...]
        return head_DxV.astype(jnp.dtype(self.config.compute_dtype))


def graph_definition(config: ModelConfig) -> nnx.GraphDef:
    """The static half of a `Decoder`; call under `jax.set_mesh`."""
    return nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=jax.random.key(0)))))


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Fresh float32 parameters as a nested dict; traceable, so `jax.eval_shape` gives shapes and shardings.

    With the router's bias, which is saved and merged like them: `moe.ROUTER_BIAS`.
    """
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(params=key)), (nnx.Param, RouterBias)))


def abstract_params(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """Describe the shape, dtype and sharding on `mesh` of every parameter."""
    return abstract_arrays(mesh, lambda: init_params(config, jax.random.key(0)))


def apply(graph: nnx.GraphDef, params: Params, tokens_BxL: jax.Array) -> jax.Array:
    """Logits [B, L, V] of the model that `graph` and `params` make."""
    return make_decoder(graph, params)(tokens_BxL)


def make_decoder(graph: nnx.GraphDef, params: Params) -> Decoder:
    """The `Decoder` that `graph` and `params` make."""
    return nnx.merge(graph, nnx.State(params))


def parameter_count(params: Params) -> int:
    """Number of scalars in a tree of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def activated_parameter_count(params: Params, config: ModelConfig) -> int:
    """Number of scalars that one token meets: of the routed experts only those that it is sent to."""
    if not config.experts:
        return parameter_count(params)
    routed = {name: leaf for name, leaf in params["blocks"]["moe"].items() if name.startswith("expert_")}
    idle = config.experts - config.experts_per_token
    return parameter_count(params) - parameter_count(routed) * idle // config.experts


def segment_ids(tokens_BxL: jax.Array, separator_token: int) -> jax.Array:
    """int32 [B, L]: how many documents ended before each token of a window; a separator belongs to what it ends."""
    ends_BxL = (tokens_BxL == separator_token).astype(jnp.int32)
    return jnp.cumsum(ends_BxL, axis=1) - ends_BxL


def _through_blocks(
    blocks: Block, x_BxLxD: jax.Array, segment_ids_BxL: jax.Array | None, config: ModelConfig
) -> tuple[jax.Array, RouterSums]:
    # Made once, outside the scan and what it recomputes.
    rotary = rotary_tables(x_BxLxD.shape[1], config.head_dim, config.rope_theta)

    def step(x_BxLxD, block):
        return block(x_BxLxD, rotary, segment_ids_BxL)

    policies = {
        "none": step,
        "full": jax.checkpoint(step),
        "dots": jax.checkpoint(step, policy=jax.checkpoint_policies.save_only_these_names(MATMUL_NAME)),
    }
    step = policies[config.remat]
    if config.scan_layers:
        return jax.lax.scan(step, x_BxLxD, blocks)
    routers = []
    for layer in range(config.layers):
        x_BxLxD, router = step(x_BxLxD, jax.tree.map(lambda leaf, i=layer: leaf[i], blocks))
        routers.append(router)
    return x_BxLxD, jax.tree.map(lambda *sums: jnp.stack(sums), *routers)


def _widen(x_BxLxD: jax.Array, matrix: jax.Array, split: str) -> jax.Array:
    """[B, L, D] times [D, E …] -> [B, L, E …], the first dim of E split along the tensor axis."""
    B, L, D = x_BxLxD.shape
    matrix_DxE = jnp.reshape(matrix.astype(x_BxLxD.dtype), (D, -1), out_sharding=RULES.spec("width", split))
    # Two flat dims: with three, XLA on CPU transposes the gradient before the product that makes the weight's.
    y_SxE = sharded_matmul(x_BxLxD.reshape(B * L, D), matrix_DxE, RULES.spec("batch", split))
    sharding = RULES.spec("batch", None, split, *[None] * (matrix.ndim - 2))
    return jnp.reshape(y_SxE, (B, L, *matrix.shape[1:]), out_sharding=sharding)


def _narrow(x_BxLxE: jax.Array, matrix: jax.Array, split: str) -> jax.Array:
    """[B, L, E …] times [E …, D] -> [B, L, D]: sums over dims whose first is split along the tensor axis."""
    B, L, D = *x_BxLxE.shape[:2], matrix.shape[-1]
    matrix_ExD = jnp.reshape(matrix.astype(x_BxLxE.dtype), (-1, D), out_sharding=RULES.spec(split, "width"))
    x_SxE = jnp.reshape(x_BxLxE, (B * L, -1), out_sharding=RULES.spec("batch", split))
    y_SxD = sharded_matmul(x_SxE, matrix_ExD, RULES.spec("batch", None))
    return jnp.reshape(y_SxD, (B, L, D), out_sharding=RULES.spec("batch", None, None))


def _check_divides(config: ModelConfig) -> None:
    dims = {
        "vocabulary_size": "vocabulary",
        "width": "width",
        "heads": "heads",
        "kv_heads": "heads",
        **({"experts": "experts", "expert_hidden": "hidden"} if config.experts else {"hidden": "hidden"}),
    }
    for key, dim in dims.items():
        size, axis = getattr(config, key), getattr(RULES, dim)
        devices = jax.sharding.get_abstract_mesh().shape.get(axis, 1)
        if size % devices:
            raise ValueError(
                f"model.{key} ({size}) does not divide by the {devices} devices of mesh.{axis}, which split it: "
                f"change one of the two"
            )
