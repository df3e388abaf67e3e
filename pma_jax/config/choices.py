"""Choices of configuration keys that are more than a name: the shapes of decays, and the kinds of snapshots."""

import dataclasses
import math
from collections.abc import Callable

from pma_jax.config.errors import UserError

# Decay shapes: rate(t) = final + shape(t) * (peak - final), where t in [0, 1] is the elapsed fraction of the decay. All
# shapes end at 0. All start at 1, except `exponential`, which starts at 0.9.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,  # annealing of PMA, arXiv 2505.12082, Section 3
    "minus_sqrt": lambda t: 1 - math.sqrt(t),  # arXiv 2405.18392, Section 3
    "exponential": lambda t: 1 - 0.1 ** (1 - t),  # WSM, arXiv 2507.17634, Figure 2; for merge recipes only
}


@dataclasses.dataclass(frozen=True)
class SnapshotKind:
    """One kind of snapshot: its names on disk, in the metrics and in reports."""

    name: str  # name in configurations and metadata
    folder: str  # subdirectory of a run directory
    record_kind: str  # value of `kind` in the records of its loss in metrics.jsonl
    label_prefix: str  # prefix of a merge's label in sweeps and reports, such as block/ in block/sma:10
    title: str  # title in figures


SNAPSHOT_KINDS = {
    kind.name: kind
    for kind in (
        SnapshotKind("point", "snapshots", "evaluation", "", "points"),
        SnapshotKind("block_mean", "block_means", "block_mean", "block/", "block means"),
    )
}
# A value of `checkpoint.kinds` beside these: the points of each worker of `replicas`, which are kinds of their own.
WORKER_SNAPSHOTS = "replica"
WORKER_PREFIX = "worker_"


def snapshot_kind(name: str) -> SnapshotKind:
    """Return the kind with a name: one of `SNAPSHOT_KINDS`, or `worker_<k>` for the points of worker k.

    Raises:
        UserError: There is no such kind.
    """
    number = name.removeprefix(WORKER_PREFIX)
    if name != number and number.isascii() and number.isdigit():
        return SnapshotKind(name, name, "worker", f"{name}/", f"worker {number}")
    if name not in SNAPSHOT_KINDS:
        raise UserError(f"{name} is not a kind of snapshots: choose {', '.join(SNAPSHOT_KINDS)} or worker_<k>")
    return SNAPSHOT_KINDS[name]
