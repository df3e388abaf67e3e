"""Every figure that needs a GPU, in one call of less than ten minutes on an H200:

    python experiments/benchmarks/gpu.py --out gpu.json
    python experiments/benchmarks/gpu.py --out gpu.json --config tiny        every part at a tiny size, on any machine
    python experiments/benchmarks/gpu.py --out gpu.json --parts rates,moe_2k --set model.remat=dots

Each part is a process of its own, with the device's whole memory to itself; one that fails or takes too long is noted
in the JSON, the others go on, and the exit status is then 1. Parts:
  rates            bfloat16 matrix products and STREAM add on this device: the ceilings of the rest
  dense_2k         a dense model of 1B in bfloat16 at 2k context: step time, model FLOPs utilisation (bar 50%), the
                   profile's top costs, peak memory against the least that the step needs
  dense_8k         the same at 8k (bar 50%)
  moe_2k           the same of a mixture of experts, 1B activated of 5B, at 2k (bar 35%)
  grouped_product  forward and backward of the experts' product, by each way that there is
  merge            the mean of N models on the mesh, as a share of STREAM add in the same run (bar 80%)
  training         the real loop: what a snapshot and a preview cost, and their share at the interval of the size
Utilisation is the FLOPs that training needs (`planning.cost.training_flops_per_token`: attention counts the keys that
are seen) over the peak that the chip's maker names. Needs the packages of pyproject.toml; pma_jax need not be
installed.
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

from gpu_parts import PARTS, Sizes  # noqa: E402

SIZES = {
    "1b": Sizes(
        steps={
            "dense_2k": ("dense_1b", (16, 8, 4), 2048),
            "dense_8k": ("dense_1b", (4, 2, 1), 8192),
            "moe_2k": ("moe_1b_5b", (16, 8, 4, 2), 2048),
        },
        product=8192,
        stream_elements=2**30,
        merge_config="dense_1b",
        merge_models=10,
        training=("dense_411m", 16, 2048, 12),
        turns=5,
        steps_a_turn=4,
    ),
    "tiny": Sizes(
        steps={"dense_2k": ("tiny", (8,), 64), "dense_8k": ("tiny", (2,), 256), "moe_2k": ("tiny_moe", (8,), 64)},
        product=256,
        stream_elements=2**16,
        merge_config="tiny",
        merge_models=4,
        training=("tiny", 8, 64, 2),
        turns=2,
        steps_a_turn=2,
    ),
}


def main() -> int:
    """Run the parts, write the JSON, print a table; 0 when every part did its work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--config", choices=SIZES, default="1b", help="the sizes to measure")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="of every configuration")
    parser.add_argument("--limit-seconds", type=float, default=570, help="for all parts together")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(PARTS[args.work](SIZES[args.config], args)))
        return 0
    unknown = [name for name in args.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    began, found = time.monotonic(), {"config": args.config, "parts": {}}
    for name in args.parts.split(","):
        found["parts"][name] = in_a_process(name, args, args.limit_seconds - (time.monotonic() - began))
        args.out.write_text(json.dumps(found, indent=1) + "\n")  # after every part: a killed call leaves what it has
        print(f"{name:<16} {summary(found['parts'][name])}", flush=True)
    return 1 if any("error" in part for part in found["parts"].values()) else 0


def in_a_process(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """A part's figures, or its error."""
    if seconds <= 0:
        return {"error": "no time was left"}
    command = [sys.executable, __file__, "--work", name, "--config", args.config, "--set", *args.set]
    # JAX takes three quarters of the memory by default; a step may use all but what CUDA and cuDNN need.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93", **os.environ}
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than the {seconds:.0f} s that were left"}
    took = {"seconds": time.monotonic() - began}
    if done.returncode:
        return took | {"error": done.stderr.strip()[-2000:] or f"exit status {done.returncode}"}
    return took | json.loads(done.stdout.splitlines()[-1])


def summary(part: dict[str, Any]) -> str:
    """A line for the reader."""
    if "error" in part:
        return "FAILED: " + part["error"].splitlines()[-1][:200]
    shown = {name: value for name, value in part.items() if isinstance(value, int | float) and name != "seconds"}
    return "  ".join(f"{name} {value:.4g}" for name, value in shown.items())


if __name__ == "__main__":
    sys.exit(main())
