"""DiLoCo, SPARTA and both against the strategies of exo gym, one process per worker, in float64.

The package on the index is a placeholder: install exo gym from its repository (exo-explore/gym, at 9fa323c), beside
torch. Three differences are undone here. exo gym shares after steps H + 1, 2 H + 1 and so on (it counts from 0, and not
at 0): its workers take a first step without a gradient. It draws SPARTA's elements by itself, each with probability p:
it is given those of pma_jax. On CPU, its first worker shares memory with the outer parameters, which are changed by its
next steps: the process gives it memory of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import oracles
import pytest
import tiny
from oracle_models import LINEAR, RATE

from pma_jax.config import MeshConfig
from pma_jax.runtime.mesh import make_mesh

pytest.importorskip("torch")
pytest.importorskip("exogym.strategy")

STEPS, WORKER = 20, Path(__file__).with_name("exo_gym_worker.py")
CASES = {
    "diloco": {},
    "diloco without Nesterov": {"diloco_nesterov": False, "diloco_rate": 0.4},
    "sparta": {"sparta_share": 0.1},
    "sparta with diloco": {"sparta_share": 0.1, "sparta_diloco": True},
}


@pytest.mark.parametrize("name", CASES)
def test_method_equals_that_of_exo_gym(name, tmp_path):
    config = oracles.make_config(method=name.split()[0], **CASES[name])
    rng = np.random.default_rng(1)
    theta = LINEAR.start(rng)
    x = LINEAR.inputs(rng, STEPS, config.replicas.count)
    with jax.enable_x64(True):
        history, _ = oracles.run_package(config, theta, x, make_mesh(MeshConfig()))
    theirs = run_exo_gym(tmp_path, config.replicas, theta, x)
    for leaf in theta:
        ours = np.stack([workers[leaf] for workers in history], axis=1)
        np.testing.assert_allclose(ours, theirs[leaf], rtol=0, atol=1e-10, err_msg=leaf)


def run_exo_gym(folder, c, theta, x):
    """Return leaf -> the parameters of each worker after each step, [worker, step, ...]."""
    outer = {"lr": c.diloco_rate, "momentum": c.diloco_momentum, "nesterov": c.diloco_nesterov}
    is_diloco, is_sparta = c.method == "diloco" or c.sparta_diloco, c.method == "sparta"
    setting = {"leaves": list(theta), "sparta": is_sparta, "outer": outer if is_diloco else None, "steps": 4}
    (folder / "setting.json").write_text(json.dumps(setting | {"rate": RATE}))
    arrays = {f"theta {leaf}": array for leaf, array in theta.items()} | {"x": x}
    if is_sparta:
        arrays |= {f"mask {leaf}": mask for leaf, mask in masks(theta, c.sparta_share, len(x)).items()}
    np.savez(folder / "inputs.npz", **arrays)
    workers = [
        subprocess.Popen([sys.executable, str(WORKER), str(folder), str(rank), str(c.count)], env=tiny.environment())
        for rank in range(c.count)
    ]
    assert [worker.wait(120) for worker in workers] == [0] * c.count
    ends = [np.load(folder / f"{rank}.npz") for rank in range(c.count)]
    return {leaf: np.stack([end[leaf] for end in ends]) for leaf in theta}


def masks(theta, share, steps):
    """Return leaf -> which elements pma_jax averages after each step; the first entry is that of the step before."""
    chosen = {leaf: np.zeros((steps + 1, array.size), bool) for leaf, array in theta.items()}
    for step in range(1, steps + 1):
        for leaf, elements in oracles.chosen_elements(theta, share, step).items():
            chosen[leaf][step, elements] = True
    return {leaf: mask.reshape(-1, *theta[leaf].shape) for leaf, mask in chosen.items()}
