"""All figures that need a GPU, in one call of less than ten minutes on an H200.

    python experiments/benchmarks/gpu.py --out gpu.json
    python experiments/benchmarks/gpu.py --out gpu.json --config tiny        every part at a tiny size, on any machine
    python experiments/benchmarks/gpu.py --out gpu.json --parts rates,moe_2k --set model.remat=dots

Each part runs in a process of its own, which can use all of the device's memory. If a part fails or takes too long, the
JSON contains its error, the other parts continue, and the exit status is 1. Parts:
  rates            bfloat16 matrix products and STREAM add on this device: upper bounds for the other parts
  dense_2k         a dense model of 1B in bfloat16 at 2k context: step time, model FLOPs utilisation (bar 50%), the
                   profile's top costs, peak memory relative to the minimum that the step needs
  dense_8k         the same at 8k context (bar 50%)
  moe_2k           the same for a mixture of experts, 1B activated of 5B, at 2k context (bar 35%)
  grouped_product  forward and backward pass of the experts' matrix product, by each implementation
  merge            the mean of N models on the mesh, as a share of STREAM add in the same run (bar 80%)
  training         the training loop: cost of a snapshot and of a preview, and their share at the size's interval
  pma              a model of 124M trained at a constant rate, three seeds: losses of raw, merged and annealed weights
Utilisation is the FLOPs that training needs (`planning.cost.training_flops_per_token`, in which attention counts only
visible keys) divided by the chip's peak rate as its maker states it. Requires pma_jax to be installed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import gpu_parts  # noqa: E402
from gpu_parts import Sizes  # noqa: E402
from gpu_pma import Setting, pma  # noqa: E402

# Without a scan over the layers, what the backward pass needs is not copied into and out of stacked arrays.
NONE, DOTS, FULL = "model.remat=none", "model.remat=dots", "model.remat=full"
UNROLLED, SCANNED = "model.scan_layers=False", "model.scan_layers=True"
SIZES = {
    "1b": Sizes(
        steps={
            "dense_2k": (
                "dense_1b",
                ((16, NONE, UNROLLED), (8, NONE, UNROLLED), (8, DOTS, SCANNED), (8, FULL, SCANNED)),
                2048,
            ),
            "dense_8k": (
                "dense_1b",
                ((4, NONE, UNROLLED), (2, NONE, UNROLLED), (2, DOTS, SCANNED), (2, FULL, SCANNED)),
                8192,
            ),
            "moe_2k": (
                "moe_1b_5b",
                ((16, DOTS, UNROLLED), (8, DOTS, UNROLLED), (8, FULL, SCANNED), (4, FULL, SCANNED)),
                2048,
            ),
        },
        product=8192,
        stream_elements=2**30,
        merge_config="dense_1b",
        merge_models=10,
        training=("dense_411m", 8, 2048, 12),
        turns=5,
        steps_per_turn=4,
    ),
    "tiny": Sizes(
        steps={
            "dense_2k": ("tiny", ((8, NONE, UNROLLED), (8, FULL, SCANNED)), 64),
            "dense_8k": ("tiny", ((2, NONE, UNROLLED),), 256),
            "moe_2k": ("tiny_moe", ((8, DOTS, SCANNED), (8, DOTS, UNROLLED)), 64),
        },
        product=256,
        stream_elements=2**16,
        merge_config="tiny",
        merge_models=4,
        training=("tiny", 8, 64, 2),
        turns=2,
        steps_per_turn=2,
    ),
}
PMA = {
    # 124M parameters: seven more blocks in place of large embeddings, because a token is a byte.
    "1b": Setting("dense_125m", ("vocabulary_size=256", "layers=19", "remat=none"), 64, 1024, 480, 8, 2**17, 3),
    "tiny": Setting("tiny", (), 8, 64, 48, 2, 4096, 2),
}
PARTS = gpu_parts.PARTS | {"pma": lambda sizes, args: pma(PMA[args.config], args)}


def main() -> int:
    """Run the parts, write the JSON and print a table; return 0 if every part succeeded, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON file to write")
    parser.add_argument("--config", choices=SIZES, default="1b", help="the sizes to measure")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: all)")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="overrides of every configuration"
    )
    parser.add_argument(
        "--settings", type=int, default=1, help="settings of a train step to measure, among those that fit"
    )
    parser.add_argument("--limit-seconds", type=float, default=570, help="time limit for all parts together")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(PARTS[args.work](SIZES[args.config], args)))
        return 0
    unknown = [name for name in args.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    began, results = time.monotonic(), {"config": args.config, "parts": {}}
    for name in args.parts.split(","):
        results["parts"][name] = run_part(name, args, args.limit_seconds - (time.monotonic() - began))
        args.out.write_text(json.dumps(results, indent=1) + "\n")  # after every part, in case the call is killed
        print(f"{name:<16} {summarize(results['parts'][name])}", flush=True)
    return 1 if any("error" in part for part in results["parts"].values()) else 0


def run_part(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own for at most `seconds`; return its figures, or its error."""
    if seconds <= 0:
        return {"error": "the time limit was reached before this part"}
    command = [sys.executable, __file__, "--work", name, "--config", args.config]
    command += ["--settings", str(args.settings), "--set", *args.set]
    # JAX preallocates three quarters of the memory by default; a step may use all that CUDA and cuDNN do not need.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93", **os.environ}
    began = time.monotonic()
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than the remaining {seconds:.0f} s"}
    duration = {"seconds": time.monotonic() - began}
    if process.returncode:
        return duration | {"error": process.stderr.strip()[-2000:] or f"exit status {process.returncode}"}
    return duration | json.loads(process.stdout.splitlines()[-1])


def summarize(part: dict[str, Any]) -> str:
    """Format a part's numbers, or its error, as one line."""
    if "error" in part:
        return "FAILED: " + part["error"].splitlines()[-1][:200]
    shown = {name: value for name, value in part.items() if isinstance(value, int | float) and name != "seconds"}
    return "  ".join(f"{name} {value:.4g}" for name, value in shown.items())


if __name__ == "__main__":
    sys.exit(main())
