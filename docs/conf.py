"""Configuration of the documentation site: `make docs` builds it."""

import sys
import typing
from pathlib import Path

import numpy.typing

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

# Signatures then say ArrayLike, not the long union that it stands for.
numpy.typing.ArrayLike = typing.NewType("ArrayLike", object)

project = "pma_jax"
author = "The pma_jax developers"
copyright = "The pma_jax developers"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "generated_pages",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build", "extensions"]
nb_execution_mode = "off"
suppress_warnings = ["misc.highlighting_failure"]  # shell commands in notebooks that continue on the next line
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_title = "pma_jax"
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
