"""The tokenizer that goes with a model: which files, from where.

An imported snapshot keeps them in `tokenizer/`; its configuration's `data.tokenizer` is the tokenizer.json in there, so
that merges of it find them too. A run of ours has a tokenizer.json in its token cache, or reads one by its path.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pma_jax.config import Config
from pma_jax.merging.engine import provenance
from pma_jax.storage.formats.outputs import TOKENIZER_PATTERNS, is_sidecar
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.json_files import json_bytes

FILE_NAME, FOLDER = "tokenizer.json", "tokenizer"


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer files to write.

    Attributes:
        copies: name -> the file it is a copy of.
        texts: name -> content, of those that are made.
        end_of_document: the id that ends a document, where it is known.
        notes: what the user should know, one line each.
    """

    copies: Mapping[str, Path] = field(default_factory=dict)
    texts: Mapping[str, bytes] = field(default_factory=dict)
    end_of_document: int | None = None
    notes: tuple[str, ...] = ()


def select_tokenizer_files(files: Iterable[Path]) -> dict[str, Path]:
    """Those of the files beside a model that make up its tokenizer, by name."""
    return {path.name: path for path in files if is_sidecar(path, TOKENIZER_PATTERNS)}


def beginning_of_document(config: Config, end: Any) -> Any:
    """What begins a document, given what ends one: the end of the one before, where the model sees that."""
    return end if config.model.separator_token < 0 else None


def find_tokenizer_files(
    source: CheckpointSource, config: Config, is_imported: bool, given: Path | None
) -> TokenizerFiles:
    """The tokenizer of a snapshot: the one given, the one that it was imported with, or the one of its run.

    Raises:
        ValueError: `given` is no tokenizer.json, or has ids past the model's vocabulary.
    """
    if given is not None:
        return _of_file(given, config)
    name = config.data.tokenizer
    if is_imported:
        # Its own, or, of a merge, that of the model that it was made from.
        folder = next((place for place in (source.path / FOLDER, Path(name).parent) if place.is_dir()), None)
        if folder is not None:
            return TokenizerFiles(_carried_in(folder))
    if name == "bytes":
        from pma_jax.data.tokenizer import byte_tokenizer

        return _described(byte_tokenizer(), config)
    path = _trained_bpe(source, config) if name == "bpe" else Path(name).expanduser()
    if path is not None and path.is_file():
        return _of_file(path, config)
    where = "no run's token cache has the BPE that it was trained with" if path is None else f"there is no {path}"
    return TokenizerFiles(notes=(f"no tokenizer is written: {where}; name its {FILE_NAME} with --tokenizer",))


def _carried_in(folder: Path) -> dict[str, Path]:
    return select_tokenizer_files(sorted(file for file in folder.iterdir() if file.is_file()))


def _of_file(path: Path, config: Config) -> TokenizerFiles:
    """A tokenizer.json with the files beside it that say how it is used; made where there are none."""
    from pma_jax.data import tokenizer as tokenizing

    beside = _carried_in(path.parent) if path.name == FILE_NAME and path.is_file() else {}
    if "tokenizer_config.json" in beside:
        return TokenizerFiles(beside, {}, _end_of_document(path))
    return _described(tokenizing.load_tokenizer(path), config)


def _end_of_document(path: Path) -> int | None:
    from pma_jax.data import tokenizer as tokenizing

    with contextlib.suppress(ValueError):  # some end documents otherwise; their own configuration says how
        return tokenizing.load_tokenizer(path).end_of_document
    return None


def _described(tokenizer: Any, config: Config) -> TokenizerFiles:
    """A tokenizer of ours as transformers reads it: text in a prompt that names a special token is that token there."""
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has ids up to {tokenizer.vocabulary_size - 1}, and the model's vocabulary "
            f"is {config.model.vocabulary_size}"
        )
    end = tokenizer.backend.id_to_token(tokenizer.end_of_document)
    described = {
        "bos_token": beginning_of_document(config, end),
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "model_max_length": config.training.sequence_length_tokens,
        "pad_token": end,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    texts = {
        FILE_NAME: (tokenizer.backend.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": json_bytes(described),
    }
    return TokenizerFiles({}, texts, tokenizer.end_of_document)


def _trained_bpe(source: CheckpointSource, config: Config) -> Path | None:
    """The BPE that the snapshot's run, or the run of what it was merged from, trained on its text."""
    from pma_jax.data.shards import find_cached_tokenizer

    places = [source.path]
    with contextlib.suppress(ValueError):
        places += [Path(entry["source"]) for entry in provenance.read(source.path)["sources"]]
    for place in places:
        run = place.parent.parent / "run.json"  # RUN/snapshots/STEP
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            path = find_cached_tokenizer(config.data, json.loads(run.read_text())["corpus"])
            if path is not None:
                return path
    return None
