"""The cores and GPUs of this machine, divided among processes that run at the same time."""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class Share:
    """The cores of one process, and the GPUs that it sees; None if there are none to divide."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] | None = None


def divide(count: int) -> list[Share]:
    """Divide the cores and GPUs that this process may use into `count` shares without a common one.

    Raises:
        UserError: There are fewer cores, or fewer GPUs.
    """
    cores, gpus = available_cores(), visible_gpus()
    if not 1 <= count <= len(cores):
        raise UserError(f"{count} processes at a time need a core each: give 1 to {len(cores)}, the number of cores")
    if gpus is None:
        return [Share(tuple(part)) for part in _split(cores, count)]
    if count > len(gpus):
        raise UserError(
            f"{count} processes at a time need a GPU each: give 1 to {len(gpus)}, or set JAX_PLATFORMS=cpu to train "
            "on cores"
        )
    return [Share(tuple(c), tuple(g)) for c, g in zip(_split(cores, count), _split(gpus, count), strict=True)]


def available_cores() -> list[int]:
    """Return the cores that this process may use; all cores if the system cannot bind processes to cores."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str] | None:
    """Return the NVIDIA GPUs that JAX would use, as CUDA_VISIBLE_DEVICES names them; None if there are none."""
    if "cuda" not in environment.get("JAX_PLATFORMS", "cuda").replace("gpu", "cuda").split(","):
        return None
    if "CUDA_VISIBLE_DEVICES" in environment:
        named = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in named if name not in ("", "-1", "none", "NoDevFiles")] or None
    numbers = sorted(int(path.name[6:]) for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    return list(map(str, range(len(numbers)))) or None


def _split(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Split a sequence into `count` neighbouring parts, whose lengths differ by at most one."""
    ends = [len(items) * i // count for i in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]
