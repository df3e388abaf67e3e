"""Check that a release tag, the package, CITATION.cff and CHANGELOG.md name the same version.

    python3 .ci/check_version.py v0.1.0

`pma_jax.__version__` is the version; the build reads it from there.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def find(file: str, pattern: str) -> str:
    """Return what the group of a pattern matches in a file, or a description of the absence."""
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    return match[1] if match else "no version"


versions = {
    "the tag": sys.argv[1].removeprefix("v"),
    "pma_jax/__init__.py": find("pma_jax/__init__.py", r'^__version__ = "(.+)"'),
    "CITATION.cff": find("CITATION.cff", r"^version: (.+)"),
    "the newest section of CHANGELOG.md": find("CHANGELOG.md", r"^## (.+)"),
}
if len(set(versions.values())) > 1:
    sys.exit("error: " + ", ".join(f"{version} in {place}" for place, version in versions.items()))
