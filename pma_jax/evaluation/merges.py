"""Scores of merges of stored snapshots, such as held-out losses. Each merge is a row of weights, one per snapshot.

Dimensions: R merges, K snapshots, D documents.
"""

import dataclasses
import itertools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config import Config
from pma_jax.data.sampling import HeldOutLoss, estimate
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.merging.averager import weighted_sums_of_stream
from pma_jax.model.decoder import Params, abstract_params
from pma_jax.runs.snapshots import Snapshot, restore_params
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import make_mesh
from pma_jax.runtime.progress import Progress

MEMORY_SHARE = 0.5  # share of the free memory that merges may use; evaluation needs the rest
SNAPSHOTS_IN_MEMORY = 2  # the one that is being added to the merges, and the next one, which is being read


@dataclasses.dataclass(frozen=True)
class EvaluatedMerges:
    """The loss of each merge, and what the evaluation cost."""

    losses: list[HeldOutLoss]  # in the order of the rows
    sums: np.ndarray  # float64 [R, D], the summed loss of each document of the sample, in nats
    counts: np.ndarray  # float64 [D], the number of targets of each document
    passes: int  # how many times the snapshots were read
    seconds: dict[str, float]  # "read": reading snapshots (adding them overlaps with it); "evaluate": evaluating merges


def evaluate_merges(
    config: Config, snapshots: Sequence[Snapshot], weights_RxK: ArrayLike, part: str, progress: Progress | None = None
) -> EvaluatedMerges:
    """Compute the held-out loss of the merge that each row of weights defines. See `score_merges` for cost and memory.

    Args:
        config: Determines the model, the held-out text and the mesh; its `evaluation` may differ from that of the
            snapshots.
        snapshots: K snapshots of one model. Both kinds may be listed, as long as no row mixes them.
        weights_RxK: float64 [R, K], one row per merge.
        part: The part of the held-out text (`data.sampling.PARTS`).
        progress: As in `score_merges`.

    Raises:
        UserError: A snapshot is corrupt or does not fit the model.
    """
    evaluator = make_evaluator(config, make_mesh(config.mesh), part)
    scored = score_merges(config, snapshots, weights_RxK, evaluator.sum_by_document, progress)
    counts_D = evaluator.sample.counts_D
    losses = [estimate(nats_D, counts_D) for nats_D in scored.scores]
    return EvaluatedMerges(losses, np.array(scored.scores), counts_D, scored.passes, scored.seconds)


@dataclasses.dataclass(frozen=True)
class ScoredMerges:
    """What a function returned for each merge, and what that cost, as in `EvaluatedMerges`."""

    scores: list[Any]
    passes: int
    seconds: dict[str, float]


def score_merges(
    config: Config,
    snapshots: Sequence[Snapshot],
    weights_RxK: ArrayLike,
    score: Callable[[Params], Any],
    progress: Progress | None = None,
) -> ScoredMerges:
    """Call a function with the parameters of the merge that each row of weights defines.

    Each snapshot is read and added to all merges while the next one is read; snapshots that no row uses are not read.
    Device memory holds the merges and two snapshots. If these do not fit into half of a device's free memory, the
    merges are made in several passes, each of which reads the snapshots again. `progress` is called after each read and
    each call of `score`, with the number of these so far and in all.

    Raises:
        UserError: A snapshot is corrupt or does not fit the model.
    """
    rows_RxK = np.asarray(weights_RxK, np.float64)
    mesh = make_mesh(config.mesh)
    abstract = abstract_params(config.model, mesh)
    merges_per_pass = min(map(int, hosts.all_gather_text(str(_count_fitting_merges(abstract, _usable_bytes(mesh))))))
    passes = math.ceil(len(rows_RxK) / merges_per_pass)
    seconds = {"read": 0.0, "evaluate": 0.0}
    groups = [
        (group_RxK, np.flatnonzero(group_RxK.any(axis=0)).tolist()) for group_RxK in np.array_split(rows_RxK, passes)
    ]
    done, total = itertools.count(1), len(rows_RxK) + sum(len(used) for _, used in groups)

    def advance() -> None:
        if progress:
            progress(next(done), total)

    read = _add_timer(restore_params, seconds, "read", advance)
    evaluate = _add_timer(score, seconds, "evaluate", advance)
    scores: list[Any] = []
    for group_RxK, used in groups:
        trees: Iterator[Any] = (read(snapshots[k], abstract) for k in used)
        with jax.set_mesh(mesh):
            merged = weighted_sums_of_stream(trees, group_RxK[:, used])
        scores += map(evaluate, merged)
        del merged
    return ScoredMerges(scores, passes, seconds)


def _add_timer(
    function: Callable[..., Any], seconds: dict[str, float], name: str, advance: Callable[[], None]
) -> Callable[..., Any]:
    """Wrap `function` so that each call adds its wall time to `seconds[name]` and then calls `advance`."""

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        seconds[name] += time.perf_counter() - start
        advance()
        return result

    return timed


def _count_fitting_merges(abstract: Any, memory_bytes: float) -> int:
    """Return how many float32 merges fit into `memory_bytes` of a device beside two snapshots; at least 1."""
    leaves = jax.tree.leaves(abstract)
    model_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * max(x.dtype.itemsize, 4) for x in leaves)
    return max(int(memory_bytes // model_bytes) - SNAPSHOTS_IN_MEMORY, 1)


def _usable_bytes(mesh: jax.sharding.Mesh) -> float:
    """Return how many bytes of a device's free memory merges may use; CPU devices share the host's memory."""
    stats = mesh.local_devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return MEMORY_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])
    return MEMORY_SHARE * _free_host_bytes() / len(mesh.local_devices)


def _free_host_bytes() -> int:
    # MemAvailable counts the page cache as free. On systems without /proc/meminfo, return all memory.
    meminfo = pathlib.Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
