"""Tasks of lm-eval's registry, and of YAML files and folders that the user names.

Import this module only where lm-eval is installed. Reading a YAML task runs the Python functions that it names
(`!function`), so only what the user names is read.
"""

import dataclasses
import functools
import glob
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

from pma_jax.config.errors import UserError, error_line

# Of `datasets`: the builders that read local files, so that a path of a file is relative to a folder.
_BUILDERS = ("arrow", "csv", "json", "parquet", "text", "xml")


@functools.cache
def open_registry() -> TaskManager:
    """Index the tasks of lm-eval: several seconds."""
    return TaskManager()


def open_file(path: Path) -> tuple[TaskManager, list[str]]:
    """Index a YAML file, or all of a folder and its subfolders, beside lm-eval's tasks where one is referred to.

    Returns:
        The index, and the names that it defines: its groups, and its tasks that are in none of them.

    Raises:
        UserError: A file cannot be read, two define the same name, or none defines a task.
    """
    found: dict[str, Entry] = {}
    for file in _list_files(path):
        entry = _read_entry(file)
        if entry is None:
            continue
        if entry.name in found:
            raise UserError(f"{file} and {found[entry.name].yaml_path} both define {entry.name!r}: rename one of them")
        found[entry.name] = entry
    if not found:
        raise UserError(f"{path} has no YAML file (.yaml) with `task:` or `group:`: name a file or folder that has")
    referred = {name for entry in found.values() for name in _member_names(entry.cfg or {})}
    # The tasks of lm-eval are indexed only if needed: it takes seconds.
    manager = TaskManager(include_path=path if path.is_dir() else None, include_defaults=not referred <= found.keys())
    for name, entry in found.items():
        manager.task_index[name] = entry
    if unknown := sorted(referred - manager.task_index.keys()):
        raise UserError(f"{path} refers to {unknown[0]!r}, which is no task: define it, or name the folder that does")
    return manager, [name for name in found if name not in referred]


def dataset_names(manager: TaskManager, name: str) -> list[str]:
    """Return the names of the datasets that a task, or the members of a group or tag, are read from."""
    configs = [config for _, config in _definitions(manager, name) if isinstance(config.get("dataset_path"), str)]
    keys = ("dataset_path", "dataset_name")
    return sorted({" ".join(str(config[key]) for key in keys if config.get(key)) for config in configs})


def find_code_task(manager: TaskManager, name: str) -> str | None:
    """Return a task that runs what a model writes, among a task or the members of a group or tag; None if none does."""
    return next((task for task, config in _definitions(manager, name) if config.get("unsafe_code")), None)


def _definitions(manager: TaskManager, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and definition of a task, or of a group or tag and all that it refers to."""
    waiting, seen = [name], set()
    while waiting:
        entry = manager.task_index.get(waiting.pop())
        if entry is None or entry.name in seen:
            continue
        seen.add(entry.name)
        config = entry.cfg or {}
        yield entry.name, config
        waiting += [*_member_names(config), *(() if config else entry.tags)]


def _list_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    hidden = ("__pycache__", ".ipynb_checkpoints")
    return sorted(file for file in path.rglob("*.yaml") if not set(hidden) & set(file.parts))


def _read_entry(file: Path) -> Entry | None:
    """Read the task or group of a file, with local paths made absolute; None if it is a template for other files."""
    try:
        config = load_yaml(file, resolve_func=False)
        if not {"task", "group", "class"} & config.keys():
            return None
        index: dict[str, Entry] = {}
        TaskIndex.process_cfg(config, file, index)
        entry = next(entry for entry in index.values() if entry.yaml_path == file)
        config = load_yaml(file, resolve_func=True)
    except Exception as error:  # the user's own Python raises any type
        raise UserError(f"cannot read the task in {file}: {error_line(error)}") from error
    _make_paths_absolute(config, file)
    # Without a path, so that lm-eval takes this configuration and does not read the file again.
    return dataclasses.replace(entry, yaml_path=None, cfg=config)


def _member_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that a group refers to; not those of tasks that it defines in place."""
    members = config.get("task")
    for member in members if isinstance(members, list) else ():
        if isinstance(member, str):
            yield member
        elif isinstance(member, Mapping) and isinstance(member.get("task"), list):
            yield from _member_names(member)
        elif isinstance(member, Mapping) and "dataset_path" not in member:
            yield str(member.get("group") or member.get("task"))


def _make_paths_absolute(config: dict[str, Any], file: Path) -> None:
    """Change the paths of local data, which are relative to the folder of the file, to absolute ones, in place."""
    members = config.get("task")
    for member in members if isinstance(members, list) else ():
        if isinstance(member, dict):
            _make_paths_absolute(member, file)
    dataset, options = config.get("dataset_path"), config.get("dataset_kwargs")
    if isinstance(dataset, str) and dataset not in _BUILDERS:
        config["dataset_path"] = _absolute(dataset, file)
    elif isinstance(dataset, str) and isinstance(options, dict):
        for key in {"data_dir", "data_files"} & options.keys():
            options[key] = _map_paths(options[key], file)


def _map_paths(value: Any, file: Path) -> Any:
    if isinstance(value, str):
        return _absolute(value, file)
    if isinstance(value, list):
        return [_map_paths(item, file) for item in value]
    return {key: _map_paths(item, file) for key, item in value.items()} if isinstance(value, dict) else value


def _absolute(path: str, file: Path) -> str:
    """Return a path that exists below the folder of the file as an absolute one, any other as it is.

    Raises:
        UserError: The path exists below the working directory too, where lm-eval itself looks for it.
    """
    folder = file.resolve().parent
    if "://" in path or Path(path).is_absolute() or not _exists(folder, path):
        return path
    if _exists(Path(), path) and Path.cwd() != folder:
        raise UserError(
            f"{file} reads {path}, which is both in its folder and in the working directory: write an absolute path"
        )
    return str(folder / path)


def _exists(folder: Path, path: str) -> bool:
    return any(folder.glob(path)) if glob.has_magic(path) else (folder / path).exists()
