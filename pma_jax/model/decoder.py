"""A decoder-only transformer: RMSNorm, rotary grouped-query attention, SwiGLU; blocks stacked and scanned.

Legend: B batch, L positions, V vocabulary, D width, N query heads, K key and value heads, H head dim, F hidden width,
T layers. Parameters are float32 and carry their sharding from the initialiser on; a matrix is cast to the compute dtype
and gathered along `fsdp` where it is used.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P

from pma_jax.config import ModelConfig
from pma_jax.mesh import RULES
from pma_jax.model.attention import attention, rotate

Params = dict  # nested: name -> array; the plain pytree that is trained, saved and merged


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, spec = config, RULES.spec
        D, N, K, H, F = c.width, c.heads, c.kv_heads, c.head_dim, c.hidden
        # The two matrices that write to the residual stream start smaller, so that its size does not grow with depth.
        shrink = 1 / math.sqrt(2 * c.layers)
        self.config = nnx.static(config)
        self.attention_norm_D = _ones(D)
        self.query_DxNxH = _normal(rngs, (D, N, H), spec("width", "heads", None), D)
        self.key_DxKxH = _normal(rngs, (D, K, H), spec("width", "heads", None), D)
        self.value_DxKxH = _normal(rngs, (D, K, H), spec("width", "heads", None), D)
        self.output_NxHxD = _normal(rngs, (N, H, D), spec("heads", None, "width"), N * H, shrink)
        self.mlp_norm_D = _ones(D)
        self.gate_DxF = _normal(rngs, (D, F), spec("width", "hidden"), D)
        self.up_DxF = _normal(rngs, (D, F), spec("width", "hidden"), D)
        self.down_FxD = _normal(rngs, (F, D), spec("hidden", "width"), F, shrink)
        if c.qk_norm:
            self.query_norm_H = _ones(H)
            self.key_norm_H = _ones(H)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """[B, L, D] -> [B, L, D]."""
        x_BxLxD = x_BxLxD + self._attend(rms_norm(x_BxLxD, self.attention_norm_D[...], self.config.norm_epsilon))
        return x_BxLxD + self._mlp(rms_norm(x_BxLxD, self.mlp_norm_D[...], self.config.norm_epsilon))

    def _attend(self, x_BxLxD: jax.Array) -> jax.Array:
        c, split = self.config, RULES.spec("batch", None, "heads", None)
        q, k, v = (
            jnp.einsum("bld,dnh->blnh", x_BxLxD, _gathered(w, x_BxLxD.dtype, "heads", 1), out_sharding=split)
            for w in (self.query_DxNxH[...], self.key_DxKxH[...], self.value_DxKxH[...])
        )
        if c.qk_norm:
            q = rms_norm(q, self.query_norm_H[...], c.norm_epsilon)
            k = rms_norm(k, self.key_norm_H[...], c.norm_epsilon)
        y_BxLxNxH = attention(rotate(q, c.rope_theta), rotate(k, c.rope_theta), v)
        output_NxHxD = _gathered(self.output_NxHxD[...], x_BxLxD.dtype, "heads", 0)
        return jnp.einsum("blnh,nhd->bld", y_BxLxNxH, output_NxHxD, out_sharding=RULES.spec("batch", None, None))

    def _mlp(self, x_BxLxD: jax.Array) -> jax.Array:
        dtype, split = x_BxLxD.dtype, RULES.spec("batch", None, "hidden")
        gate = jnp.einsum("bld,df->blf", x_BxLxD, _gathered(self.gate_DxF[...], dtype, "hidden", 1), out_sharding=split)
        up = jnp.einsum("bld,df->blf", x_BxLxD, _gathered(self.up_DxF[...], dtype, "hidden", 1), out_sharding=split)
        down_FxD = _gathered(self.down_FxD[...], dtype, "hidden", 0)
        y_BxLxF = jax.nn.silu(gate) * up
        return jnp.einsum("blf,fd->bld", y_BxLxF, down_FxD, out_sharding=RULES.spec("batch", None, None))


class Decoder(nnx.Module):
    """Tokens to logits."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c = config
        self.config = nnx.static(config)
        self.embedding_VxD = _normal(rngs, (c.vocabulary_size, c.width), RULES.spec("vocabulary", "width"), c.width)
        self.blocks = jax.vmap(functools.partial(Block, c))(rngs.split(c.layers))
        self.final_norm_D = _ones(c.width)
        if not c.tie_embeddings:
            self.unembedding_DxV = _normal(
                rngs, (c.width, c.vocabulary_size), RULES.spec("width", "vocabulary"), c.width
            )

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        """int32 [B, L] -> float32 logits [B, L, V]."""
        c = self.config
        dtype = jnp.dtype(c.compute_dtype)
        # The gather wants its table whole; rows that are not used cost no arithmetic.
        table_VxD = jax.reshard(self.embedding_VxD[...], P(None, None)).astype(dtype)
        x_BxLxD = table_VxD.at[tokens_BxL].get(out_sharding=RULES.spec("batch", None, None))
        x_BxLxD = _through_blocks(self.blocks, x_BxLxD, c)
        x_BxLxD = rms_norm(x_BxLxD, self.final_norm_D[...], c.norm_epsilon)
        if c.tie_embeddings:
            head_DxV = _gathered(self.embedding_VxD[...], dtype, "vocabulary", 0).T
        else:
            head_DxV = _gathered(self.unembedding_DxV[...], dtype, "vocabulary", 1)
        return jnp.einsum(
            "bld,dv->blv",
            x_BxLxD,
            head_DxV,
            out_sharding=RULES.spec("batch", None, "vocabulary"),
            preferred_element_type=jnp.float32,
        )


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x / rms(x) * scale over the last dim (arXiv 1910.07467); float32 inside, the dtype of `x` outside."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return (x32 * inverse * scale).astype(x.dtype)


def graph_definition(config: ModelConfig) -> nnx.GraphDef:
    """The static half of a `Decoder`; call under `jax.set_mesh`."""
    return nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=jax.random.key(0)))))


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Fresh float32 parameters as a nested dict; traceable, so `jax.eval_shape` gives shapes and shardings."""
    _, state = nnx.split(Decoder(config, nnx.Rngs(params=key)), nnx.Param)
    return nnx.to_pure_dict(state)


def apply(graph: nnx.GraphDef, params: Params, tokens_BxL: jax.Array) -> jax.Array:
    """Logits [B, L, V] of the model that `graph` and `params` make."""
    return nnx.merge(graph, nnx.State(params))(tokens_BxL)


def parameter_count(params: Params) -> int:
    """Number of scalars in a tree of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _through_blocks(blocks: Block, x_BxLxD: jax.Array, config: ModelConfig) -> jax.Array:
    def step(x_BxLxD, block):
        return block(x_BxLxD), None

    policies = {
        "none": step,
        "full": jax.checkpoint(step),
        "dots": jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    }
    step = policies[config.remat]
    if config.scan_layers:
        return jax.lax.scan(step, x_BxLxD, blocks)[0]
    for layer in range(config.layers):
        x_BxLxD, _ = step(x_BxLxD, jax.tree.map(lambda leaf, i=layer: leaf[i], blocks))
    return x_BxLxD


def _gathered(matrix: jax.Array, dtype: jnp.dtype, split: str, split_dim: int) -> jax.Array:
    """The matrix in the compute dtype, whole along `fsdp`; still split along the tensor axis at `split_dim`."""
    dims = [None] * matrix.ndim
    dims[split_dim] = split
    return jax.reshard(matrix.astype(dtype), RULES.spec(*dims))


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], spec: P, fan_in: int, gain: float = 1.0) -> nnx.Param:
    initializer = nnx.initializers.truncated_normal(stddev=gain / math.sqrt(fan_in))
    return nnx.Param(initializer(rngs.params(), shape, jnp.float32, out_sharding=spec))


def _ones(size: int) -> nnx.Param:
    return nnx.Param(jnp.ones((size,), jnp.float32))
