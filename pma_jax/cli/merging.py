"""`pma merge`: from its options to a plan, and the merge on the host or on the mesh.

On the host and without --distributed, nothing here imports JAX.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pma_jax.merging import from_storage, gather
from pma_jax.merging.engine import merge as engine
from pma_jax.merging.engine.plan import MergePlan
from pma_jax.merging.gather import CheckpointSeries


def process_index_and_count(options: argparse.Namespace) -> tuple[int, int]:
    """Return the index of this process and the number of processes."""
    if not options.distributed:
        return 0, 1
    from pma_jax.runtime import hosts

    return hosts.process_index_and_count()


def plan_selected(options: argparse.Namespace) -> tuple[MergePlan, CheckpointSeries]:
    """Open and select the checkpoints, and plan their merge; return the plan and the checkpoints that it uses."""
    on_mesh = options.on == "mesh"
    # A process that has loaded JAX, other than with --distributed, does more than merge: its memory is not a merge's.
    is_alone = not on_mesh and (options.distributed or "jax" not in sys.modules)
    series = gather.select_checkpoints(
        gather.open_checkpoints(
            options.source,
            subtrees=options.subtrees,
            snapshot_kind=options.kind,
            tokens_per_step=options.tokens_per_step,
            order=options.order,
            memory_limit_bytes=options.memory_limit if is_alone else sys.maxsize,
        ),
        last=options.last,
        between_tokens=options.tokens,
        every_tokens=options.every,
        tolerance_tokens=options.tolerance,
        across_stages=options.across_stages,
    )
    return from_storage.plan_merge(
        series,
        options.recipe or ["sma"],
        dtype=options.dtype,
        integers=options.integers,
        format=options.format,
        memory_limit_bytes=sys.maxsize if on_mesh else options.memory_limit,
        is_alone=is_alone,
        shard_bytes=options.shard_size,
        writers=process_index_and_count(options)[1] if on_mesh else 1,
    )


def check_outputs(options: argparse.Namespace, plan: MergePlan, outs: Sequence[Path]) -> dict[str, Any]:
    """Check what a merge checks before it writes; return what its description differs in on the mesh."""
    engine.resolve_outputs(plan, outs, is_uploaded=options.on == "host")
    if options.on == "host":
        return {}
    from pma_jax.merging import on_mesh

    on_mesh.check_dtypes(plan)
    return {"memory_bytes": on_mesh.memory_bytes(plan, process_index_and_count(options)[1])}


def run(
    options: argparse.Namespace,
    plan: MergePlan,
    outs: Sequence[Path],
    progress: Callable[[int, int], None] | None,
) -> engine.MergeResult:
    """Run the merge on the host or on the mesh."""
    command = " ".join(["pma", *options.argv])
    if options.on == "mesh":
        from pma_jax.merging import on_mesh

        return on_mesh.merge(plan, outs, command=command, progress=progress)
    barrier = None
    if options.distributed:
        from pma_jax.runtime import hosts

        barrier = hosts.raise_if_any_failed
    index_and_count = process_index_and_count(options)
    return engine.merge(
        plan, outs, command=command, progress=progress, process_index_and_count=index_and_count, barrier=barrier
    )
