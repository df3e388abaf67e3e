"""Read and write checkpoints of big_vision.

`checkpoint.bv-000000200/` holds one zarr array per leaf, whose name has "~" between the keys (`params~head~kernel`),
with the optimizer's (`opt~…`) beside the parameters. `big_vision.utils.load_params` reads the arrays below `params`.
`load_checkpoint_ts` and `tsload` take all names in the directory, also that of a merge's provenance.json, for arrays,
unless they get a tree or a regex (google-research/big_vision at 0127fb6, big_vision/utils.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.orbax_tree import TREE_FILE
from pma_jax.storage.formats.source import CheckpointSource, LeafInfo
from pma_jax.storage.formats.zarr_tree import open_zarr_tree, zarr_tree_layout
from pma_jax.storage.matching import match_files

_SEPARATOR = "~"


def is_big_vision(path: Path) -> bool:
    """Return whether a directory holds arrays with "~" in their names, and no metadata of Orbax."""
    has_arrays = next(match_files(path, f"*{_SEPARATOR}*/.zarray"), None) is not None
    return has_arrays and not (path / TREE_FILE).exists()


def open_big_vision(path: Path, subtrees: Sequence[str] = ()) -> CheckpointSource:
    """Open a checkpoint; the leaves' names have "/" between the keys, as in big_vision's .npz files.

    Raises:
        UserError: The checkpoint is not complete or not supported, or the parameters cannot be located.
    """
    return open_zarr_tree(path, "big_vision", subtrees, _SEPARATOR)


def big_vision_layout(
    sources: Sequence[CheckpointSource], leaves: Mapping[str, LeafInfo], custom_metadata: Mapping[str, Any]
) -> OutputLayout:
    """Plan the files of a merged checkpoint."""
    return zarr_tree_layout(leaves, _SEPARATOR)
