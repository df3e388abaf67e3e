"""Execute the notebooks on a tiny run and its annealed fork, in a kernel of this Python; stored without outputs."""

import json
import shutil
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import tiny
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from pma_jax.config import resolve
from pma_jax.training.fork import fork
from pma_jax.training.loop import train

FOLDER = Path(__file__).parent.parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def runs(workspace, tmp_path_factory):
    """Return a run with a snapshot of both kinds at every second step, and an annealed fork of it."""
    folder = tmp_path_factory.mktemp("runs")
    keys = {
        "checkpoint__interval_tokens": 2 * tiny.BATCH_TOKENS,
        "checkpoint__kinds": ("point", "block_mean"),
        "checkpoint__block_every_steps": 1,
        "evaluation__batch_size_sequences": 16,
    }
    run = train(tiny.config(workspace, **keys), folder / "run")
    start = 16 * tiny.BATCH_TOKENS
    config = resolve(run.config, ["schedule.decay=cosine", f"schedule.decay_start_tokens={start}"])
    train(config, fork(run, start, config, folder / "annealed").path)
    return folder


class Client(nbclient.NotebookClient):
    """Run notebooks with `sys.executable`, whichever kernels are registered on this machine."""

    def create_kernel_manager(self):
        specs = KernelSpecManager(kernel_dirs=[])  # Only ipykernel's own.
        self.km = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
        return self.km


def test_there_are_five_notebooks():
    names = [path.stem for path in NOTEBOOKS]
    assert names == [
        "explore_a_run",
        "forecasts_and_scaling",
        "landscape_and_curvature",
        "quickstart",
        "sweep_windows_and_recipes",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs_and_installs_the_package_on_colab(path):
    cells = json.loads(path.read_text())["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    for cell in cells:
        assert not cell["metadata"]
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
    assert "%pip install --quiet pma-jax" in "".join(cells[1]["source"])
    nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path, runs, tmp_path, monkeypatch):
    shutil.copytree(runs / "run", tmp_path / "run")  # A sweep adds its rows to it.
    monkeypatch.setenv("PMA_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("PMA_ANNEALED", str(runs / "annealed"))
    monkeypatch.setenv("PMA_TEXT_TOKENS", "128")
    monkeypatch.setenv("PMA_POINTS", "5")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    Client(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the notebook draws"
    assert any(output.get("name") == "stdout" for output in outputs), "and prints"
    assert not [output for output in outputs if output.get("name") == "stderr" and "Warning" in output["text"]]
