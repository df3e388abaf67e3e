"""Add the folder of the model tests to the path: it holds the float64 decoder that these tests compare with."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "model"))
