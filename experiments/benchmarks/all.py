"""Run the benchmarks of this machine's CPU one after the other, and print what each of them prints.

    python experiments/benchmarks/all.py --quick              fewer rounds and smaller files: 15 minutes
    python experiments/benchmarks/all.py                      all rounds
    python experiments/benchmarks/all.py --quick --only train,merge
    python experiments/benchmarks/all.py SCRATCH              files in the directory SCRATCH, on another disk

Nothing else may run on the machine meanwhile. Benchmarks that compare with PyTorch or lm-eval need its packages
(`pip install -e '.[eval,torch]'`); without them they fail, and the others run. The exit status is 1 if any failed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SCRATCH = "SCRATCH"  # stands for the directory in the commands below
TEN_MILLION = (
    "--set model.width=384 model.layers=6 model.heads=6 model.kv_heads=6 model.head_dim=64 model.hidden=1024 "
    "training.sequence_length_tokens=32"
)
# Name -> the script, its options, and those with --quick; None: --quick does not run it.
BENCHMARKS: dict[str, tuple[str, str, str | None]] = {
    "averager": ("averager.py", "", "--rounds 1"),
    "train": ("train.py", "--rounds 15", "--rounds 3 --shapes demo"),
    "forward": ("train.py", "--forward --rounds 9 --steps 40", "--forward --rounds 3 --steps 20 --shapes demo,moe"),
    "replicas": ("replicas.py", "--rounds 41", "--rounds 15"),
    "replicas_10m": ("replicas.py", f"--rounds 11 {TEN_MILLION}", f"--rounds 1 {TEN_MILLION}"),
    "memory_floor": ("memory_floor.py", "", "--configs tiny"),
    "block_mean": ("block_mean.py", "", "--rounds 40"),
    "spikes": ("spikes.py", "", "--rounds 40 --steps 100000 --planted 50"),
    "safety": ("safety.py", "", "--rounds 40 --starts 1"),
    "sweep": ("sweep.py", SCRATCH, f"{SCRATCH} --rounds 2"),
    "snapshots": ("snapshots.py", "", "--rounds 1 --tokens 6e5"),
    "saves": ("saves.py", SCRATCH, f"{SCRATCH} --rounds 5"),
    "small_merges": ("small_merges.py", SCRATCH, f"{SCRATCH} --tensors 10000 --rounds 5"),
    "merge": ("merge.py", SCRATCH, f"{SCRATCH} --rounds 3 --sections safetensors"),
    "grid": ("grid.py", SCRATCH, f"{SCRATCH} --megabytes 20 --rounds 2"),
    "grid_engine": ("grid_engine.py", SCRATCH, f"{SCRATCH} --tokens 40960 --rounds 1 --runs 2"),
    "on_mesh": ("on_mesh.py", SCRATCH, f"{SCRATCH} --megabytes 64 --rounds 1"),
    "tasks": ("tasks.py", "", "--requests 40 --rounds 2"),
    "bucket_requests": ("bucket_requests.py", "", None),  # its counts do not depend on the machine
    "bucket_train": ("bucket_train.py", SCRATCH, f"{SCRATCH} --tokens 204800 --rounds 1"),
}


def main() -> None:
    """Run the chosen benchmarks; print a line with the seconds of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "scratch",
        type=Path,
        nargs="?",
        default=FOLDER.parents[1] / "runs" / "benchmarks",
        help="a directory on the disk to measure, in which what is written is removed (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller files")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="comma-separated, of " + ", ".join(BENCHMARKS))
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmarks: {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    options.scratch.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        script, full, quick = BENCHMARKS[name]
        given = quick if options.quick else full
        if given is None:
            continue
        words = [str(options.scratch) if word == SCRATCH else word for word in given.split()]
        print(f"\n== {name}: python experiments/benchmarks/{script} {' '.join(words)}", flush=True)
        start = time.perf_counter()
        status = subprocess.run([sys.executable, str(FOLDER / script), *words], check=False).returncode
        print(
            f"== {name}: {time.perf_counter() - start:.0f} s{'' if status == 0 else f', FAILED ({status})'}", flush=True
        )
        if status:
            failed.append(name)
    if failed:
        sys.exit(f"error: these benchmarks failed; their messages are above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
