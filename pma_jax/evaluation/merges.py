"""The held-out loss of merges: rows of weights over stored snapshots, each snapshot read once.

Legend: R merges, K snapshots.
"""

import dataclasses
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
from pma_jax.evaluation.held_out import evaluator
from pma_jax.merging.averager import average_stream
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.snapshots import Snapshot, restore_params
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import make_mesh

MEMORY_SHARE = 0.5  # of what is free: the rest is for evaluating
BESIDE_MERGES = 2  # models in memory besides the merges: the snapshot that is being added and the one being read


@dataclasses.dataclass(frozen=True)
class EvaluatedMerges:
    """The loss of each merge, and what it took."""

    losses: list[float]  # nats a token
    passes: int  # over the snapshots
    seconds: dict[str, float]  # `read` (a merge is added while the next snapshot is read) and `evaluate`


def evaluate_merges(
    config: Config, snapshots: Sequence[Snapshot], weights_RxK: ArrayLike, memory_bytes: float | None = None
) -> EvaluatedMerges:
    """The loss of each row's merge on the held-out text that `config.evaluation` names.

    A snapshot that no row uses is not read; each other one is read once, and the next one while one is added to all
    merges. Memory holds the merges and two snapshots; where not all merges fit into `memory_bytes`, they are made in
    several passes, and each pass reads the snapshots again.

    Args:
      config: of the model, the text and the mesh; it may be another than the snapshots' own in its `evaluation`.
      snapshots: K, of one model; points and block means may be mixed, as no row should mix them.
      weights_RxK: [R, K], float64 on the host, a row a merge.
      memory_bytes: of one device; by default half of what is free.

    Raises:
      ValueError: a snapshot is damaged or does not fit the model.
    """
    rows_RxK = np.asarray(weights_RxK, np.float64)
    mesh = make_mesh(config.mesh)
    abstract = abstract_params(config.model, mesh)
    fitting = _merges_that_fit(abstract, _free_bytes(mesh) if memory_bytes is None else memory_bytes)
    at_once = min(map(int, hosts.gather(str(fitting))))
    passes = math.ceil(len(rows_RxK) / at_once)
    seconds = {"read": 0.0, "evaluate": 0.0}
    timed_read = _timed(restore_params, seconds, "read")
    losses_of = _timed(evaluator(config, mesh), seconds, "evaluate")
    losses: list[float] = []
    for group_RxK in np.array_split(rows_RxK, passes):
        used = np.flatnonzero(group_RxK.any(axis=0)).tolist()
        loads: Iterator[Any] = (timed_read(snapshots[k], abstract) for k in used)
        with jax.set_mesh(mesh):
            merged = average_stream(loads, group_RxK[:, used])
        losses += losses_of(merged)
        del merged
    return EvaluatedMerges(losses, passes, seconds)


def _timed(function: Callable[..., Any], seconds: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        seconds[name] += time.perf_counter() - start
        return result

    return timed


def _merges_that_fit(abstract: Any, memory_bytes: float) -> int:
    """How many merges a device's memory holds beside what is being read; at least 1. Merges are summed in float32."""
    leaves = jax.tree.leaves(abstract)
    model_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * max(x.dtype.itemsize, 4) for x in leaves)
    return max(int(memory_bytes // model_bytes) - BESIDE_MERGES, 1)


def _free_bytes(mesh: jax.sharding.Mesh) -> float:
    """The share of a device's free memory that merges may take; CPU devices share the host's."""
    stats = mesh.local_devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return MEMORY_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])
    return MEMORY_SHARE * _free_host_bytes() / len(mesh.local_devices)


def _free_host_bytes() -> int:
    # What the kernel's cache of files holds counts as free; where the kernel does not say, all memory does.
    meminfo = pathlib.Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
