"""Load configurations from files, JSON and overrides, and compare them.

A configuration file is a Python file that defines `get_config() -> ml_collections.ConfigDict`, which modifies
`defaults()`. Shipped files are given by name (`demo`). `resolve` applies overrides such as
`checkpoint.interval_tokens=4e6` and returns the frozen, validated `Config` that the rest of the package reads.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import re
import signal
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from pma_jax.config.errors import UserError, error_line, shorten
from pma_jax.config.rules import validate
from pma_jax.config.schema import Config

if TYPE_CHECKING:
    import ml_collections  # imported when first used, because it takes longer than the rest of a merge's imports

_TYPES = {section: get_type_hints(section_type) for section, section_type in get_type_hints(Config).items()}
MAX_CONFIG_BYTES = 2**20  # of a configuration file
_SHOWN_CHARACTERS = 100
# Sections and keys that do not affect the results of a run: they may change when it is resumed, on another machine.
_WITHOUT_EFFECT: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("mesh", "runtime", "tracking")),
    "data": ("cache_dir",),
    "training": ("profile_at_tokens",),
}
_NOT_DECIMAL = re.compile(r"[^\s\d_+-]")
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def defaults() -> "ml_collections.ConfigDict":
    """Return the default of every key as a locked `ConfigDict`, in which assigning an unknown key raises."""
    import ml_collections

    return ml_collections.ConfigDict(dataclasses.asdict(Config())).lock()


def resolve(raw: "ml_collections.ConfigDict | Mapping[str, Any] | Config", overrides: Iterable[str] = ()) -> Config:
    """Return a validated, frozen configuration. Missing keys get their defaults.

    Args:
        raw: Keys and their values, by section.
        overrides: `section.key=value` texts, which take precedence over `raw`.

    Raises:
        UserError: A key is unknown or has an invalid value; the message names the key and what it accepts.
    """
    if isinstance(raw, Config):
        raw = dataclasses.asdict(raw)
    mapping: Any = raw.to_dict() if hasattr(raw, "to_dict") else raw
    if not isinstance(mapping, Mapping):
        raise UserError(f"a configuration is a mapping of sections, not {type(mapping).__name__}")
    _reject_unknown_keys("", mapping, _TYPES)
    values = {}
    for section, hints in _TYPES.items():
        given = mapping.get(section, {})
        if not isinstance(given, Mapping):
            raise UserError(f"config section {section!r} takes its keys and their values, not {shorten(given)}")
        _reject_unknown_keys(f"{section}.", given, hints)
        values[section] = {key: _convert(f"{section}.{key}", value, hints[key]) for key, value in given.items()}
    override(values, overrides)
    default = Config()
    config = Config(**{name: dataclasses.replace(getattr(default, name), **keys) for name, keys in values.items()})
    validate(config)
    return config


def resolve_stored(raw: Mapping[str, Any], file: object) -> Config:
    """Return the configuration that a run or a snapshot stores; see `resolve`.

    Raises:
        UserError: It is not valid; the message begins with `file`.
    """
    try:
        return resolve(raw)
    except UserError as error:
        raise UserError(f"{file}: its configuration cannot be read: {error}") from None


def override(raw: "ml_collections.ConfigDict | dict[str, dict[str, Any]]", assignments: Iterable[str]) -> None:
    """Apply `section.key=value` overrides to `raw` in place.

    Each value is parsed as the type of its field: `4e6` is an integer for an integer field, `3,6` a tuple for a tuple.

    Raises:
        UserError: A key is unknown (the message names the nearest one), or a value has the wrong type.
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        section, _, key = path.partition(".")
        if not equals:
            raise UserError(
                f"override {shorten(assignment)} has no value: write --config.{path[:_SHOWN_CHARACTERS]}=VALUE"
            )
        if key not in _TYPES.get(section, ()):
            valid = [f"{section}.{key}" for section in _TYPES for key in _TYPES[section]]
            raise UserError(f"unknown config key {shorten(path)}{_nearest(path[:_SHOWN_CHARACTERS], valid)}")
        hint = _TYPES[section][key]
        raw[section][key] = _convert(path, _parse(text, hint), hint)


def load(name: str) -> "ml_collections.ConfigDict":
    """Load a configuration file, and return the result of its `get_config()`.

    Args:
        name: Path of the file, or name of a shipped one.

    Raises:
        UserError: There is no such file, or its `get_config` is missing, fails, or does not return a ConfigDict.
    """
    import ml_collections

    path = _find_file(name)
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise UserError(f"{path} has more than {MAX_CONFIG_BYTES:,} bytes: a configuration is a .py with get_config()")
    module = types.ModuleType("pma_jax_user_config")
    module.__file__ = str(path)
    with _report_failure(f"{path} does not run"):
        # Not importlib, which would write a __pycache__ beside the user's file.
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    if not hasattr(module, "get_config"):
        raise UserError(f"{path} has no get_config(): define one that returns a ConfigDict")
    with _report_failure(f"get_config() of {path} failed"):
        raw = module.get_config()
    if not isinstance(raw, ml_collections.ConfigDict):
        raise UserError(f"get_config() of {path} returned {type(raw).__name__}, not a ConfigDict")
    return raw


@contextlib.contextmanager
def _report_failure(what: str) -> Iterator[None]:
    """Convert whatever a configuration file raises to a UserError; it must not end the process, or print to a table."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        # With Python's own handler, it may be Ctrl-C in a notebook.
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        raise UserError(f"{what}: {type(error).__name__}: {error_line(error)}") from error


def to_json(config: Config) -> str:
    """Format a configuration as canonical JSON: sorted keys, one per line."""
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> Config:
    """Parse the output of `to_json`."""
    return resolve(json.loads(text))


def digest(config: Config) -> str:
    """Compute the SHA-256 (first 16 hex digits) of all keys that affect the results of a run.

    Keys of options that are off are left out, so that runs from before an option existed are still found.
    """
    sections = _sections_affecting_results(config)
    for key in config.optimizer.unused_keys:
        del sections["optimizer"][key]
    if config.replicas.method == "none":
        del sections["replicas"]
    elif not config.replicas.count:  # the mesh determines the number of workers
        sections["replicas"]["mesh_replica"] = config.mesh.replica
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def differences_affecting_results(old: Config, new: Config) -> list[str]:
    """List `section.key: old -> new` for each key that differs and affects the results of a run."""
    a, b = _sections_affecting_results(old), _sections_affecting_results(new)
    return [
        f"{section}.{key}: {a[section][key]} -> {b[section][key]}"
        for section in a
        for key in a[section]
        if a[section][key] != b[section][key]
    ]


def _sections_affecting_results(config: Config) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = dataclasses.asdict(config)
    for section, keys in _WITHOUT_EFFECT.items():
        if keys is None:
            del sections[section]
        else:
            sections[section] = {key: value for key, value in sections[section].items() if key not in keys}
    return sections


def _find_file(name: str) -> Path:
    path = Path(name)
    # A file takes precedence over a shipped name. A directory, such as a run with that name, does not.
    if path.suffix == ".py" or path.is_file():
        if path.is_file():
            return path
        raise UserError(f"no configuration file {name}: check the path, or give the name of a shipped one")
    package = Path(__file__).parents[1]
    # A wheel contains configs/ inside the package; a clone has it beside the package.
    folders = [package / "shipped_configs", package.parent / "configs"]
    shipped = {file.stem: file for folder in folders for file in folder.glob("[a-z]*.py")}
    if name not in shipped:
        raise UserError(f"no configuration {name!r}: give a .py file or one of {sorted(shipped)}")
    return shipped[name]


def _nearest(key: str, valid: Iterable[str]) -> str:
    return f": did you mean {difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]!r}?"


def _reject_unknown_keys(prefix: str, given: Mapping[str, Any], valid: Mapping[str, Any]) -> None:
    for key in map(str, given):
        if key not in valid:
            raise UserError(f"unknown config key {shorten(prefix + key)}{_nearest(key[:_SHOWN_CHARACTERS], valid)}")


def _parse(text: str, hint: Any) -> Any:
    """Parse the value of an override; text that cannot be parsed is returned as it is, and `_convert` then raises."""
    if hint is str or get_origin(hint) is Literal:
        return text
    if hint is bool:
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower(), text)
    if get_origin(hint) is tuple:
        items = text.strip().strip("()[]").strip(",")
        return tuple(_parse(item.strip(), get_args(hint)[0]) for item in items.split(",")) if items else ()
    try:
        return float(text) if hint is float or _NOT_DECIMAL.search(text) else int(text)
    except ValueError:
        return text


def _convert(key: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type of its field; an integral float such as 4e6 becomes an int."""
    if get_origin(hint) is tuple and isinstance(value, tuple | list):
        return tuple(_convert(key, item, get_args(hint)[0]) for item in value)
    hint = str if get_origin(hint) is Literal else hint
    is_bool = isinstance(value, bool)
    if hint is float and isinstance(value, int | float) and not is_bool:
        with contextlib.suppress(OverflowError):
            return float(value) + 0.0  # -0.0 becomes 0.0, so that equal configurations have equal digests
    if hint is int and not is_bool and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint in _TYPE_NAMES and isinstance(value, hint) and is_bool == (hint is bool):
        return value
    raise UserError(f"config key {key!r} takes {_TYPE_NAMES.get(hint, 'a list such as 3,6,10')}, not {shorten(value)}")
