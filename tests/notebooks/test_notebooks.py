"""Execute the notebooks, stored without outputs, on a tiny run and its annealed fork, in a kernel of this Python."""

import http.server
import importlib.util
import json
import shutil
import sys
import threading
import types
from pathlib import Path

import nbclient
import nbformat
import processes
import pytest
import tiny
from IPython.core.inputtransformer2 import TransformerManager
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


@pytest.fixture(scope="module")
def run_with_workers(workspace, tmp_path_factory):
    """Return a run with snapshots of each of four workers."""
    keys = {"replicas__method": "diloco", "replicas__count": 4, "replicas__interval_tokens": 4 * tiny.BATCH_TOKENS}
    path = tmp_path_factory.mktemp("workers") / "run"
    return train(tiny.config(workspace, checkpoint__kinds=("point", "replica"), **keys), path)


class Client(nbclient.NotebookClient):
    """Run notebooks with `sys.executable`, whichever kernels are registered on this machine."""

    def create_kernel_manager(self):
        specs = KernelSpecManager(kernel_dirs=[])  # Only ipykernel's own.
        self.km = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
        return self.km


def test_there_are_seven_notebooks():
    names = [path.stem for path in NOTEBOOKS]
    assert names == [
        "compare_a_grid",
        "explore_a_run",
        "forecasts_and_scaling",
        "landscape_and_curvature",
        "quickstart",
        "replicas",
        "sweep_windows_and_recipes",
    ]


def install_cell() -> str:
    """Return the cell that installs the package, without what trains the demo on Colab."""
    cells = json.loads((FOLDER / "compare_a_grid.ipynb").read_text())["cells"]
    return "".join(cells[1]["source"])


def run_install_cell(monkeypatch) -> list[str]:
    """Run the cell as in an environment without the package; return what it gives to pip."""
    installed = []
    shell = types.SimpleNamespace(run_line_magic=lambda name, line: installed.append((name, line)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    # IPython expands {package} in a line magic before it calls it.
    names = {"get_ipython": lambda: shell}
    exec(TransformerManager().transform_cell(install_cell()), names)
    [(name, line)] = installed
    assert name == "pip"
    return line.format_map(names)


def test_notebook_in_a_clone_installs_the_clone(monkeypatch):
    monkeypatch.chdir(FOLDER)
    assert run_install_cell(monkeypatch) == 'install --quiet "..[frames]"'


@pytest.mark.parametrize(
    ("opened", "package"),
    [
        (
            "fileId=https%3A//github.com/some/fork/blob/main/notebooks/quickstart.ipynb",
            "git+https://github.com/some/fork@main",
        ),
        ("fileId=1aBcD", None),
    ],
)
def test_notebook_on_colab_installs_the_repository_that_it_was_opened_from(monkeypatch, tmp_path, opened, package):
    # As Colab's server answers; its address is in the environment of the kernel.
    class Sessions(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/api/sessions"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps([{"path": opened}]).encode())

        def log_message(self, *_):
            """Log nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Sessions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setenv("COLAB_JUPYTER_IP", "127.0.0.1")
    monkeypatch.setenv("KMP_TARGET_PORT", str(server.server_address[1]))
    name = "pma-jax[frames]"
    assert run_install_cell(monkeypatch) == f'install --quiet "{f"{name} @ {package}" if package else name}"'
    server.shutdown()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs_and_installs_the_package_on_colab(path):
    cells = json.loads(path.read_text())["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    for cell in cells:
        assert not cell["metadata"]
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
    assert "".join(cells[1]["source"]).startswith(install_cell())
    nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path, runs, run_with_workers, tmp_path, monkeypatch):
    shutil.copytree(runs / "run", tmp_path / "run")  # A sweep adds its rows to it.
    monkeypatch.setenv("PMA_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("PMA_ANNEALED", str(runs / "annealed"))
    monkeypatch.setenv("PMA_GRID", str(runs))
    monkeypatch.setenv("PMA_REPLICAS", str(run_with_workers.path))
    monkeypatch.setenv("PMA_TEXT_TOKENS", "128")
    monkeypatch.setenv("PMA_POINTS", "5")
    monkeypatch.setenv("XLA_FLAGS", processes.xla_flags(1))
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    Client(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the notebook draws"
    assert any(output.get("name") == "stdout" for output in outputs), "and prints"
    assert not [output for output in outputs if output.get("name") == "stderr" and "Warning" in output["text"]]
