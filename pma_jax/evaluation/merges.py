"""The held-out loss of merges given as rows of coefficients over stored snapshots; each snapshot is read once per pass.

Dimensions: R merges, K snapshots.
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
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.merging.averager import average_stream
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.snapshots import Snapshot, restore_params
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import make_mesh

MEMORY_SHARE = 0.5  # of the free memory; the rest is for evaluating
SNAPSHOTS_IN_MEMORY = 2  # the one being added and the one being read


@dataclasses.dataclass(frozen=True)
class EvaluatedMerges:
    """The loss of each merge, and the cost of evaluating them."""

    losses: list[float]  # nats per token
    passes: int  # over the snapshots
    seconds: dict[str, float]  # `read` (a merge is added while the next snapshot is read) and `evaluate`


def evaluate_merges(config: Config, snapshots: Sequence[Snapshot], weights_RxK: ArrayLike) -> EvaluatedMerges:
    """Evaluate the merge of each row on the held-out text of `config.evaluation`.

    Snapshots that no row uses are not read. The next snapshot loads while one is added to all merges. Memory holds the
    merges and two snapshots; if not all merges fit into half of a device's free memory, they are made in several
    passes, and each pass reads the snapshots again.

    Args:
        config: Configuration of the model, the held-out text and the mesh; its `evaluation` may differ from that of the
            snapshots.
        snapshots: K snapshots of one model. Points and block means may both be listed, as long as no row mixes them.
        weights_RxK: [R, K], float64, one row per merge.

    Raises:
        ValueError: A snapshot is corrupt or does not fit the model.
    """
    rows_RxK = np.asarray(weights_RxK, np.float64)
    mesh = make_mesh(config.mesh)
    abstract = abstract_params(config.model, mesh)
    fitting = _merges_that_fit(abstract, _free_bytes(mesh))
    at_once = min(map(int, hosts.gather(str(fitting))))
    passes = math.ceil(len(rows_RxK) / at_once)
    seconds = {"read": 0.0, "evaluate": 0.0}
    timed_read = _timed(restore_params, seconds, "read")
    loss_of = _timed(make_evaluator(config, mesh), seconds, "evaluate")
    losses: list[float] = []
    for group_RxK in np.array_split(rows_RxK, passes):
        used = np.flatnonzero(group_RxK.any(axis=0)).tolist()
        loads: Iterator[Any] = (timed_read(snapshots[k], abstract) for k in used)
        with jax.set_mesh(mesh):
            merged = average_stream(loads, group_RxK[:, used])
        losses += map(loss_of, merged)
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
    """Return how many float32 merges fit into a device's memory beside two snapshots; at least 1."""
    leaves = jax.tree.leaves(abstract)
    model_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * max(x.dtype.itemsize, 4) for x in leaves)
    return max(int(memory_bytes // model_bytes) - SNAPSHOTS_IN_MEMORY, 1)


def _free_bytes(mesh: jax.sharding.Mesh) -> float:
    """Return the bytes of a device's free memory that merges may use; CPU devices share the host's memory."""
    stats = mesh.local_devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return MEMORY_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])
    return MEMORY_SHARE * _free_host_bytes() / len(mesh.local_devices)


def _free_host_bytes() -> int:
    # MemAvailable counts the page cache as free. Systems without /proc/meminfo: all memory.
    meminfo = pathlib.Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
