"""`pma plan --search`: the microbatches and the rematerialization that give a train step its lowest bound.

Fewer and larger microbatches read the weights less often and need more memory. Yet their bound is not always lower: of
dense_125m on four chips of v5e, 2, 4 and 8 microbatches allow 49%, 53% and 67% MFU. For each kind of rematerialization,
the search tries the fewest microbatches first, and ends at the first number whose bound is no lower than that of the
number before it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.planning import aot, run_plan
from pma_jax.runtime.formatting import align_columns, format_duration, format_memory_bytes
from pma_jax.runtime.mesh import check_mesh, mesh_from_devices

REMATS = ("none", "dots", "full")  # the least memory comes last


def search(
    config: Config, topology: aot.Topology, log: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Compile the train step for settings; return what was tried, the lowest bound first, then what does not fit.

    Args:
        config: The run's configuration, of which `training.accumulation_steps` and `model.remat` are replaced.
        topology: The devices, from `aot.tpu_topology`.
        log: Called with one line before each program is compiled.

    Returns:
        Dicts with the overrides (`accumulation_steps`, `remat`), `compiled`, `memory` in bytes and as a share, the
        `roofline`, and `model_flops_utilization_at_most`. The last three are absent if the step does not fit.

    Raises:
        UserError: The mesh does not divide a size; or, with each number of microbatches, the batch.
    """
    tried, allowed = [], _allowed_microbatches(config, topology)
    for remat in REMATS:
        lowest = float("inf")
        for changed in allowed:
            steps = changed.training.accumulation_steps
            changed = dataclasses.replace(changed, model=dataclasses.replace(changed.model, remat=remat))
            log(f"compiling the train step for {topology.name}: accumulation_steps={steps}, remat={remat}")
            numbers = run_plan.plan_train_step(changed, topology)
            tried.append({"accumulation_steps": steps, "remat": remat} | numbers)
            if numbers["compiled"] and _bound(numbers) >= lowest:
                break
            lowest = min(lowest, _bound(numbers))
    return sorted(tried, key=_bound)


def _bound(plan: dict[str, Any]) -> float:
    """Return the seconds that a step takes at least; infinity if it does not fit."""
    return plan["roofline"]["seconds"] if plan["compiled"] else float("inf")


def format_search(tried: list[dict[str, Any]]) -> str:
    """Format the result of `search` as a table, and the overrides of the best setting."""
    rows = [["microbatches", "remat", "memory", "step at least", "bound by", "MFU at most"]]
    for one in tried:
        setting = [str(one["accumulation_steps"]), one["remat"]]
        if not one["compiled"]:
            rows.append([*setting, "does not fit", "-", "-", "-"])
            continue
        memory = f"{format_memory_bytes(one['memory']['bytes'])} ({one['memory']['share_of_memory']:.0%})"
        bound = [format_duration(one["roofline"]["seconds"]), one["roofline"]["limit"]]
        rows.append([*setting, memory, *bound, f"{one['model_flops_utilization_at_most']:.1%}"])
    best = tried[0]
    chosen = f"--config.training.accumulation_steps={best['accumulation_steps']} --config.model.remat={best['remat']}"
    return "\n".join([align_columns(rows), "", f"lowest bound: {chosen}" if best["compiled"] else "nothing fits"])


def _allowed_microbatches(config: Config, topology: aot.Topology) -> list[Config]:
    """Return the configuration with each number of microbatches that the batch and the mesh allow, the fewest first."""
    mesh = mesh_from_devices(topology.devices, dataclasses.replace(config.mesh, cpu_devices=0))
    batch, allowed = config.training.batch_size_sequences, []
    refusals: list[UserError] = []
    for steps in (n for n in range(1, batch + 1) if batch % n == 0):
        changed = dataclasses.replace(config, training=dataclasses.replace(config.training, accumulation_steps=steps))
        try:
            check_mesh(changed, mesh)
        except UserError as error:
            refusals.append(error)
        else:
            allowed.append(changed)
    if not allowed:
        raise refusals[0]  # with one microbatch: of a size that the mesh does not divide
    return allowed
