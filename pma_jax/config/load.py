"""Reading a configuration: files, overrides, checks, its JSON and its digest.

A configuration is a file with `get_config() -> ml_collections.ConfigDict`, which starts from `defaults()` and changes
fields, or the name of a shipped one (`demo`). Overrides such as `--config.checkpoint.interval_tokens=4e6` are applied
to that dictionary; `resolve` turns it into the frozen, validated `Config` that the rest of the package reads.
"""

import ast
import dataclasses
import difflib
import hashlib
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_collections

from pma_jax.config.rules import validate
from pma_jax.config.schema import Config


def defaults() -> ml_collections.ConfigDict:
    """The default of every key as a `ConfigDict`: where a configuration file starts. Unknown keys raise."""
    return _to_config_dict(Config())


def resolve(raw: ml_collections.ConfigDict | Mapping[str, Any]) -> Config:
    """Check `raw` and freeze it. Raises ValueError that names the key and what it should be."""
    mapping = raw.to_dict() if isinstance(raw, ml_collections.ConfigDict) else raw
    default = Config()
    valid = dataclasses.asdict(default)
    _refuse_unknown("", mapping, valid)
    sections = {}
    for name, keys in valid.items():
        section = mapping.get(name, {})
        _refuse_unknown(f"{name}.", section, keys)
        values = {key: _as_type(f"{name}.{key}", value, keys[key]) for key, value in section.items()}
        sections[name] = dataclasses.replace(getattr(default, name), **values)
    config = Config(**sections)
    validate(config)
    return config


def load(name: str) -> ml_collections.ConfigDict:
    """Call `get_config()` of a file, or of a shipped configuration by name.

    Raises ValueError when there is no such file, or it does not define `get_config`.
    """
    path = _find(name)
    spec = importlib.util.spec_from_file_location("pma_jax_user_config", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file: a configuration is a .py with get_config()")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} does not run: {type(error).__name__}: {error}") from error
    if not hasattr(module, "get_config"):
        raise ValueError(f"{path} has no get_config(): define one that returns a ConfigDict")
    try:
        raw = module.get_config()
    except Exception as error:
        raise ValueError(f"get_config() of {path} failed: {type(error).__name__}: {error}") from error
    if not isinstance(raw, ml_collections.ConfigDict):
        raise ValueError(f"get_config() of {path} returned {type(raw).__name__}, not a ConfigDict")
    return raw


def override(raw: ml_collections.ConfigDict, assignments: Iterable[str]) -> None:
    """Apply `section.key=value` texts to `raw` in place.

    Values are read as the key's own type: `4e6` is an integer for an integer key, `3,6` a tuple for a tuple key. Raises
    ValueError that names the nearest valid key, or the type that was expected.
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        section, dot, key = path.partition(".")
        if not equals:
            raise ValueError(f"override {assignment!r} has no value: write --config.{path}=VALUE")
        if not dot or section not in raw or key not in raw[section]:
            valid = [f"{s}.{k}" for s in raw for k in raw[s]]
            raise ValueError(f"unknown config key {path!r}{_nearest(path, valid)}")
        default = dataclasses.asdict(Config())[section][key]
        raw[section][key] = _as_type(path, _parse(text, default), default)


def to_json(config: Config) -> str:
    """The resolved configuration as canonical JSON: sorted keys, one line a key."""
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> Config:
    """The inverse of `to_json`."""
    return resolve(json.loads(text))


def digest(config: Config) -> str:
    """SHA-256 (16 hex digits) of what decides the run's numbers: all but where it runs."""
    return hashlib.sha256(json.dumps(_identity(config), sort_keys=True).encode()).hexdigest()[:16]


def differences(old: Config, new: Config) -> list[str]:
    """`section.key: old -> new` for every key that decides the run's numbers and differs."""
    a, b = _identity(old), _identity(new)
    return [
        f"{section}.{key}: {a[section][key]} -> {b[section][key]}"
        for section in a
        for key in a[section]
        if a[section][key] != b[section][key]
    ]


def _identity(config: Config) -> dict[str, dict[str, Any]]:
    identity: dict[str, dict[str, Any]] = dataclasses.asdict(config)
    # The mesh and the cache say where a run lives; the run may move.
    del identity["mesh"]
    del identity["data"]["cache_dir"]
    return identity


def _to_config_dict(config: Config) -> ml_collections.ConfigDict:
    raw = ml_collections.ConfigDict(dataclasses.asdict(config))
    return raw.lock()


def _find(name: str) -> Path:
    path = Path(name)
    if path.suffix == ".py" or path.is_file():  # a folder of that name, such as a run's, is not meant
        if path.is_file():
            return path
        raise ValueError(f"no configuration file {name}: check the path, or name a shipped one")
    package = Path(__file__).parents[1]
    # A wheel carries configs/ inside the package; in a clone it stands beside the package.
    folders = [package / "shipped_configs", package.parent / "configs"]
    shipped = {file.stem: file for folder in folders for file in folder.glob("[a-z]*.py")}
    if name not in shipped:
        raise ValueError(f"no configuration {name!r}: give a .py file or one of {sorted(shipped)}")
    return shipped[name]


def _nearest(key: str, valid: Iterable[str]) -> str:
    return f": did you mean {difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]!r}?"


def _refuse_unknown(prefix: str, given: Mapping[str, Any], valid: Mapping[str, Any]) -> None:
    for key in given:
        if key not in valid:
            raise ValueError(f"unknown config key {prefix + key!r}{_nearest(key, list(valid))}")


def _parse(text: str, default: Any) -> Any:
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower(), text)
    if isinstance(default, tuple):
        text = text.strip().strip("()[]").strip(",")
        return tuple(_literal(item.strip()) for item in text.split(",")) if text else ()
    return _literal(text)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _as_type(key: str, value: Any, default: Any) -> Any:
    """`value` as the type of `default`, or ValueError; a whole float such as 4e6 is an integer."""
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
    elif isinstance(default, int):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and math.isfinite(value) and value == math.floor(value):
            return int(value)
    elif isinstance(default, float):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif isinstance(default, tuple):
        if isinstance(value, tuple | list):
            item = "" if key in ("data.files", "checkpoint.kinds") else 0
            return tuple(_as_type(key, v, item) for v in value)
    elif isinstance(value, str):
        return value
    raise ValueError(f"config key {key!r} takes {_kind(default)}, not {value!r}")


def _kind(default: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(type(default), "a list such as 3,6,10")
