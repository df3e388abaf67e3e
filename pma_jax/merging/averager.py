"""Weighted sums of parameter trees in memory, computed by XLA on the devices that hold the parameters.

    weighted_sum             K trees in memory: each input is read once and the result written once.
    weighted_sums_of_stream  R rows of weights over K trees that are loaded one after the other: for any K, memory holds
                             R totals and at most two trees.

Weights are not normalised. All functions are jitted and element-wise: each device adds its own shards, and no
collective runs. `engine.rounding` defines the arithmetic. Weights and divisors are traced, so that one compilation
serves all recipes. Leaves that are not floating point are not added: they must be equal in all trees and are passed
through. JAX would round float64 leaves to float32 unless `jax_enable_x64` is set, so they are refused without it.

On CPU, page faults in a newly allocated result take longer than the sum itself (bfloat16 inputs: 7 GB/s, against
30 GB/s with reused memory): for repeated merges, pass an earlier result as `out`.

Shape suffixes: K trees (checkpoints), R rows of weights (recipes).
"""

import concurrent.futures
import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from pma_jax.config.errors import UserError
from pma_jax.merging.compatibility import (
    check_64_bit_leaves,
    check_equal_integers,
    check_same_structure,
    device_put_like,
    is_float,
)
from pma_jax.merging.engine.rounding import (
    are_products_exact,
    factor_coefficients,
    factor_rows,
    ulps_of_copies,
    validate_weights,
)

__all__ = ["abstract_totals", "add_weighted", "weighted_sum", "weighted_sums_of_stream"]

TREES_PER_PASS = 16  # maximum number of trees that one compiled pass adds


class LeafArithmetic(NamedTuple):
    """How the values of one leaf are computed: a static argument of the compiled sums.

    Attributes:
        dtype: Name of the output dtype.
        is_compared: Whether the mean is compared with that of copies of the newest value (see `engine.rounding`).
        is_exact: Whether each product of a multiplier and a value is exact in float32, so that it need not be rounded
            before it is added.
    """

    dtype: str
    is_compared: bool
    is_exact: bool


def weighted_sum(params_K: Sequence[Any], weights_K: ArrayLike, *, out: Any | None = None) -> Any:
    """Compute sum_k weights_k · params_k of K trees in memory, `TREES_PER_PASS` trees per pass.

    Args:
        params_K: K trees of NumPy or JAX arrays, oldest first. Trees with other shardings are resharded to the first
            tree's.
        weights_K: Finite weights, not normalised. A tree with weight 0 is validated, but its floating-point leaves are
            not added.
        out: Earlier result with the same shapes, dtypes and shardings. Its buffers are donated to the new result if at
            most `TREES_PER_PASS` weights are nonzero; otherwise it is ignored.

    Returns:
        Tree with the dtypes and shardings of the first input.

    Raises:
        UserError: The trees differ in structure, shape or dtype (the leaves are named), integer leaves differ, the
            number of weights is not K, a weight is not finite, or a leaf is float64 and `jax_enable_x64` is not set.
    """
    c = validate_weights(np.asarray(weights_K)[None], len(params_K))[0]
    for k, params in enumerate(params_K[1:], start=2):
        check_same_structure(params_K[0], params, f"checkpoint {k}")
    for params in params_K:
        check_64_bit_leaves(params)
    params_K = [device_put_like(params, params_K[0]) for params in params_K]
    for k, params in enumerate(params_K[1:], start=2):
        check_equal_integers(params_K[0], params, f"checkpoint {k}")
    # If all weights are 0, the first tree is used for its structure and integer leaves.
    used = np.flatnonzero(c) if c.any() else np.arange(1)
    params_K = [params_K[k] for k in used]
    multipliers_K, divisor = factor_coefficients(c[used])
    multipliers_K = multipliers_K.astype(_weight_dtype())
    outputs = _outputs(params_K[0], c[used])
    if len(used) <= TREES_PER_PASS:
        is_16bit = any(x.dtype.itemsize < 4 for x in jax.tree.leaves(params_K[0]))
        fused = fused_sum_16bit if is_16bit and jax.default_backend() == "cpu" else fused_sum
        return fused(out, params_K, multipliers_K, divisor, outputs)
    total = None
    for start in range(0, len(used), TREES_PER_PASS):
        trees = slice(start, start + TREES_PER_PASS)
        total = add_weighted(total, params_K[trees], multipliers_K[trees])
    return _divide(total, divisor, outputs, params_K[-1], multipliers_K)


def weighted_sums_of_stream(trees: Iterable[Any], weights_RxK: ArrayLike, dtypes: Any | None = None) -> tuple[Any, ...]:
    """Compute R weighted sums of K trees that are loaded one after the other: tree k+1 loads while tree k is added.

    Args:
        trees: K trees of arrays, oldest first; further trees are not read. A background thread prefetches one tree,
            under the caller's mesh. Trees with other shardings are resharded to the first tree's.
        weights_RxK: Finite weights, one row per sum, not normalised.
        dtypes: Tree of the dtypes of the results; by default those of the first input.

    Returns:
        R trees with these dtypes and the shardings of the first input.

    Raises:
        UserError: See `weighted_sum`; also if there are fewer than K trees. Invalid trees are reported when they are
            loaded. Exceptions of `trees` propagate.
    """
    C = validate_weights(weights_RxK, np.shape(weights_RxK)[-1])
    multipliers_RxK, divisors_R, first_used_R, last_used_R, _ = factor_rows(C)
    abstract, first_non_float, totals_R = None, None, [None] * len(C)
    for k, params in enumerate(_load_ahead(iter(trees), C.shape[1])):
        name = f"checkpoint {k + 1}"
        if abstract is None:
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), params
            )
            first_non_float = _non_float_leaves(params)
        check_same_structure(abstract, params, name)
        check_64_bit_leaves(params)
        params = device_put_like(params, abstract)
        check_equal_integers(first_non_float, _non_float_leaves(params), name)
        for r, multipliers_K in enumerate(multipliers_RxK):
            if multipliers_K[k] or k == first_used_R[r]:  # the latter if all weights of the row are 0
                totals_R[r] = add_weighted(totals_R[r], [params], multipliers_K[k : k + 1].astype(_weight_dtype()))
            if k == last_used_R[r]:
                used = multipliers_K[multipliers_K != 0].astype(_weight_dtype())
                totals_R[r] = _divide(totals_R[r], divisors_R[r], _outputs(abstract, C[r], dtypes), params, used)
        # Dispatch is asynchronous: without waiting, more than two trees would be in memory.
        jax.block_until_ready(totals_R)
        del params
    return tuple(totals_R)


def abstract_totals(tree: Any) -> Any:
    """Return the abstract total (a tree of `jax.ShapeDtypeStruct`) for trees like `tree`, which may be abstract."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, _total_dtype(x.dtype), sharding=getattr(x, "sharding", None)), tree
    )


@functools.partial(jax.jit, donate_argnums=0)
def add_weighted(total: Any | None, params_K: Sequence[Any], multipliers_K: jax.Array) -> Any:
    """Return total + sum_k multipliers_k · params_k; donate `total`.

    Args:
        total: Tree as described by `abstract_totals`; None starts a sum.
        params_K: K trees of the total's structure, shapes and shardings, of any floating-point dtype.
        multipliers_K: Factor of each tree.

    Returns:
        The new total. Its integer and boolean leaves are those of the first tree.
    """
    inputs_K = [jax.tree.leaves(params) for params in params_K]
    totals = [None] * len(inputs_K[0]) if total is None else jax.tree.leaves(total)
    leaves = [_add_terms(t, x_K, multipliers_K) for t, *x_K in zip(totals, *inputs_K, strict=True)]
    return jax.tree.structure(params_K[0]).unflatten(leaves)


def _fused_sum(
    out: Any | None,
    params_K: Sequence[Any],
    multipliers_K: jax.Array,
    divisor: ArrayLike,
    outputs: tuple[LeafArithmetic, ...],
) -> Any:
    """Compute (sum_k multipliers_k · params_k) / divisor in one pass, for validated inputs of equal shardings.

    Args:
        out: Tree like the result, whose buffers are donated; or None.
        params_K: K trees of one structure, shapes and shardings.
        multipliers_K: Factor of each tree.
        divisor: Number by which the sum is divided.
        outputs: The result of `_outputs`.
    """
    del out
    leaves_K = [jax.tree.leaves(params) for params in params_K]
    leaves = [
        _divide_leaf(_add_terms(None, x_K, multipliers_K, output.is_exact), divisor, output, x_K[-1], multipliers_K)
        for *x_K, output in zip(*leaves_K, outputs, strict=True)
    ]
    return jax.tree.structure(params_K[0]).unflatten(leaves)


_jit_fused = functools.partial(jax.jit, _fused_sum, donate_argnums=0, keep_unused=True, static_argnames="outputs")
fused_sum = _jit_fused()
# On CPU, for inputs of 16 bits or fewer: 512-bit vectors are a fifth faster than XLA's default of 256 bits, which loads
# only 16 bytes of bfloat16 at a time. For float32 the default is faster. This function cannot be called inside another
# jit, because JAX rejects compiler options there.
fused_sum_16bit = _jit_fused(compiler_options={"xla_cpu_prefer_vector_width": 512})


def _add_terms(
    total: jax.Array | None, x_K: Sequence[jax.Array], multipliers_K: jax.Array, is_exact: bool = False
) -> jax.Array:
    """Add one leaf of K trees to its total, oldest first.

    Args:
        total: Sum of the older trees; None starts a sum.
        x_K: The leaf of each tree.
        multipliers_K: Factor of each tree.
        is_exact: See `LeafArithmetic`. An FMA then gives the same bits as a product and a sum.

    Returns:
        The new sum, in the accumulation dtype.
    """
    if not is_float(x_K[0].dtype):
        return x_K[0]
    dtype = _total_dtype(jnp.result_type(*x_K)) if total is None else total.dtype
    for k, x in enumerate(x_K):
        multiplier, x = multipliers_K[k].astype(dtype), x.astype(dtype)
        term = multiplier * x if is_exact else _rounded_product(multiplier, x)
        total = term if total is None else total + term
    assert total is not None
    return total


def _rounded_product(multiplier: jax.Array, x: jax.Array) -> jax.Array:
    """Multiply and round; prevent contraction with a following addition to an FMA, which does not round the product."""
    bits = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
    # Always 0, because multipliers are never NaN, but XLA cannot know that and so keeps the XOR. A pair of bitcasts
    # without it, or reduce_precision, would not help: XLA removes both.
    zero = jnp.isnan(multiplier).astype(bits)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(multiplier * x, bits) ^ zero, x.dtype)


def _divide(
    total: Any, divisor: float, outputs: tuple[LeafArithmetic, ...], newest: Any, multipliers_K: np.ndarray
) -> Any:
    """Divide each leaf of `total` and cast it to its output dtype; donate the leaves that keep their dtype.

    Args:
        total: The complete sum.
        divisor: Number by which it is divided.
        outputs: The result of `_outputs`.
        newest: The newest tree in the sum.
        multipliers_K: Factor of each tree in the sum.
    """
    leaves, treedef = jax.tree.flatten(total)
    for i, (output, x) in enumerate(zip(outputs, jax.tree.leaves(newest), strict=True)):
        if is_float(leaves[i].dtype):
            divide = _divide_in_place if leaves[i].dtype == output.dtype else _divide_and_cast
            leaves[i] = divide(leaves[i], divisor, output, x, multipliers_K)
    return treedef.unflatten(leaves)


def _divide_leaf(
    total: jax.Array, divisor: ArrayLike, output: LeafArithmetic, newest: jax.Array, multipliers_K: jax.Array
) -> jax.Array:
    """Divide a sum and cast it; where it is the mean of copies of the newest value, return that value."""
    if not is_float(total.dtype):
        return total
    mean = _rounded_quotient(total, divisor)
    if not output.is_compared:
        return mean.astype(output.dtype)
    copies = _rounded_quotient(_add_copies(newest, multipliers_K), divisor)
    bits = jnp.uint64 if mean.dtype == jnp.float64 else jnp.uint32
    is_equal = jax.lax.bitcast_convert_type(mean, bits) == jax.lax.bitcast_convert_type(copies, bits)
    return jnp.where(is_equal & jnp.isfinite(mean), newest.astype(output.dtype), mean.astype(output.dtype))


def _add_copies(x: jax.Array, multipliers_K: jax.Array) -> jax.Array:
    """Compute sum_k multipliers_k · x as `_add_terms` adds different trees.

    At most `TREES_PER_PASS` terms are written out, so that the time of compilation does not grow with K.
    """
    chunks, rest = divmod(len(multipliers_K), TREES_PER_PASS)
    if not chunks or (chunks, rest) == (1, 0):
        return _add_terms(None, [x] * len(multipliers_K), multipliers_K)

    def add_chunk(i: jax.Array, total: jax.Array) -> jax.Array:
        factors = jax.lax.dynamic_slice_in_dim(multipliers_K, i * TREES_PER_PASS, TREES_PER_PASS)
        return _add_terms(total, [x] * TREES_PER_PASS, factors)

    multipliers_K = jnp.asarray(multipliers_K)
    total = _add_terms(None, [x] * TREES_PER_PASS, multipliers_K[:TREES_PER_PASS])
    total = jax.lax.fori_loop(1, chunks, add_chunk, total)
    return _add_terms(total, [x] * rest, multipliers_K[chunks * TREES_PER_PASS :]) if rest else total


def _rounded_quotient(total: jax.Array, divisor: ArrayLike) -> jax.Array:
    # XLA turns division by one scalar into multiplication by its rounded reciprocal, which differs in the last bit for
    # a third of all values. Dividing by an array prevents this: the divisor is 1 where
    # the total is NaN, so that XLA cannot treat it as one scalar.
    return total / jnp.where(jnp.isnan(total), 1, jnp.asarray(divisor, total.dtype))


_divide_in_place = jax.jit(_divide_leaf, donate_argnums=0, static_argnames="output")
_divide_and_cast = jax.jit(_divide_leaf, static_argnames="output")


def _total_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the accumulation dtype of leaves of `dtype`.

    It is float64 for float64, float32 for other floating-point dtypes, else `dtype`.
    """
    dtype = jnp.dtype(dtype)
    if not is_float(dtype):
        return dtype
    return jax.dtypes.canonicalize_dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _weight_dtype() -> np.dtype:
    return np.dtype(jax.dtypes.canonicalize_dtype(np.float64))


def _outputs(tree: Any, weights_K: np.ndarray, dtypes: Any | None = None) -> tuple[LeafArithmetic, ...]:
    """Return how each leaf is computed; by default, the output dtypes are those of the tree."""
    names = [jax.dtypes.canonicalize_dtype(x.dtype).name for x in jax.tree.leaves(tree)]
    out_names = names if dtypes is None else [np.dtype(dtype).name for dtype in jax.tree.leaves(dtypes)]
    pairs = list(zip(names, out_names, strict=True))
    arithmetic = {
        (name, out_name): LeafArithmetic(
            out_name, ulps_of_copies(weights_K, name, out_name) > 0, are_products_exact(weights_K, name)
        )
        for name, out_name in set(pairs)
    }
    return tuple(arithmetic[pair] for pair in pairs)


def _non_float_leaves(tree: Any) -> Any:
    return jax.tree.map(lambda x: None if is_float(x.dtype) else x, tree)


def _load_ahead(trees: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield `count` trees; a thread loads the next one while the caller uses the current one."""
    mesh = jax.sharding.get_mesh()

    def load(k: int) -> Any:
        # The mesh is a setting of the caller's thread, and loaders may need it.
        with jax.set_mesh(mesh) if not mesh.empty else contextlib.nullcontext():
            try:
                return next(trees)
            except StopIteration:
                raise UserError(f"{count} weights but only {k} trees: pass one weight per tree") from None

    with concurrent.futures.ThreadPoolExecutor(1, "load") as pool:
        ahead = pool.submit(load, 0)
        for k in range(1, count + 1):
            item = ahead.result()
            ahead = pool.submit(load, k) if k < count else concurrent.futures.Future()
            yield item
            del item
