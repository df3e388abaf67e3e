"""Where the tokenizer of a snapshot lies: in the snapshot, if it was imported, or in the token cache of its run."""

import contextlib
import os
from pathlib import Path

from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.data.shards import find_cached_tokenizer
from pma_jax.merging.engine import provenance
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.paths import as_path

FOLDER = "tokenizer"  # of an imported snapshot
FILE_NAME, CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"


def find_trained_bpe(snapshot: str | os.PathLike, config: Config) -> Path | None:
    """Find the BPE tokenizer that the run of a snapshot trained. For a merge, search the runs of its sources too."""
    paths = [as_path(snapshot)]
    with contextlib.suppress(UserError):
        paths += [as_path(entry["source"]) for entry in provenance.read(paths[0])["sources"]]
    for path in paths:
        run = path.parent.parent / "run.json"  # a snapshot is at RUN/snapshots/STEP
        with contextlib.suppress(UserError, KeyError, FileNotFoundError, NotADirectoryError):  # the run is gone
            found = find_cached_tokenizer(config.data, read_json_object(run)["corpus"])
            if found is not None:
                return found
    return None
