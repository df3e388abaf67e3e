"""Determine a stored checkpoint's position in training: from its metadata, else from its name or its parent's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.storage.formats.names import MAX_POSITION, NameProgress, owner_of_item, parse_path
from pma_jax.storage.json_files import MAX_JSON_BYTES, parse_untrusted_json
from pma_jax.storage.paths import read_file

TRAINER_STATE_FILE = "trainer_state.json"  # of the Hugging Face Trainer


@dataclass(frozen=True)
class StoredProgress:
    """Position of a checkpoint in training; None for what is unknown.

    Attributes:
        step: Optimizer steps.
        tokens: Tokens consumed.
        epoch: Epochs, from the name.
        notes: Contradictions between the name and the metadata, one line each.
    """

    step: int | None
    tokens: int | None
    epoch: int | None
    notes: tuple[str, ...] = ()


def read_progress(path: Path, *, step: Any = None, tokens: Any = None) -> StoredProgress:
    """Return the progress of the checkpoint at `path`, a directory or a file.

    Args:
        path: The checkpoint.
        step: Step in the checkpoint's own metadata, if any; anything but a valid integer is ignored.
        tokens: Tokens in the checkpoint's own metadata.
    """
    name = parse_path(path)
    notes: list[str] = []
    where = "the metadata"
    if not _is_position(step):
        step, where = _read_trainer_step(path, name, notes), TRAINER_STATE_FILE
    stored = {"step": (step, name.step, where), "token": (tokens, name.tokens, "the metadata")}
    result: dict[str, int | None] = {}
    for unit, (recorded, named, source) in stored.items():
        is_recorded = _is_position(recorded)
        result[unit] = recorded if is_recorded else named
        if is_recorded and named is not None and recorded != named:
            notes.append(f"{path}: its name says {unit} {named:,} and {source} {recorded:,}; {recorded:,} is used")
    return StoredProgress(result["step"], result["token"], name.epoch, tuple(notes))


def _read_trainer_step(path: Path, name: NameProgress, notes: list[str]) -> int | None:
    """Return the step in trainer_state.json beside the weights; None if there is none."""
    directory = path if path.is_dir() else path.parent
    # A file that is named by its own step shares its directory with others, and trainer_state.json is not its own.
    if directory != path and owner_of_item(path) == path and name.is_known:
        return None
    file = directory / TRAINER_STATE_FILE
    if not file.is_file():
        return None
    try:
        state = parse_untrusted_json(read_file(file, MAX_JSON_BYTES), str(file), allow_nan=True)
    except UserError as error:
        notes.append(f"{error}; the step is taken from the name")
        return None
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if _is_position(step) else None


def _is_position(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_POSITION  # `type`, because bool is a subclass of int
