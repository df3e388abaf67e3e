"""The jitted sums under the averager: weighted, fused, compensated; donated, in float32, divided once at the end.

Weights and divisor are traced, so one compile serves every recipe. Weights in whole-number ratios (SMA, WMA) are
applied as whole numbers and divided out once (`as_ratio`): the mean of bfloat16 inputs is then the correctly rounded
one, where 0.1 · x summed ten times is not. Legend: K checkpoints, R recipes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from pma_jax.merging.agreement import is_float

BLOCK = 65536  # elements of each input that `fused_average_many` has in cache at once, on CPU
SUMMATIONS = ("plain", "pairwise", "compensated")


def total_dtype(dtype: DTypeLike) -> np.dtype:
    """What leaves of this dtype are summed in: float32; float64 for float64 if JAX has it; integers themselves."""
    dtype = jnp.dtype(dtype)
    if not is_float(dtype):
        return dtype
    return jax.dtypes.canonicalize_dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def zeros_like_total(abstract: Any) -> Any:
    """A total to add to: zeros of the leaves' shapes and shardings, in the dtypes that sums are kept in.

    Args:
      abstract: tree of arrays or ShapeDtypeStructs; a leaf without a sharding goes to the default device.
    """
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, total_dtype(x.dtype), device=getattr(x, "sharding", None)), abstract
    )


@functools.partial(jax.jit, donate_argnums=0)
def add_weighted(total: Any, params: Any, weight: ArrayLike) -> Any:
    """total + weight · params, in place.

    Args:
      total: as from `zeros_like_total`; donated, so not to be used afterwards.
      params: tree of the same structure, shapes and shardings; any float dtype.
      weight: scalar, traced.

    Returns:
      The new total, in the old one's memory. Integer and boolean leaves are params'.
    """
    return jax.tree.map(
        lambda t, p: t + jnp.asarray(weight, t.dtype) * p.astype(t.dtype) if is_float(p.dtype) else p, total, params
    )


@functools.partial(jax.jit, donate_argnums=(0, 1))
def add_weighted_compensated(
    total: jax.Array, error: jax.Array, x: jax.Array, weight: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """`add_weighted` of one leaf that keeps what rounding loses (Knuth's two-sum), for sums of many checkpoints.

    One leaf and not a tree: XLA copies the old total, which both results need, and a leaf is a small copy.

    Args:
      total: sum so far; donated.
      error: the same shape, what is still to be added to `total`; donated.
      x: any float dtype.
      weight: scalar, traced.

    Returns:
      (total, error); their sum is the total, with an error that does not grow with the number of checkpoints.
    """
    return _two_sum(total, error, jnp.asarray(weight, total.dtype) * x.astype(total.dtype))


def finish(total: Any, divisor: ArrayLike, dtypes: tuple[str, ...]) -> Any:
    """total / divisor, rounded once, in the given dtypes (one a leaf, as from `output_dtypes`).

    Leaf after leaf, in place where the dtype stays; the total must not be used afterwards.
    """
    leaves, treedef = jax.tree.flatten(total)
    del total
    for i, dtype in enumerate(dtypes):
        if is_float(leaves[i].dtype):
            leaves[i] = (_finish_in_place if leaves[i].dtype == dtype else _finish_as)(leaves[i], divisor, dtype)
    return treedef.unflatten(leaves)


def _fused_average(
    out: Any, params_K: Sequence[Any], weights_K: jax.Array, divisor: ArrayLike, dtypes: tuple[str, ...], summation: str
) -> Any:
    """(sum_k weights_k · params_k) / divisor in one pass; what `average` calls once inputs are checked and placed.

    Args:
      out: tree like the result, or None; donated: only its memory is used.
      params_K: K trees of one structure, shapes and shardings.
      weights_K: [K], traced.
      divisor: scalar, traced.
      dtypes: the result's, one a leaf.
      summation: one of SUMMATIONS.
    """
    del out
    treedef = jax.tree.structure(params_K[0])
    inputs_K = [jax.tree.leaves(params) for params in params_K]
    leaves = [
        _finish_leaf(_sum_leaf(x_K, weights_K, summation), divisor, d)
        for *x_K, d in zip(*inputs_K, dtypes, strict=True)
    ]
    return treedef.unflatten(leaves)


_jit_fused = functools.partial(
    jax.jit, _fused_average, donate_argnums=0, keep_unused=True, static_argnames=("dtypes", "summation")
)
fused_average = _jit_fused()
# The same for inputs of 16 bits or fewer on CPU: XLA's default of 256-bit vectors loads 16 bytes of bfloat16 at a time,
# a fifth slower than 32; for float32 the default is faster. JAX refuses compiler options inside another jit.
fused_average_narrow = _jit_fused(compiler_options={"xla_cpu_prefer_vector_width": 512})


@functools.partial(jax.jit, donate_argnums=0)
def add_fused(total: Any, params_K: Sequence[Any], weights_K: jax.Array) -> Any:
    """total + sum_k weights_k · params_k, in place and in one pass; K at a time what `add_weighted` does singly."""
    return jax.tree.map(
        lambda t, *x_K: t + _sum_leaf(x_K, weights_K, "pairwise") if is_float(x_K[0].dtype) else x_K[0],
        total,
        *params_K,
    )


# The pass would widen whole bfloat16 inputs before `_blocked_rows`' loop over blocks, in fresh memory.
@functools.partial(
    jax.jit,
    donate_argnums=0,
    keep_unused=True,
    static_argnames="dtypes",
    compiler_options={"xla_disable_hlo_passes": "while-loop-invariant-code-motion"},
)
def fused_average_many(
    out: tuple[Any, ...] | None, params_K: Sequence[Any], weights_RxK: jax.Array, dtypes: tuple[str, ...]
) -> tuple[Any, ...]:
    """R merges of K trees in one pass; what `average_many` calls once inputs are checked and placed.

    Args:
      out: R trees like the results, or None; donated: only their memory is used.
      params_K: K trees of one structure, shapes and shardings.
      weights_RxK: [R, K], traced.
      dtypes: the results', one a leaf.
    """
    rows = len(weights_RxK)
    treedef = jax.tree.structure(params_K[0])
    inputs_K = [jax.tree.leaves(params) for params in params_K]
    out_R = [jax.tree.leaves(tree) for tree in out] if out is not None else [[None] * len(dtypes)] * rows
    leaves = [
        _rows_leaf([leaves[i] for leaves in out_R], [leaves[i] for leaves in inputs_K], weights_RxK, dtype)
        for i, dtype in enumerate(dtypes)
    ]
    return tuple(treedef.unflatten([leaf_R[r] for leaf_R in leaves]) for r in range(rows))


def as_ratio(weights: np.ndarray) -> tuple[np.ndarray, np.generic]:
    """Weights as what to multiply by while summing and what to divide by at the end: c = ratio / divisor.

    Weights in whole-number ratios with the smallest one (SMA: 1, 1, …; WMA: 1, 2, …) become those whole numbers, whose
    products with bfloat16 and float16 values are exact in float32. Any others are kept as they are, over 1.

    Args:
      weights: float64 [K], none of them 0 (unless all are).

    Returns:
      ([K], []) in `weight_dtype()`.
    """
    smallest = np.abs(weights).min()
    if 1e-30 < smallest < 1e30:
        ratio = weights / smallest
        whole = np.round(ratio)
        if np.abs(whole).max() <= 1024 and np.allclose(ratio, whole, rtol=1e-12, atol=0):
            divisor = 1.0 / smallest
            near = round(divisor)
            exact = near if abs(divisor - near) <= 1e-9 * divisor and near else divisor
            return whole.astype(weight_dtype()), weight_dtype().type(exact)
    return weights.astype(weight_dtype()), weight_dtype().type(1)


def weight_dtype() -> np.dtype:
    """Weights travel to the device as float64 where JAX has it turned on, else float32."""
    return np.dtype(np.float64) if jax.config.read("jax_enable_x64") else np.dtype(np.float32)


def output_dtypes(tree: Any, dtype: DTypeLike | str) -> tuple[str, ...]:
    """The result's dtype for each leaf: floats as asked ("keep": their own), integers and booleans their own."""
    return tuple(
        jnp.dtype(x.dtype if (isinstance(dtype, str) and dtype == "keep") or not is_float(x.dtype) else dtype).name
        for x in jax.tree.leaves(tree)
    )


def abstract_total(tree: Any) -> Any:
    """Shapes and dtypes of `zeros_like_total(tree)`, without the arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, total_dtype(x.dtype)), tree)


def _sum_leaf(x_K: Sequence[jax.Array], weights_K: jax.Array, summation: str) -> jax.Array:
    if not is_float(x_K[0].dtype):
        return x_K[0]
    dtype = total_dtype(jnp.result_type(*x_K))
    terms = [weights_K[k].astype(dtype) * x.astype(dtype) for k, x in enumerate(x_K)]
    if summation == "compensated":
        total, error = terms[0], jnp.zeros_like(terms[0])
        for term in terms[1:]:
            total, error = _two_sum(total, error, term)
        return total + error
    while summation == "pairwise" and len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)] + terms[len(terms) & ~1 :]
    return functools.reduce(jnp.add, terms)


def _rows_leaf(
    out_R: Sequence[jax.Array | None], x_K: Sequence[jax.Array], weights_RxK: jax.Array, dtype: str
) -> Sequence[jax.Array]:
    """R weighted sums of one leaf."""
    if not is_float(x_K[0].dtype):
        return [x_K[0]] * len(out_R)
    given_R = [out for out in out_R if out is not None]
    if jax.default_backend() != "cpu" or len(given_R) < len(out_R):
        return [_sum_leaf(x_K, weights_K, "plain").astype(dtype) for weights_K in weights_RxK]
    sharding = jax.typeof(x_K[0]).sharding
    if sharding.mesh.empty:
        return _blocked_rows(given_R, x_K, weights_RxK)
    return jax.shard_map(
        _blocked_rows, mesh=sharding.mesh, in_specs=(sharding.spec, sharding.spec, jax.P()), out_specs=sharding.spec
    )(given_R, x_K, weights_RxK)


def _blocked_rows(out_R: Sequence[jax.Array], x_K: Sequence[jax.Array], weights_RxK: jax.Array) -> Sequence[jax.Array]:
    """R weighted sums of one device's shard, block after block.

    XLA's CPU compiler makes one loop a row, and each would read all inputs from memory again; a block stays in cache.
    """
    size = x_K[0].size
    block = min(BLOCK, size)

    def add_block(i, flat_R):
        # The last block overlaps the one before instead of being shorter: it writes the same values again.
        start = jnp.minimum(i * block, size - block)
        block_K = [jax.lax.dynamic_slice(x.reshape(-1), (start,), (block,)) for x in x_K]
        sums_R = [_sum_leaf(block_K, weights_K, "plain") for weights_K in weights_RxK]
        return [
            jax.lax.dynamic_update_slice(flat, total.astype(flat.dtype), (start,))
            for flat, total in zip(flat_R, sums_R, strict=True)
        ]

    flat_R = [out.reshape(-1) for out in out_R]
    flat_R = jax.lax.fori_loop(0, -(-size // block), add_block, flat_R) if size else flat_R
    return [flat.reshape(x_K[0].shape) for flat in flat_R]


def _two_sum(total: jax.Array, error: jax.Array, term: jax.Array) -> tuple[jax.Array, jax.Array]:
    new = total + term
    took = new - total
    return new, error + ((total - (new - took)) + (term - took))


def _finish_leaf(total: jax.Array, divisor: ArrayLike, dtype: str) -> jax.Array:
    if not is_float(total.dtype):
        return total
    # XLA turns division by one scalar into multiplication by its rounded reciprocal, which is one bit off in a third
    # of all values; a divisor that differs between elements (1 where the total is NaN anyway) is left a division.
    divisor = jnp.where(jnp.isnan(total), 1, jnp.asarray(divisor, total.dtype))
    return (total / divisor).astype(dtype)


_finish_in_place = jax.jit(_finish_leaf, donate_argnums=0, static_argnames="dtype")
_finish_as = jax.jit(_finish_leaf, static_argnames="dtype")


def keeps(dtype: DTypeLike | str) -> bool:
    """Whether the result takes its inputs' dtypes."""
    return isinstance(dtype, str) and dtype == "keep"
