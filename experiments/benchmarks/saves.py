"""Where the cost of a snapshot comes from: the time and CPU time of saves of the demo's parameters, in several ways.

Command:   python experiments/benchmarks/saves.py SCRATCH [--rounds 25]
Floor:     writing the bytes of the parameters to files and flushing them.

Each round saves once in each way, in turn: as `pma train` does; points and block means as two items of one save, and
as two saves; and with options of Orbax changed. "blocked" is the time until training could continue, "total" the time
until the save is published and flushed, "CPU" that of all threads. Nothing else runs; in training, both cores compute.
"""

import argparse
import functools
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp
from spread import describe

from pma_jax import config
from pma_jax.model.decoder import init_params
from pma_jax.runs import integrity, steps
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage.atomic import fsync_path

# Name -> options of the Orbax context that differ from those of `pma train`.
OPTIONS: dict[str, dict[str, Any]] = {
    "no file of shardings": {"array.saving.enable_write_sharding_file": False},
    "no array metadata": {"array.saving.array_metadata_store": None},
    "no validation after the merge of files": {"array.saving.enable_post_merge_validation": False},
    "one file per array": {"array.saving.use_ocdbt": False},
    "zarr 2": {"array.saving.use_zarr3": False},
    "directories before the save returns": {"asynchronous.create_directories_asynchronously": False},
    "no checks of paths": {"file.skip_sync_file_validations": True},
}
OPTIONS["all of these, arrays together"] = {
    name: value for option in OPTIONS.values() for name, value in option.items() if "ocdbt" not in name
}


class Seconds(NamedTuple):
    """Seconds of a save: until training could continue, until the step is durable, and of the CPU."""

    blocked: float
    total: float
    cpu: float


Save = Callable[[int], Seconds]


def main() -> None:
    """Print the medians and the quartiles of each way to save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path, help="directory for temporary checkpoints")
    parser.add_argument("--rounds", type=int, default=25, help="saves in each way")
    options = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about options that no program would choose
    options.scratch.mkdir(parents=True, exist_ok=True)
    params = _demo_params()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        ways = _ways(Path(folder), params)
        times: dict[str, list[Seconds]] = {name: [] for name in ways}
        for number in range(1, options.rounds + 3):  # the first two rounds do not count
            for name, save in ways.items():
                times[name].append(save(number))
    for name, found in times.items():
        blocked, total, cpu = (describe(column) for column in zip(*found[2:], strict=True))
        print(f"{name}: blocked {blocked}; total {total}; CPU {cpu}")


def _demo_params() -> Any:
    """Initialise the demo's parameters on its mesh."""
    demo = config.resolve(config.load("demo"))
    with jax.set_mesh(make_mesh(demo.mesh)):
        return jax.jit(lambda: init_params(demo.model, jax.random.key(0)))()


def _ways(folder: Path, params: Any) -> dict[str, Save]:
    """Return, by the name of each way, a function that saves the step with a given number."""
    ways = {
        "plain files, flushed": functools.partial(_save_plain, folder, params),
        "one save": _orbax(folder / "one", [{"params": params}], {}),
        "two saves": _orbax(folder / "two", [{"params": params}, {"params": params}], {}),
        "one save of two items": _orbax(folder / "items", [{"params": params, "block_mean": params}], {}),
    }
    for number, (name, changed) in enumerate(OPTIONS.items()):
        ways[f"one save, {name}"] = _orbax(folder / f"option{number}", [{"params": params}], changed)
    return ways


def _save_plain(folder: Path, params: Any, number: int) -> Seconds:
    clock = _Clock()
    for leaf, array in enumerate(jax.tree.leaves(params)):
        file = folder / f"{number}.{leaf}"
        file.write_bytes(np.asarray(array).tobytes())
        fsync_path(epath.Path(file))
    return Seconds(clock.wall(), clock.wall(), clock.cpu())


def _orbax(folder: Path, saves: list[dict[str, Any]], changed: dict[str, Any]) -> Save:
    """Return a function that saves each of `saves` with a writer of its own, with changed options of Orbax."""
    usual_context = steps.uncompressed_context

    def context(prefix: str | None = None) -> ocp.Context:
        result = usual_context(prefix)
        for name, value in changed.items():
            *path, last = name.split(".")
            setattr(functools.reduce(getattr, path, result), last, value)
        return result

    writers = [steps.StepWriter(epath.Path(folder) / str(number)) for number in range(len(saves))]

    def save(number: int) -> Seconds:
        with mock.patch.object(steps, "uncompressed_context", context):
            clock = _Clock()
            for writer, items in zip(writers, saves, strict=True):
                for params in items.values():
                    integrity.check_finite(params, number, number)
                digests = integrity.digests_as_metadata(items)
                writer.save(number, items, {"step": number, "tokens": number} | digests)
            blocked = clock.wall()
            for writer in writers:
                writer.finish()
            return Seconds(blocked, clock.wall(), clock.cpu())

    return save


class _Clock:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def wall(self) -> float:
        return time.perf_counter() - self._wall

    def cpu(self) -> float:
        return time.process_time() - self._cpu


if __name__ == "__main__":
    main()
