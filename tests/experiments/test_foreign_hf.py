"""Hugging Face layouts against float64 (experiments/faults/foreign_hf.py): the cells, in this process."""

import importlib.util
from pathlib import Path

import pytest

from pma_jax.cli.command import main

SCRIPT = Path(__file__).parents[2] / "experiments" / "faults" / "foreign_hf.py"
spec = importlib.util.spec_from_file_location("foreign_hf", SCRIPT)
assert spec is not None and spec.loader is not None
foreign_hf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(foreign_hf)


@pytest.mark.parametrize("cell", foreign_hf.CELLS)
def test_cell(tmp_path, capfd, cell):
    assert foreign_hf.run_cell(cell, tmp_path, lambda arguments: (main(arguments), capfd.readouterr().err)) is None
