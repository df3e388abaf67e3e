"""Build the package, install the wheel in a fresh environment outside the clone, and use it there.

    python3 .ci/check_package.py

The source distribution is built from the clone and the wheel from the source distribution, so that both are complete.
Without any extra, `pma` trains the demo to its first preview, merges, evaluates and reports; then the quickstart
notebook runs on the result. In another fresh environment, the first cell of a notebook installs the package from the
clone that holds it. Prints the seconds from `pip install` to the first preview.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ("--constraint", str(ROOT / "constraints.txt"))
TOKENS = 1_126_400  # the demo's first preview is at 1,024,000 tokens
WHEEL_FILES = ("pma_jax/py.typed", "pma_jax/shipped_configs/demo.py", "pma_jax/shipped_configs/dense_1b.py")
SDIST_FILES = ("pyproject.toml", "Makefile", "constraints.txt", "tests/tiny.py", "configs/demo.py", "docs/index.md")
RUN_NOTEBOOK = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
"""

RUN_INSTALL_CELL = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
notebook.cells = [notebook.cells[1], nbformat.v4.new_code_cell("import pma_jax; pma_jax.frames")]
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
"""


def make_environment(folder: Path) -> Path:
    """Make a virtual environment, and return its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin"


def install(programs: Path, *requirements: str) -> None:
    """Install requirements at the pinned versions."""
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *CONSTRAINTS, *requirements], check=True)


def on_path(programs: Path) -> dict[str, str]:
    """Return the environment variables with these programs first; notebooks also need the system's shell."""
    return os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def build(folder: Path) -> Path:
    """Build both distributions, check the files in them, and return the wheel."""
    programs = make_environment(folder / "builder")
    install(programs, "build")
    subprocess.run(
        [programs / "python", "-m", "build", "--outdir", folder / "dist", ROOT], check=True, stdout=subprocess.DEVNULL
    )
    (wheel,), (sdist,) = (sorted((folder / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        held_in_source = {name.partition("/")[2] for name in archive.getnames()}
    missing = [*(set(WHEEL_FILES) - held), *(set(SDIST_FILES) - held_in_source)]
    foreign = sorted({name.split("/")[0] for name in held if not name.startswith("pma_jax")})
    if missing or foreign:
        sys.exit(f"error: the distributions lack {missing}, and the wheel has {foreign} beside the package")
    return wheel


def check_install_cell(folder: Path) -> None:
    """Run a notebook's cell that installs the package, in a fresh environment and beside the clone's package."""
    programs = make_environment(folder / "notebook")
    install(programs, "ipykernel", "nbclient", "nbformat")
    command = [programs / "python", "-c", RUN_INSTALL_CELL, "compare_a_grid.ipynb"]
    environment = on_path(programs) | {"PIP_CONSTRAINT": CONSTRAINTS[1]}
    subprocess.run(command, check=True, cwd=ROOT / "notebooks", env=environment)
    subprocess.run([programs / "python", "-c", "import pma_jax, pandas"], check=True, cwd=folder)


def main() -> None:
    """Build, install, train, merge, report, and run a notebook."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = build(folder)
        programs = make_environment(folder / "user")
        started = time.monotonic()
        install(programs, str(wheel))
        installed = time.monotonic()

        def pma(*arguments: str) -> None:
            subprocess.run([programs / "pma", *arguments], check=True, cwd=folder)

        pma("train", "--config", "demo", "--workdir", "run", f"--config.training.total_tokens={TOKENS}")
        trained = time.monotonic()
        pma("merge", "run", "--last", "10", "--out", "merged")
        pma("evaluate", "run", "merged")
        pma("report", "run")
        install(programs, "ipykernel", "nbclient", "nbformat")
        command = [programs / "python", "-c", RUN_NOTEBOOK, ROOT / "notebooks/quickstart.ipynb"]
        subprocess.run(command, check=True, cwd=folder, env=on_path(programs) | {"PMA_RUN": str(folder / "run")})
        check_install_cell(folder)
        print(f"{wheel.name}: installed in {installed - started:.0f} s, first preview {trained - started:.0f} s after")


if __name__ == "__main__":
    main()
