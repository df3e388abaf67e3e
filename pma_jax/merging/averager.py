"""The averager: K parameter trees and a row of weights -> one tree. Arrays in, arrays out; storage is the engine's.

All forms of sum_k c_k theta_k are jitted element-wise maps: every device adds its own shards, no collective runs, and
nothing is allocated besides the result. Legend: K checkpoints, R recipes.
  add_weighted    one checkpoint at a time into a donated total: the memory of one total, whatever K.
  average_stream  the same, fed by a loader that reads one checkpoint ahead.
  average         K checkpoints at once, one pass: each input is read once and the result written once.
  average_many    R rows of weights in one pass over K checkpoints.
  average_many_stream  the same, fed by a loader as `average_stream` is: the memory of R totals, whatever K.

Sums are float32 whatever the inputs' dtype, and divided once at the end: sums.py says how, and why. Integer and boolean
leaves are not averaged: they must be equal in all checkpoints and are passed through.

On CPU a fresh result costs more in page faults than the sum itself (bfloat16 in: 7 GB/s against 30): pass the result of
an earlier merge as `out` where merges repeat.
"""

import concurrent.futures
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from pma_jax.merging.agreement import (
    check_equal_integers,
    check_same,
    equal,
    is_float,
    leaf_name,
    place,
    refuse_unequal,
)
from pma_jax.merging.array_sums import (
    SUMMATIONS,
    abstract_total,
    add_fused,
    add_weighted,
    add_weighted_compensated,
    as_ratio,
    finish,
    fused_average,
    fused_average_many,
    fused_average_narrow,
    keeps,
    output_dtypes,
    weight_dtype,
    zeros_like_total,
)

__all__ = ["add_weighted", "average", "average_many", "average_many_stream", "average_stream", "zeros_like_total"]

CHUNK = 16  # checkpoints summed in one compiled pass; more are summed chunk after chunk


def average(
    params_K: Sequence[Any],
    weights: ArrayLike,
    *,
    dtype: DTypeLike | str = "keep",
    like: Any = None,
    out: Any = None,
    summation: str = "plain",
) -> Any:
    """sum_k weights_k · params_k over K trees in one pass (chunks of 16 when there are more).

    Args:
      params_K: K trees of arrays, oldest first; NumPy or JAX, on any mesh.
      weights: [K], float64 on the host; a checkpoint with weight 0 is checked but not read.
      dtype: of the result's float leaves; "keep" is the inputs'.
      like: tree of arrays or ShapeDtypeStructs whose shardings the result takes; by default the first input's.
        Inputs that lie elsewhere are moved there.
      out: an earlier result of the same shapes, dtypes and shardings, whose memory is taken over (donated).
      summation: "plain" adds in order; "pairwise" adds neighbours first; "compensated" carries the rounding error.

    Returns:
      Tree with the shardings of `like`.

    Raises:
      ValueError: inputs differ in structure, shape or dtype (every leaf is named), integer leaves are not equal, or
        there is not one finite weight for each.
    """
    if summation not in SUMMATIONS:
        raise ValueError(f"no summation is called {summation!r}: choose one of {', '.join(SUMMATIONS)}")
    c = _checked_weights(weights, len(params_K))
    placed_K = _checked_and_placed(params_K, like, dtype)
    used = np.flatnonzero(c) if c.any() else np.arange(1)
    placed_K, ratio, divisor = [placed_K[k] for k in used], *as_ratio(c[used])
    dtypes = output_dtypes(placed_K[0], dtype)
    narrow = jax.default_backend() == "cpu" and any(x.dtype.itemsize < 4 for x in jax.tree.leaves(placed_K[0]))
    fused = fused_average_narrow if narrow else fused_average
    if len(used) <= CHUNK:
        return fused(out, placed_K, ratio, divisor, dtypes, summation)
    if summation == "compensated":
        return average_stream(placed_K, c[used], dtype=dtype, compensated=True)
    in_total = output_dtypes(abstract_total(placed_K[0]), "keep")
    total = fused(None, placed_K[:CHUNK], ratio[:CHUNK], np.float32(1), in_total, summation)
    for start in range(CHUNK, len(used), CHUNK):
        total = add_fused(total, placed_K[start : start + CHUNK], ratio[start : start + CHUNK])
    return finish(total, divisor, dtypes)


def average_many(
    params_K: Sequence[Any],
    weights_RxK: ArrayLike,
    *,
    dtype: DTypeLike | str = "keep",
    like: Any = None,
    out: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    """R merges of the same K checkpoints in one compiled pass: a sweep.

    Args:
      params_K: as for `average`.
      weights_RxK: [R, K], float64 on the host, a row a recipe.
      dtype: as for `average`.
      like: as for `average`.
      out: R earlier results, whose memory is taken over (donated); on CPU this is several times faster.

    Returns:
      R trees. All are in memory at once.

    Raises:
      ValueError: as for `average`.
    """
    C = _checked_matrix(weights_RxK, len(params_K))
    placed_K = _checked_and_placed(params_K, like, dtype)
    return fused_average_many(out, placed_K, C.astype(weight_dtype()), output_dtypes(placed_K[0], dtype))


def average_stream(
    loads: Iterable[Any],
    weights: ArrayLike,
    *,
    dtype: DTypeLike | str = "keep",
    like: Any = None,
    compensated: bool = False,
) -> Any:
    """`average` for checkpoints that are loaded one after the other: checkpoint k+1 loads while k is added.

    A thread draws from `loads`, at most one tree ahead. Trees on the host (NumPy) are moved and added leaf by leaf, so
    that each device holds one total (two when compensated) and one leaf; arrays that the loader has put on the mesh
    are added where they are, and then the mesh holds two checkpoints besides.

    Args:
      loads: K trees, oldest first; the loading happens in its `next`, in a thread with the caller's mesh set.
      weights: [K], float64 on the host.
      dtype: as for `average`.
      like: as for `average`; by default the first tree's shardings.
      compensated: carry the rounding error of the sum.

    Returns:
      Tree with the shardings of `like`.

    Raises:
      ValueError: as for `average`, as soon as the offending checkpoint has been read; what `loads` raises is passed on.
    """
    multiply_K, divisor = _ratio(_checked_weights(weights, np.size(weights)))
    running: _LeafSum | None = None
    for k, params in enumerate(_one_ahead(iter(loads), len(multiply_K)), start=1):
        if running is None:
            running = _LeafSum(params, like, dtype, compensated)
        running.add(params, multiply_K[k - 1], f"checkpoint {k}")
        del params
    assert running is not None
    return running.finish(divisor)


def average_many_stream(
    loads: Iterable[Any], weights_RxK: ArrayLike, *, dtype: DTypeLike | str = "keep"
) -> tuple[Any, ...]:
    """`average_many` for checkpoints that are loaded one after the other: R totals in memory, and never K checkpoints.

    A thread draws from `loads`, at most one tree ahead of the one that is being added.

    Args:
      loads: K trees of arrays with the shardings that the results take, oldest first; loaded as for `average_stream`.
      weights_RxK: [R, K], float64 on the host, a row a recipe.
      dtype: as for `average`.

    Returns:
      R trees.

    Raises:
      ValueError: as for `average`, as soon as the offending checkpoint has been read; what `loads` raises is passed on.
    """
    C = _checked_matrix(weights_RxK, np.shape(weights_RxK)[-1])
    multiply_RxK, divisor_R = zip(*map(_ratio, C), strict=True)
    abstract, integers, totals_R = None, None, []
    for k, params in enumerate(_one_ahead(iter(loads), C.shape[1])):
        if k == 0:
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
            integers = [x for x in jax.tree.leaves(params) if not is_float(x.dtype)]
            totals_R = [zeros_like_total(abstract) for _ in C]
        check_same(abstract, params, f"checkpoint {k + 1}", dtypes=keeps(dtype))
        check_equal_integers(
            integers, [x for x in jax.tree.leaves(params) if not is_float(x.dtype)], f"checkpoint {k + 1}"
        )
        for r, multiply_K in enumerate(multiply_RxK):
            if multiply_K[k]:
                totals_R[r] = add_weighted(totals_R[r], params, multiply_K[k])
        # Dispatch runs ahead of the device: without waiting, more checkpoints would be held than the two promised.
        jax.block_until_ready(totals_R)
        del params
    dtypes = output_dtypes(abstract, dtype)
    for r, divisor in enumerate(divisor_R):
        totals_R[r] = finish(totals_R[r], divisor, dtypes)
    return tuple(totals_R)


def _one_ahead(loads: Iterator[Any], count: int) -> Iterator[Any]:
    """Yields `count` items of `loads`, each drawn by a thread while the caller works on the one before."""
    mesh = jax.sharding.get_mesh()

    def load(k: int) -> Any:
        # The mesh is a setting of the caller's thread; a loader may need it.
        with jax.set_mesh(mesh) if not mesh.empty else contextlib.nullcontext():
            try:
                return next(loads)
            except StopIteration:
                raise ValueError(f"{count} weights but only {k} checkpoints: give one weight each") from None

    with concurrent.futures.ThreadPoolExecutor(1, "load") as pool:
        ahead = pool.submit(load, 0)
        for k in range(1, count + 1):
            item = ahead.result()
            ahead = pool.submit(load, k) if k < count else concurrent.futures.Future()
            yield item
            del item


class _LeafSum:
    """The running sum of `average_stream`, a list of leaves."""

    def __init__(self, first: Any, like: Any, dtype: DTypeLike | str, compensated: bool):
        if like is not None:
            check_same(like, first, "checkpoint 1", dtypes=False)
        self._keep = keeps(dtype)
        self._dtypes = output_dtypes(first, dtype)
        self._abstract = jax.tree.map(
            lambda x, target: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(target, "sharding", None)),
            first,
            first if like is None else like,
        )
        leaves = jax.tree.leaves(self._abstract)
        self._totals: list[Any] = [zeros_like_total(x) if is_float(x.dtype) else None for x in leaves]
        self._errors = [zeros_like_total(x) if is_float(x.dtype) else None for x in leaves] if compensated else None

    def add(self, params: Any, weight: np.generic, name: str) -> None:
        check_same(self._abstract, params, name, dtypes=self._keep)
        targets, unequal = jax.tree.leaves(self._abstract), []
        for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
            if is_float(x.dtype) and weight == 0:
                continue
            x = jax.device_put(x, targets[i].sharding)
            if not is_float(x.dtype):
                if self._totals[i] is None:
                    self._totals[i] = x
                elif not equal(self._totals[i], x):
                    unequal.append(leaf_name(path))
            elif self._errors is None:
                self._totals[i] = add_weighted(self._totals[i], x, weight)
            else:
                self._totals[i], self._errors[i] = add_weighted_compensated(self._totals[i], self._errors[i], x, weight)
            # Dispatch runs ahead of the device: without waiting, every leaf would be moved before the first is added.
            jax.block_until_ready(self._totals[i])
        refuse_unequal(unequal, name)

    def finish(self, divisor: np.generic) -> Any:
        for i, error in enumerate(self._errors or ()):
            if error is not None:
                self._totals[i] = add_weighted(self._totals[i], error, weight_dtype().type(1))
        totals, self._totals, self._errors = self._totals, [], None
        return finish(jax.tree.structure(self._abstract).unflatten(totals), divisor, self._dtypes)


def _checked_and_placed(params_K: Sequence[Any], like: Any, dtype: DTypeLike | str) -> list[Any]:
    first = params_K[0]
    keep = keeps(dtype)
    for k, params in enumerate(params_K[1:], start=2):
        check_same(first, params, f"checkpoint {k}", dtypes=keep)
    if like is None:
        like = first
    else:
        check_same(like, first, "the first checkpoint", dtypes=False)
    placed_K = [place(params, like) for params in params_K]
    for k, params in enumerate(placed_K[1:], start=2):
        check_equal_integers(placed_K[0], params, f"checkpoint {k}")
    return placed_K


def _checked_weights(weights: ArrayLike, count: int) -> np.ndarray:
    c = np.asarray(weights, np.float64)
    if c.shape != (count,) or not count:
        raise ValueError(f"{count} checkpoints need one weight each, not weights of shape {c.shape}")
    if not np.isfinite(c).all():
        raise ValueError("weights must be finite")
    return c


def _checked_matrix(weights_RxK: ArrayLike, count: int) -> np.ndarray:
    C = np.asarray(weights_RxK, np.float64)
    if C.ndim != 2 or not len(C):
        raise ValueError(f"weights must be a matrix, a row a recipe, not of shape {C.shape}")
    for row in C:
        _checked_weights(row, count)
    return C


def _ratio(weights: np.ndarray) -> tuple[np.ndarray, np.generic]:
    """`as_ratio` of [K] weights of which some, or all, are 0."""
    multiply_K, divisor = np.zeros(len(weights), weight_dtype()), weight_dtype().type(1)
    if weights.any():
        multiply_K[weights != 0], divisor = as_ratio(weights[weights != 0])
    return multiply_K, divisor
