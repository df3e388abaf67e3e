"""The tokenizer with which a snapshot's model reads tasks.

A model that was trained here reads text as its training data was encoded: no special token is added, and the text of a
special token is ordinary text. A model that was imported reads it as transformers encodes it.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from pma_jax.config import Config
from pma_jax.config.errors import UserError, first_line
from pma_jax.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from pma_jax.merging.tokenizer_files import CONFIG_NAME, FILE_NAME, FOLDER, find_trained_bpe
from pma_jax.runs import steps
from pma_jax.runs.snapshots import Snapshot
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.paths import as_path, expand_user, read_file

_MAX_BYTES = 2**28  # of a tokenizer.json


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """Text to ids and back.

    Attributes:
        name: What messages call it.
        prefix: The id that stands before a text without a context.
        end: The id that ends a text.
        vocabulary_size: One more than the largest id.
        backend: The tokenizer.
        is_imported: Whether special tokens are added and recognised, as transformers does.
    """

    name: str
    prefix: int
    end: int
    vocabulary_size: int
    backend: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)
    is_imported: bool = False

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the ids of a text.

        Args:
            text: The text; NUL characters are removed, as from training data.
            add_special_tokens: Whether an imported model's tokenizer adds its special tokens; None: unless the text
                begins with the prefix.
        """
        if add_special_tokens is None:
            add_special_tokens = not text.startswith(self.decode([self.prefix], skip_special_tokens=False))
        text = text if self.is_imported else text.replace("\0", "")
        return self.backend.encode(text, add_special_tokens=self.is_imported and add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def tokenizer_of_snapshot(snapshot: Snapshot, config: Config) -> TextTokenizer:
    """Find the tokenizer of a snapshot.

    Args:
        snapshot: A snapshot of a run, a merge, or an imported model.
        config: Its configuration; `data.tokenizer` may be another one.

    Raises:
        UserError: The tokenizer is not found, or has ids that the model does not have.
    """
    name = config.data.tokenizer
    metadata = steps.read_metadata(snapshot.path, ())
    if metadata.get("imported") and name == snapshot.config.data.tokenizer:
        folders = as_path(snapshot.path) / FOLDER, as_path(name).parent
        folder = next((folder for folder in folders if (folder / FILE_NAME).is_file()), None)
        if folder is None:
            raise UserError(
                f"{snapshot.path} was imported without a {FILE_NAME}: name one with --config.data.tokenizer"
            )
        found = _imported_tokenizer(folder)
    else:
        found = text_tokenizer(_trained_tokenizer(snapshot, config))
    if found.vocabulary_size > config.model.vocabulary_size:
        raise UserError(
            f"the tokenizer {found.name} has ids up to {found.vocabulary_size - 1}, but the model of {snapshot.path} "
            f"has {config.model.vocabulary_size}: name its own with --config.data.tokenizer"
        )
    return found


def text_tokenizer(trained: Tokenizer) -> TextTokenizer:
    """Return the tokenizer of training data as one that reads tasks."""
    end = trained.end_of_document
    return TextTokenizer(trained.name, end, end, trained.vocabulary_size, trained.backend)


def _trained_tokenizer(snapshot: Snapshot, config: Config) -> Tokenizer:
    name = config.data.tokenizer
    if name == "bytes":
        return byte_tokenizer()
    if name != "bpe":
        return load_tokenizer(expand_user(name))
    path = find_trained_bpe(snapshot.path, snapshot.config)
    if path is None:
        raise UserError(
            f"the BPE tokenizer of {snapshot.path} is not in the token cache {config.data.cache_dir}: name its "
            "tokenizer.json with --config.data.tokenizer"
        )
    return load_tokenizer(path)


def _imported_tokenizer(folder: Path) -> TextTokenizer:
    path = folder / FILE_NAME
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_file(path, _MAX_BYTES))
    except OSError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{path} is not a Hugging Face tokenizer.json: {first_line(error)}") from error
    backend.no_truncation()
    backend.no_padding()
    fields = read_json_object(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
    ids = {name: _token_id(backend, fields.get(f"{name}_token")) for name in ("bos", "eos")}
    if ids["eos"] is None:
        raise UserError(f"{folder / CONFIG_NAME} names no eos_token of {FILE_NAME}: add it")
    prefix = ids["eos"] if ids["bos"] is None else ids["bos"]
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return TextTokenizer(str(path), prefix, ids["eos"], size, backend, is_imported=True)


def _token_id(backend: tokenizers.Tokenizer, token: object) -> int | None:
    """Return the id of a special token as tokenizer_config.json names it: a text, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(content) if isinstance(content, str) else None
