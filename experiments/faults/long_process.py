"""Merge, preview and evaluate many times in one process while a second thread collects garbage.

    python experiments/faults/long_process.py [--count 10000] [--seconds 600]

The crash of `experiments/fuzz/instance_dict_race.py` needs an object whose `__dict__` two threads read for the first
time at once. This tests that a user's long process does nothing of the kind, nor anything else that crashes: each round
merges three stored checkpoints to a new one, averages them in memory (a preview), and evaluates the average, while a
thread collects garbage, as collections that allocations start do. Every result is compared with that of the first
round. The exit status is 1 if one differs or if memory grows, or a signal if the process crashed. The files are in
memory, where there is /dev/shm, because rounds on a disk mostly wait for it.
"""

import argparse
import faulthandler
import gc
import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np

import pma_jax as pma
from pma_jax import config as configuration
from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.merging.engine import provenance
from pma_jax.merging.preview import Window
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.snapshots import restore_params
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.loop import train

WEIGHTS = [0.2, 0.3, 0.5]
_PRINT_EVERY = 500
# After the first _PRINT_EVERY rounds. `tensorstore.ocdbt.dump` leaks the values of the dicts that it returns: their
# count of references is too high. That is 0.06 MiB per round.
_MAX_GROWTH_MIB_PER_ROUND = 0.1


def make_run(folder: Path) -> "pma.Run":
    """Train a tiny run."""
    rng = random.Random(0)
    (folder / "text").mkdir()
    for i in range(100):
        (folder / "text" / f"{i:03d}.txt").write_text(
            " ".join(rng.choices(["aria", "benio", "corum", "dalette"], k=40))
        )
    config = configuration.resolve(
        {
            "data": {
                "source": "files",
                "files": (f"{folder}/text/*.txt",),
                "held_out_percent": 25.0,
                "cache_dir": str(folder / "cache"),
            },
            "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "hidden": 32},
            "training": {"total_tokens": 768, "sequence_length_tokens": 16, "batch_size_sequences": 8},
            "checkpoint": {"interval_tokens": 256, "window": 3, "state_interval_tokens": 768},
            "evaluation": {"tokens": 128, "batch_size_sequences": 8},
        }
    )
    return train(config, folder / "run")


def resident_mib() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


def main() -> int:
    """Run the rounds, print their number, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args()
    faulthandler.enable()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    stop, collections = threading.Event(), [0]

    def collect() -> None:
        while not stop.is_set():
            gc.collect(0 if collections[0] % 50 else 2)  # mostly the youngest objects: a full collection takes 0.1 s
            collections[0] += 1
            time.sleep(0.005)

    with tempfile.TemporaryDirectory(prefix="pma-long-", dir=memory) as folder:
        run = make_run(Path(folder))
        mesh = make_mesh(run.config.mesh)
        snapshots, evaluate = run.snapshots[-3:], make_evaluator(run.config, mesh, SELECT)
        abstract = abstract_params(run.config.model, mesh)
        window = Window(len(WEIGHTS), lambda older, newer: True)
        for snapshot in snapshots:
            window.add(snapshot.tokens, restore_params(snapshot, abstract))
        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        began, first, done, resident = time.monotonic(), None, 0, []
        while done < options.count and time.monotonic() - began < options.seconds:
            out = Path(folder, "merged")
            pma.merge(snapshots, WEIGHTS, out=out)
            ((_, params),) = window.merges("weights:0.2,0.3,0.5", [len(WEIGHTS)])
            leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
            result = (provenance.read(out)["digest"], leaves, evaluate(params))
            shutil.rmtree(out)
            first = first or result
            if result != first:
                print(f"round {done} gave another result than the first")
                return 1
            done += 1
            if done % _PRINT_EVERY == 0:
                resident.append(resident_mib())
                print(f"{done} rounds, {time.monotonic() - began:.0f} s, {resident[-1]} MiB", flush=True)
        stop.set()
        thread.join()
    print(f"{done} merges, previews and evaluations, {collections[0]} collections: all results equal")
    has_grown = bool(resident) and resident[-1] - resident[0] > _MAX_GROWTH_MIB_PER_ROUND * done
    if has_grown:
        print(f"resident memory grew from {resident[0]} to {resident[-1]} MiB")
    return int(has_grown)


if __name__ == "__main__":
    sys.exit(main())
