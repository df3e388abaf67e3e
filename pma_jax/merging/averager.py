"""Weighted sums of parameter trees in memory, computed by XLA where the parameters are.

    average         K trees at hand, in one pass: each input is read once and the result written once.
    average_stream  R rows of weights over K trees that are loaded one after the other, whatever K is: memory holds R
                    totals and at most two trees.

Everything is jitted and element-wise: each device adds its own shards, and no collective runs. `rounding` defines the
arithmetic. Weights and divisors are traced, so that one compilation serves all recipes. Integer and boolean leaves are
not averaged: they must be equal in all trees and are passed through.

On CPU a newly allocated result costs more in page faults than the sum itself (bfloat16 inputs: 7 GB/s instead of 30):
where merges repeat, pass an earlier result as `out`.

Dimensions: K checkpoints, R rows of weights (recipes).
"""

import concurrent.futures
import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from pma_jax.merging.compatibility import check_equal_integers, check_same_structure, device_put_like, is_float
from pma_jax.merging.engine.rounding import factor_coefficients, factor_rows, validate_weights

__all__ = ["abstract_totals", "add_weighted", "average", "average_stream"]

CHUNK = 16  # trees summed in one compiled pass; longer sums run chunk after chunk


def average(params_K: Sequence[Any], weights: ArrayLike, *, out: Any | None = None) -> Any:
    """Compute sum_k weights_k · params_k of K trees in memory, in one pass per 16 trees.

    Args:
        params_K: K trees of NumPy or JAX arrays, oldest first. Trees whose shardings differ from the first tree's are
            moved to those.
        weights: Coefficients [K], finite. A tree whose coefficient is 0 is validated but not read.
        out: An earlier result of the same shapes, dtypes and shardings, whose memory is reused (donated).

    Returns:
        Tree with the dtypes and shardings of the first input.

    Raises:
        ValueError: The trees differ in structure, shape or dtype (the leaves are named), integer leaves differ, or
            there is not one finite weight per tree.
    """
    c = validate_weights(np.asarray(weights)[None], len(params_K))[0]
    for k, params in enumerate(params_K[1:], start=2):
        check_same_structure(params_K[0], params, f"checkpoint {k}")
    params_K = [device_put_like(params, params_K[0]) for params in params_K]
    for k, params in enumerate(params_K[1:], start=2):
        check_equal_integers(params_K[0], params, f"checkpoint {k}")
    used = np.flatnonzero(c) if c.any() else np.arange(1)
    params_K = [params_K[k] for k in used]
    multipliers_K, divisor = factor_coefficients(c[used])
    multipliers_K = multipliers_K.astype(_weight_dtype())
    dtypes = _output_dtypes(params_K[0])
    if len(used) <= CHUNK:
        is_narrow = any(x.dtype.itemsize < 4 for x in jax.tree.leaves(params_K[0]))
        fused = fused_average_narrow if is_narrow and jax.default_backend() == "cpu" else fused_average
        return fused(out, params_K, multipliers_K, divisor, dtypes)
    total = None
    for start in range(0, len(used), CHUNK):
        chunk = slice(start, start + CHUNK)
        total = add_weighted(total, params_K[chunk], multipliers_K[chunk])
    return _divide(total, divisor, dtypes)


def average_stream(trees: Iterable[Any], weights_RxK: ArrayLike) -> tuple[Any, ...]:
    """Compute R weighted sums of K trees that are loaded one after the other: tree k+1 loads while tree k is added.

    Args:
        trees: K trees of arrays, oldest first. A thread calls `next`, at most one tree ahead, with the caller's mesh
            set. Trees whose shardings differ from the first tree's are moved to those.
        weights_RxK: Coefficients [R, K], finite.

    Returns:
        R trees with the dtypes and shardings of the first input.

    Raises:
        ValueError: The same as `average`, raised when the invalid tree is loaded. Exceptions of `trees` propagate.
    """
    C = validate_weights(weights_RxK, np.shape(weights_RxK)[-1])
    multipliers_RxK, divisors_R, first_R = factor_rows(C)
    abstract, first, totals_R = None, None, [None] * len(C)
    for k, params in enumerate(_load_ahead(iter(trees), C.shape[1])):
        name = f"checkpoint {k + 1}"
        if abstract is None:
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), params
            )
            first = _integers(params)
        check_same_structure(abstract, params, name)
        params = device_put_like(params, abstract)
        check_equal_integers(first, _integers(params), name)
        for r, multipliers_K in enumerate(multipliers_RxK):
            if multipliers_K[k] or k == first_R[r]:
                totals_R[r] = add_weighted(totals_R[r], [params], multipliers_K[k : k + 1].astype(_weight_dtype()))
        # Dispatch is asynchronous: without waiting, more than two trees would be in memory.
        jax.block_until_ready(totals_R)
        del params
    dtypes = _output_dtypes(abstract)
    for r, divisor in enumerate(divisors_R):
        totals_R[r] = _divide(totals_R[r], divisor, dtypes)
    return tuple(totals_R)


def abstract_totals(tree: Any) -> Any:
    """Return the shapes, dtypes and shardings of the total that sums trees like this one (arrays or abstract)."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, _total_dtype(x.dtype), sharding=getattr(x, "sharding", None)), tree
    )


@functools.partial(jax.jit, donate_argnums=0)
def add_weighted(total: Any | None, params_K: Sequence[Any], multipliers_K: jax.Array) -> Any:
    """Add sum_k multipliers_k · params_k to `total`, in place.

    Args:
        total: Tree like `abstract_totals`, donated; None starts a sum.
        params_K: K trees of the total's structure, shapes and shardings, of any floating-point dtype.
        multipliers_K: [K].

    Returns:
        The new total, in the old one's memory. Its integer and boolean leaves are those of the first tree.
    """
    inputs_K = [jax.tree.leaves(params) for params in params_K]
    totals = [None] * len(inputs_K[0]) if total is None else jax.tree.leaves(total)
    leaves = [_add_terms(t, x_K, multipliers_K) for t, *x_K in zip(totals, *inputs_K, strict=True)]
    return jax.tree.structure(params_K[0]).unflatten(leaves)


def _fused_average(
    out: Any | None, params_K: Sequence[Any], multipliers_K: jax.Array, divisor: ArrayLike, dtypes: tuple[str, ...]
) -> Any:
    """Compute (sum_k multipliers_k · params_k) / divisor in one pass, for validated and placed inputs.

    Args:
        out: Tree like the result, donated for its memory; or None.
        params_K: K trees of one structure, shapes and shardings.
        multipliers_K: [K].
        divisor: Scalar.
        dtypes: Dtype of each leaf of the result.
    """
    del out
    leaves_K = [jax.tree.leaves(params) for params in params_K]
    leaves = [
        _divide_leaf(_add_terms(None, x_K, multipliers_K), divisor, dtype)
        for *x_K, dtype in zip(*leaves_K, dtypes, strict=True)
    ]
    return jax.tree.structure(params_K[0]).unflatten(leaves)


_jit_fused = functools.partial(jax.jit, _fused_average, donate_argnums=0, keep_unused=True, static_argnames="dtypes")
fused_average = _jit_fused()
# For inputs of 16 bits or fewer on CPU: XLA's default of 256-bit vectors loads 16 bytes of bfloat16 at a time, a fifth
# slower than 32; for float32 the default is faster. JAX rejects compiler options in a jit inside another.
fused_average_narrow = _jit_fused(compiler_options={"xla_cpu_prefer_vector_width": 512})


def _add_terms(total: jax.Array | None, x_K: Sequence[jax.Array], multipliers_K: jax.Array) -> jax.Array:
    """Add one leaf of K trees to its total, oldest first."""
    if not is_float(x_K[0].dtype):
        return x_K[0]
    dtype = _total_dtype(jnp.result_type(*x_K)) if total is None else total.dtype
    for k, x in enumerate(x_K):
        term = _rounded_product(multipliers_K[k].astype(dtype), x.astype(dtype))
        total = term if total is None else total + term
    assert total is not None
    return total


def _rounded_product(multiplier: jax.Array, x: jax.Array) -> jax.Array:
    """Multiply so that compilers cannot fuse an addition into the product (FMA), which would skip its rounding."""
    bits = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
    # A zero that compilers cannot fold: multipliers are never NaN. XLA removes reduce_precision and pairs of bitcasts.
    zero = jnp.isnan(multiplier).astype(bits)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(multiplier * x, bits) ^ zero, x.dtype)


def _divide(total: Any, divisor: float, dtypes: tuple[str, ...]) -> Any:
    """Divide a total and round it to `dtypes`, leaf by leaf, in place where the dtype stays; donates the total."""
    leaves, treedef = jax.tree.flatten(total)
    del total
    for i, dtype in enumerate(dtypes):
        if is_float(leaves[i].dtype):
            leaves[i] = (_divide_in_place if leaves[i].dtype == dtype else _divide_and_cast)(leaves[i], divisor, dtype)
    return treedef.unflatten(leaves)


def _divide_leaf(total: jax.Array, divisor: ArrayLike, dtype: str) -> jax.Array:
    if not is_float(total.dtype):
        return total
    # XLA turns division by one scalar into multiplication by its rounded reciprocal, which differs in the last bit for
    # a third of all values. A divisor that differs between elements (1 where the total is NaN) stays a division.
    return (total / jnp.where(jnp.isnan(total), 1, jnp.asarray(divisor, total.dtype))).astype(dtype)


_divide_in_place = jax.jit(_divide_leaf, donate_argnums=0, static_argnames="dtype")
_divide_and_cast = jax.jit(_divide_leaf, static_argnames="dtype")


def _total_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the accumulation dtype: float32, float64 for float64 if JAX enables it; integers keep their own."""
    dtype = jnp.dtype(dtype)
    if not is_float(dtype):
        return dtype
    return jax.dtypes.canonicalize_dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _weight_dtype() -> np.dtype:
    return np.dtype(jax.dtypes.canonicalize_dtype(np.float64))


def _output_dtypes(tree: Any) -> tuple[str, ...]:
    """Return the result's dtype for each leaf: the input's, but float32 for float64 unless JAX enables float64."""
    return tuple(jax.dtypes.canonicalize_dtype(x.dtype).name for x in jax.tree.leaves(tree))


def _integers(tree: Any) -> Any:
    return jax.tree.map(lambda x: None if is_float(x.dtype) else x, tree)


def _load_ahead(trees: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield `count` items of `trees`; a thread loads the next one while the caller uses the current one."""
    mesh = jax.sharding.get_mesh()

    def load(k: int) -> Any:
        # The mesh is a setting of the caller's thread, and loaders may need it.
        with jax.set_mesh(mesh) if not mesh.empty else contextlib.nullcontext():
            try:
                return next(trees)
            except StopIteration:
                raise ValueError(f"{count} weights but only {k} checkpoints: give one weight each") from None

    with concurrent.futures.ThreadPoolExecutor(1, "load") as pool:
        ahead = pool.submit(load, 0)
        for k in range(1, count + 1):
            item = ahead.result()
            ahead = pool.submit(load, k) if k < count else concurrent.futures.Future()
            yield item
            del item
