"""List the checkpoints at an address: of a run, a directory of checkpoints, or a pattern of hub revisions.

In a directory of checkpoints, a child takes part if its name states its step, tokens or epoch and it is complete. What
does not take part is left out with a reason, so that nothing is merged or skipped silently. A directory that could
also be read in another way is refused.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.merging.engine.provenance import FILE_NAME as PROVENANCE_FILE
from pma_jax.storage.formats import hub
from pma_jax.storage.formats.easydel import name_with_step
from pma_jax.storage.formats.levanter import DATABASE_FILE, METADATA_FILE, is_levanter
from pma_jax.storage.formats.names import owner_of_item, parse_name, stage_words
from pma_jax.storage.formats.open import find_layout
from pma_jax.storage.formats.orbax_read import has_file, is_orbax
from pma_jax.storage.formats.orbax_tree import TREE_FILE
from pma_jax.storage.formats.publish import IN_PROGRESS_FILE
from pma_jax.storage.formats.unread import describe_unread
from pma_jax.storage.json_files import read_json, read_json_object
from pma_jax.storage.matching import match_files
from pma_jax.storage.paths import as_path, is_bucket

_COMMIT_MARKER = "commit_success.txt"
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
_TEMPORARY = re.compile(
    r"(?:tmp|temp)[-_.].*|.*[-_.](?:tmp|temp|partial|incomplete|part)\d*|.*\.orbax-checkpoint-tmp.*", re.IGNORECASE
)
# Reasons to leave out an entry of a directory.
_NOT_CHECKPOINT, _HIDDEN, _RUN, _NO_STEP = "not a checkpoint", "hidden", "a run", "no step in the name"
_UNFINISHED = "temporary: its writing was interrupted or goes on"
_EARLIER_MERGE = f"an earlier merge, it has {PROVENANCE_FILE}"
_INCOMPLETE, _UNREAD = "incomplete: {}", "its format is not read"


@dataclass(frozen=True)
class Listing:
    """The checkpoints at one address.

    Attributes:
        paths: Addresses of the checkpoints; those of a directory in the order of their names' progress.
        stages: For each checkpoint, the run, stage or directory that it belongs to; None if that is not known.
        is_expanded: Whether the address stands for its contents, and is not itself the checkpoint.
        left_out: Name of each entry of a directory that does not take part -> the reason.
        notes: Messages for the user, one line each.
    """

    paths: tuple[str, ...]
    stages: tuple[str | None, ...]
    is_expanded: bool
    left_out: dict[str, str]
    notes: tuple[str, ...]


def list_checkpoints(address: str, snapshot_kind: str | None = None) -> Listing:
    """List the checkpoints at an address, which may itself be one. Arrays are not read, and revisions not downloaded.

    Args:
        address: A run, a checkpoint, a directory of checkpoints, hf://org/repo@revision (or a pattern of revisions).
        snapshot_kind: Which snapshots of a run to list; None is the first kind that the run saves.

    Raises:
        UserError: The address has several meanings, or is a directory in which no checkpoint can be merged.
    """
    if address.startswith(hub.PREFIX):
        revisions, notes = hub.expand_revisions(address)
        is_pattern = revisions != [address]
        return Listing(tuple(revisions), tuple(map(hub.repo_and_stage, revisions)), is_pattern, {}, tuple(notes))
    path = as_path(address)
    if is_run_directory(path):
        snapshots = _list_snapshots(path, snapshot_kind)
        series = str(path if is_bucket(path) else path.absolute())
        return Listing(tuple(snapshots), (series,) * len(snapshots), True, {}, ())
    if snapshot_kind is not None:
        raise UserError(f"{address} is not a run, so it has no {snapshot_kind} snapshots: leave --kind out")
    return _list_directory(path) or Listing((address,), (_stage_of_named(path),), False, {}, ())


def is_run_directory(path: Path) -> bool:
    """Return whether a directory is a run of pma_jax."""
    return (path / "run.json").is_file() and (path / "config.json").is_file()


def resolve_address(address: str) -> str:
    """Return an address that is equal for all names of one checkpoint: without symbolic links and relative parts."""
    if address.startswith(hub.PREFIX):
        return "{}{}@{}".format(hub.PREFIX, *hub.parse_address(address))
    return str(address).rstrip("/") if is_bucket(address) else os.path.realpath(address)


def format_left_out(address: str, left_out: dict[str, str]) -> str:
    """Format what was left out of a directory as one line, grouped by reason."""
    names_of: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names_of.setdefault(reason, []).append(name)
    groups = []
    for reason, names in names_of.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        groups.append(f"{', '.join(names[:4])}{more} ({reason})")
    return f"left out of {address}: {'; '.join(groups)}"


def _list_snapshots(run: Path, snapshot_kind: str | None) -> list[str]:
    """List the published snapshots of a run, those with a commit marker, oldest first."""
    from pma_jax import config as configuration  # its imports take longer than a small merge

    path = run / "config.json"
    config = configuration.resolve_stored(read_json(path, dict[str, dict[str, Any]]), path)
    kind = snapshot_kind or config.checkpoint.kinds[0]
    steps = [step for step in match_files(run / configuration.snapshot_kind(kind).folder, "*") if step.name.isdigit()]
    published = [step for step in steps if (step / _COMMIT_MARKER).is_file()]
    if not published:
        raise UserError(f"{run} has no {kind} snapshot: train until the first one is saved, or choose another --kind")
    return [str(step) for step in sorted(published, key=lambda step: int(step.name))]


def _list_directory(path: Path) -> Listing | None:
    """List the checkpoints in a directory; None if it is itself a checkpoint or holds none.

    Raises:
        UserError: It is both, or its checkpoints cannot be ordered.
    """
    if not path.is_dir():
        return None
    is_checkpoint = has_file(path, *_SAFETENSORS, *_ORBAX, "*/.zarray") or _has_layout_of_its_own(path)
    children, left_out = _classify_children(path, is_checkpoint)
    children.sort(key=_name_order)
    if is_checkpoint and children:
        raise UserError(_several_meanings(path, children[-1], len(children)))
    notes = [f"{path} is read as a directory of {len(children)} checkpoints"] if children else []
    notes += [format_left_out(str(path), left_out)] if left_out else []
    if is_checkpoint:
        return Listing((str(path),), (_stage_of_named(path),), False, left_out, tuple(notes))
    if children:
        series = _series_of(path)
        stages = tuple(_stage_in(series, name_with_step(child)) for child in children)
        paths = tuple(str(_checkpoint_in(child)) for child in children)
        return Listing(paths, stages, True, left_out, tuple(notes))
    _refuse_unusable(path, left_out)
    return None


def _has_layout_of_its_own(path: Path) -> bool:
    """Return whether a directory is a checkpoint of a layout other than safetensors and Orbax.

    The files of Orbax may also be those of several checkpoints in subdirectories.
    """
    layout = find_layout(path)
    return layout is not None and layout.name != "orbax"


def _several_meanings(path: Path, child: Path, children: int) -> str:
    """Return the message about a checkpoint with checkpoints in its subdirectories."""
    own = next((file.name for pattern in _SAFETENSORS[::-1] for file in sorted(match_files(path, pattern))), None)
    ways = [f"{path / own} for its own"] if own else []
    ways.append(f"the directories for the others, such as {path / child.name}")
    return (
        f"{path} holds a checkpoint of its own ({own or 'Orbax'}) and {children} in directories: "
        f"name those that you mean: {', '.join(ways)}"
    )


def _refuse_unusable(path: Path, left_out: dict[str, str]) -> None:
    """Raise UserError if a directory holds no checkpoint to merge, but something that may be meant as one."""
    # The items of one Orbax checkpoint have no steps in their names.
    if is_orbax(path) and _EARLIER_MERGE not in left_out.values():
        return
    unusable = {name: reason for name, reason in left_out.items() if reason not in (_NOT_CHECKPOINT, _HIDDEN)}
    if not {_NO_STEP, _EARLIER_MERGE} & set(unusable.values()) and (message := describe_unread(path)):
        raise UserError(message)
    if unusable:
        raise UserError(
            f"{path} holds no checkpoint whose name states its step: {format_left_out(str(path), unusable)}; "
            "name each checkpoint that you mean"
        )
    directories = (entry for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.name.startswith("."))
    series = [entry.name for entry in directories if _classify_children(entry, True)[0]]
    if series:
        raise UserError(f"{path} holds directories of checkpoints ({', '.join(series[:4])}): name those that you mean")


def _classify_children(path: Path, only_with_progress: bool) -> tuple[list[Path], dict[str, str]]:
    """Return the children of a directory that are checkpoints of a series, and the others with the reason.

    Args:
        path: The directory.
        only_with_progress: Whether to ignore children whose names state no step, tokens or epoch.
    """
    entries = sorted(path.iterdir(), key=lambda entry: entry.name)
    if only_with_progress:  # also saves time for the many directories of arrays of a checkpoint
        entries = [entry for entry in entries if parse_name(name_with_step(entry)).is_known]
    reasons = {entry: _reason_to_leave_out(entry) for entry in entries}
    left_out = {entry.name: reason for entry, reason in reasons.items() if reason is not None}
    children = [entry for entry, reason in reasons.items() if reason is None]
    marked = [child for child in children if (child / _COMMIT_MARKER).is_file()]
    if marked:  # checkpoints of pma_jax, and of Orbax in a bucket, get this file when they are complete
        left_out |= {x.name: _INCOMPLETE.format(f"it has no {_COMMIT_MARKER}") for x in children if x not in marked}
        children = marked
    if any(is_levanter(child) for child in children):
        # What levanter's interrupted saving leaves is a database without metadata, as of Orbax.
        bare = [x for x in children if (x / DATABASE_FILE).is_file() and not (x / TREE_FILE).exists()]
        bare = [child for child in bare if not is_levanter(child)]
        left_out |= {x.name: _INCOMPLETE.format(f"it has no {METADATA_FILE}") for x in bare}
        children = [child for child in children if child not in bare]
    first_of: dict[str, Path] = {}
    for child in sorted(children, key=lambda child: child.is_symlink()):
        first = first_of.setdefault(resolve_address(str(child)), child)
        if first != child:
            left_out[child.name] = f"the same directory as {first.name}"
    return list(first_of.values()), left_out


def _reason_to_leave_out(entry: Path) -> str | None:
    """Return why an entry of a directory is not one of its checkpoints, or None if it is one."""
    if entry.name.startswith("."):
        return _HIDDEN
    progress = parse_name(name_with_step(entry))
    if entry.is_symlink():
        target = Path(os.path.realpath(entry))
        if not target.exists():
            return "a link to nothing"
        if target.parent == entry.parent.resolve() or parse_name(target.name).step not in (progress.step, None):
            return f"a link to {target.name}"
    if not entry.is_dir():
        return _NOT_CHECKPOINT
    if _TEMPORARY.fullmatch(entry.name):
        return _UNFINISHED
    if (entry / PROVENANCE_FILE).is_file():
        return _EARLIER_MERGE
    if is_run_directory(entry):
        return _RUN
    problem = _incompleteness(_checkpoint_in(entry))
    if progress.is_known:
        return problem and (problem if problem == _UNREAD else _INCOMPLETE.format(problem))
    return _NOT_CHECKPOINT if problem else _NO_STEP


def _checkpoint_in(directory: Path) -> Path:
    """Return the checkpoint of a directory named by its step: the directory, or the only part of it that holds one.

    `1000/items` of Orbax is found by its reader; `checkpoint-500/model` with safetensors is found here.
    """
    if has_file(directory, *_SAFETENSORS, *_ORBAX) or find_layout(directory) is not None:
        return directory
    parts = [
        part
        for part in sorted(directory.iterdir())
        if part.is_dir() and owner_of_item(part) == directory
        if has_file(part, *_SAFETENSORS) or _has_layout_of_its_own(part)
    ]
    return parts[0] if len(parts) == 1 else directory


def _incompleteness(path: Path) -> str | None:
    """Return why a directory is not a complete checkpoint, from the presence of its files; None if it is complete."""
    if (path / IN_PROGRESS_FILE).is_file():
        return f"it has {IN_PROGRESS_FILE}"
    index = next(iter(sorted(match_files(path, "*.safetensors.index.json"))), None)
    if index is not None:
        missing = [name for name in _shards_in(index) if not (path / name).is_file()]
        return f"{len(missing)} files of its index are missing" if missing else None
    files = sorted(match_files(path, "*.safetensors"))
    if files:
        shard = re.fullmatch(r".*-\d+-of-(\d+)\.safetensors", files[0].name)
        return f"{len(files)} of {int(shard[1])} files, and no index" if shard and int(shard[1]) != 1 else None
    if find_layout(path) is not None:
        return None
    if next(path.iterdir(), None) is None:
        return "it is empty"
    return _UNREAD if describe_unread(path) else "no weights are in it"


def _shards_in(index: Path) -> list[str]:
    """Return the file names in an index; empty if it is corrupt, which opening the checkpoint reports."""
    weight_map = None
    with contextlib.suppress(UserError):
        weight_map = read_json_object(index).get("weight_map")
    return (
        sorted({name for name in weight_map.values() if isinstance(name, str)}) if isinstance(weight_map, dict) else []
    )


def _name_order(path: Path) -> tuple[int, int, int]:
    progress = parse_name(name_with_step(path))
    return progress.tokens or 0, progress.step or 0, progress.epoch or 0


def _series_of(directory: Path) -> str:
    """Return what identifies the series that the checkpoints in a directory belong to: the run, or the directory."""
    directory = directory if is_bucket(directory) else directory.absolute()
    return str(directory.parent if is_run_directory(as_path(directory.parent)) else directory)


def _stage_in(series: str, name: str) -> str:
    """Return the series and the stage in a checkpoint's name, such as "/data/run stage2"."""
    return f"{series} {parse_name(name).stage}".strip()


def _stage_of_named(path: Path) -> str | None:
    """Return the series and stage of a checkpoint that the user named; None if its name states neither step nor stage.

    Such a checkpoint may be merged with any other.
    """
    owner = owner_of_item(path if is_bucket(path) else path.absolute())
    name = name_with_step(as_path(owner)).removesuffix(".safetensors")
    if parse_name(name).is_known:
        return _stage_in(_series_of(as_path(owner.parent)), name)
    words = stage_words(name)
    return f"{_series_of(as_path(owner.parent))} {words}" if words else None
