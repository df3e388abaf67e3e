"""Run `pma merge` as its users do, and compare arrays with the merge in float64."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

# One for each checkpoint, oldest first.
WEIGHTS = np.array([0.2, 0.3, 0.5])
FLOATS = {
    np.dtype(name)
    for name in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
}


class Merged(NamedTuple):
    """The exit status of `pma merge`, and what it wrote to both streams."""

    status: int
    text: str


def merge(package: Path, inputs: list[Path], out: Path, *arguments: str) -> Merged:
    """Run `pma merge` of the checkout `package` in a process of its own, with `WEIGHTS`."""
    recipe = f"weights:{','.join(map(str, WEIGHTS))}"
    command = [sys.executable, "-m", "pma_jax.cli", "merge", *map(str, inputs), "--out", str(out), "--recipe", recipe]
    process = subprocess.run(
        [*command, *arguments],
        cwd=package,
        env=os.environ | {"PYTHONPATH": str(package), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Merged(process.returncode, process.stdout + process.stderr)


def check_leaf(name: str, value: np.ndarray, inputs: list[np.ndarray], weights: np.ndarray) -> None:
    """Compare one array with the merge of the inputs, to half a unit in its last place and the error of the sum."""
    assert value.dtype == inputs[0].dtype, f"{name} is {value.dtype} instead of {inputs[0].dtype}"
    assert value.shape == inputs[0].shape, f"{name} has the shape {value.shape} instead of {inputs[0].shape}"
    if value.dtype not in FLOATS:
        assert np.array_equal(value, inputs[0]), f"{name}: {value!r} instead of {inputs[0]!r}"
        return
    terms = [weight * array.astype(np.float64) for weight, array in zip(weights, inputs, strict=True)]
    exact, magnitude = sum(terms), sum(map(np.abs, terms))
    kept = ml_dtypes.finfo(value.dtype)
    summed = 2.0**-52 if value.dtype == np.float64 else 2.0**-23
    tolerance = np.asarray(0.51 * float(kept.eps) * np.abs(exact) + 3 * summed * magnitude) + float(
        kept.smallest_subnormal
    )
    error = np.asarray(np.abs(value.astype(np.float64) - exact))
    assert (error <= tolerance).all(), (
        f"{name} is off by {error.max():.3g}, more than {tolerance.flat[error.argmax()]:.3g}"
    )
