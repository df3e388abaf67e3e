"""The float64 decoder that these tests compare with lies beside the model's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "model"))
