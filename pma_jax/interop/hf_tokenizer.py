"""Tokenizer files of imported and exported models.

An imported snapshot contains them in its directory `tokenizer`. `data.tokenizer` in the configuration of the snapshot
is the path of the tokenizer.json in that directory, so that merges of the snapshot find the files too. The
tokenizer.json of a run of pma_jax is in the token cache, or is the file at the path `data.tokenizer`.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.data.tokenizer import byte_tokenizer, load_tokenizer
from pma_jax.merging.tokenizer_files import CONFIG_NAME, FILE_NAME, FOLDER, find_trained_bpe
from pma_jax.storage.formats.outputs import TOKENIZER_PATTERNS, is_sidecar
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.json_files import serialize_json
from pma_jax.storage.paths import as_path, expand_user


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer files of an exported model.

    Attributes:
        copies: File name -> path of the file to copy.
        texts: File name -> content of a generated file.
        end_of_document: Id of the token that ends a document, if known.
        notes: One-line notes for the user.
    """

    copies: Mapping[str, Path] = field(default_factory=dict)
    texts: Mapping[str, bytes] = field(default_factory=dict)
    end_of_document: int | None = None
    notes: tuple[str, ...] = ()


def select_tokenizer_files(files: Iterable[Path]) -> dict[str, Path]:
    """Return a dict from file name to path of those files whose names match `TOKENIZER_PATTERNS`."""
    return {path.name: path for path in files if is_sidecar(path, TOKENIZER_PATTERNS)}


def bos_from_eos(config: Config, eos: Any) -> Any:
    """Return EOS as the BOS token for transformers if attention crosses document boundaries, else None.

    Training data separates documents by EOS alone. If attention crosses the boundaries (`model.separator_token` is
    negative), the model sees the EOS of the previous document before each document; otherwise it sees no token there.

    Args:
        config: Configuration of the model.
        eos: The token that ends a document, as text or id.
    """
    return eos if config.model.separator_token < 0 else None


def find_tokenizer_files(
    source: CheckpointSource, config: Config, is_imported: bool, tokenizer_json: Path | None
) -> TokenizerFiles:
    """Find the tokenizer files of a snapshot, or generate them for transformers.

    The tokenizer is `tokenizer_json` if it is given, else the one that was imported with the snapshot, else the one of
    the run that saved the snapshot. If none is found, return no files and a note with the reason.

    Args:
        source: The snapshot.
        config: Configuration of the snapshot.
        is_imported: Whether the snapshot was imported, or merged from imported snapshots.
        tokenizer_json: Path of a tokenizer.json to use instead. If the file is named tokenizer.json and its directory
            has a tokenizer_config.json, return the tokenizer files of that directory without checking them against the
            model.

    Raises:
        UserError: Files must be generated (there is no tokenizer_config.json), but the tokenizer cannot be read, has
            no known end-of-document token, or has ids outside the model's vocabulary.
    """
    if tokenizer_json is not None:
        return _existing_or_generated_files(tokenizer_json, config)
    name = config.data.tokenizer
    if is_imported:
        # A merge does not contain the files: they are in the imported snapshot that `data.tokenizer` points to.
        candidates = (source.path / FOLDER, as_path(name).parent)
        folder = next((candidate for candidate in candidates if candidate.is_dir()), None)
        if folder is not None:
            return TokenizerFiles(_list_files(folder))
    if name == "bytes":
        return _generate_files(byte_tokenizer(), config)
    path = find_trained_bpe(source.path, config) if name == "bpe" else expand_user(name)
    if path is not None and path.is_file():
        return _existing_or_generated_files(path, config)
    reason = "the run's BPE tokenizer is not in the token cache" if path is None else f"{path} does not exist"
    return TokenizerFiles(notes=(f"no tokenizer is written: {reason}; pass a {FILE_NAME} with --tokenizer",))


def _list_files(folder: Path) -> dict[str, Path]:
    return select_tokenizer_files(sorted(file for file in folder.iterdir() if file.is_file()))


def _existing_or_generated_files(path: Path, config: Config) -> TokenizerFiles:
    """Return the tokenizer files beside a tokenizer.json; without a tokenizer_config.json there, generate all files."""
    files = _list_files(path.parent) if path.name == FILE_NAME and path.is_file() else {}
    if CONFIG_NAME in files:
        return TokenizerFiles(files, {}, _end_of_document(path))
    return _generate_files(load_tokenizer(path), config)


def _end_of_document(path: Path) -> int | None:
    # If `load_tokenizer` knows no end-of-document token of this tokenizer, tokenizer_config.json may still define one.
    with contextlib.suppress(UserError):
        return load_tokenizer(path).end_of_document
    return None


def _generate_files(tokenizer: Any, config: Config) -> TokenizerFiles:
    """Generate the files from which transformers loads a `Tokenizer`.

    transformers parses special tokens that occur in a text; pma_jax does not.
    """
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        raise UserError(
            f"the tokenizer {tokenizer.name} has ids up to {tokenizer.vocabulary_size - 1}, but the model's vocabulary "
            f"size is {config.model.vocabulary_size}: choose another tokenizer"
        )
    end = tokenizer.backend.id_to_token(tokenizer.end_of_document)
    fields = {
        "bos_token": bos_from_eos(config, end),
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "model_max_length": config.training.sequence_length_tokens,
        "pad_token": end,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    texts = {
        FILE_NAME: (tokenizer.backend.to_str(pretty=True) + "\n").encode(),
        CONFIG_NAME: serialize_json(fields),
    }
    return TokenizerFiles({}, texts, tokenizer.end_of_document)
