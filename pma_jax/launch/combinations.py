"""The runs of a grid: every combination of the values of some configuration keys, named by its overrides.

    schedule.peak_rate=0.001,training.seed=0      the directory of a run, below the root of the grid
    pma-peak-rate-0-001-seed-0-1b2c3d4e5f         the name of its job in a scheduler

The name of a run depends on its own overrides only, sorted by key and with values as the configuration converts them.
So `--vary training.seed=0,1` and a later `--vary training.seed=0,1,2` share runs, and so do
`1e-3` and `0.001`.
"""

import dataclasses
import hashlib
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.config.errors import UserError, error_line, shorten
from pma_jax.merging.listing import is_run_directory
from pma_jax.storage.json_files import read_json
from pma_jax.storage.paths import absolute_path, as_path, exists, is_bucket, read_file

MAX_RUNS = 10_000
# What engines and `pma report ROOT` write into the root of a grid.
ROOT_FILES = ("slurm", "report.json", "report.png", "report.html")
_MAX_NAME_CHARACTERS = 120
_MAX_FILE_BYTES = 2**20
_RUN_NAME = re.compile(r"[a-z_]+\.[a-z0-9_]+=")
Overrides = Mapping[str, str]  # values by key, as texts that the configuration parses


@dataclasses.dataclass(frozen=True)
class GridRun:
    """One run of a grid."""

    name: str
    path: epath.Path
    varied: Overrides  # the overrides that differ between runs
    overrides: tuple[str, ...]  # all, as section.key=value
    config: Config

    @property
    def job_name(self) -> str:
        """The name of the run's job in a scheduler: at most 40 characters, a label of DNS (RFC 1123)."""
        words = [f"{key.partition('.')[2]}-{value}" for key, value in self.varied.items()]
        text = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")[:25].strip("-")
        return f"pma-{text}-{hashlib.sha256(str(self.path).encode()).hexdigest()[:10]}"


def split_values(text: str) -> tuple[str, list[str]]:
    """Split KEY=A,B into the key and the texts of its values; a value that is a list is in brackets: KEY=(3,6),(10).

    Raises:
        UserError: There is no key, no value, or an empty one.
    """
    key, equals, rest = text.partition("=")
    if not (key and equals):
        raise UserError(f"{shorten(text)} is not KEY=A,B: write a configuration key and its values")
    values, depth = [""], 0
    for character in rest:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    if not all(value.strip() for value in values):
        raise UserError(f"{key} has no value, or an empty one, in {shorten(text)}: write {key}=A,B")
    return key, [value.strip() for value in values]


def read_overrides_file(path: str) -> list[dict[str, str]]:
    """Read a file with one combination per line, `KEY=VALUE KEY=VALUE`; `#` begins a comment.

    Raises:
        UserError: The file is absent or empty, or a line is something else.
    """
    try:
        lines = read_file(as_path(path), _MAX_FILE_BYTES).decode().splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text: write lines of KEY=VALUE KEY=VALUE") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{path}: line {number}: {error_line(error)}: correct the quotes") from None
        pairs = [(key, value) for key, equals, value in (word.partition("=") for word in words) if equals and value]
        if len(pairs) < len(words):
            raise UserError(f"{path}: line {number} is not KEY=VALUE KEY=VALUE: correct it")
        if len(dict(pairs)) < len(pairs):
            raise UserError(f"{path}: line {number} gives a key twice; keep one")
        if pairs:
            rows.append(dict(pairs))
    if not rows:
        raise UserError(f"{path} has no combination: write lines of KEY=VALUE KEY=VALUE")
    return rows


def combine(vary: Sequence[str], zipped: Sequence[str], rows: Sequence[Overrides] = ()) -> list[dict[str, str]]:
    """Return every combination: of each `vary` (KEY=A,B), of the values of all `zipped` side by side, and of `rows`.

    Values are converted as the configuration does, so that equal ones are equal texts; keys are sorted.

    Raises:
        UserError: Nothing varies, a key is unknown or given twice, a value is invalid, lists that are zipped differ in
            length, or two combinations are equal.
    """
    axes = [[{key: value} for value in values] for key, values in map(split_values, vary)]
    if zipped:
        columns = [split_values(text) for text in zipped]
        lengths = {key: len(values) for key, values in columns}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{key} has {count}" for key, count in lengths.items())
            raise UserError(f"--zip needs as many values of each key: {sizes}")
        keys = [key for key, _ in columns]
        _reject_repeated(keys)
        axes.append([dict(zip(keys, row, strict=True)) for row in zip(*(v for _, v in columns), strict=True)])
    axes += [[dict(row) for row in rows]] if rows else []
    if not axes:
        raise UserError("nothing varies: give --vary KEY=A,B, --zip KEY=A,B or --overrides-file FILE")
    _reject_repeated([key for axis in axes for key in dict.fromkeys(k for row in axis for k in row)])
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MAX_RUNS:
        raise UserError(f"the grid has {count:,} runs, more than {MAX_RUNS:,}: vary less")
    return [
        _convert({key: value for part in parts for key, value in part.items()}) for parts in itertools.product(*axes)
    ]


def make_runs(
    config_name: str, root: epath.PathLike, combinations: Iterable[Overrides], common: Sequence[str] = ()
) -> list[GridRun]:
    """Resolve the configuration of every combination, and check the root and the runs that it has.

    Args:
        config_name: A configuration file, or the name of a shipped one.
        root: The directory of the grid.
        combinations: The overrides of each run.
        common: Overrides of all runs, as section.key=value.

    Raises:
        UserError: A configuration is not valid, two runs have the same name, or the root holds something else.
    """
    raw, folder = configuration.load(config_name), absolute_path(root)
    common_keys = {text.partition("=")[0] for text in common}
    runs: dict[str, GridRun] = {}
    for varied in combinations:
        if repeated := common_keys & varied.keys():
            raise UserError(f"{min(repeated)} is given twice: it varies, and --config.{min(repeated)} fixes it")
        name = run_name(varied)
        if name in runs:
            raise UserError(f"two runs would be named {name}: give each combination once")
        overrides = (*common, *(f"{key}={value}" for key, value in varied.items()))
        try:
            config = configuration.resolve(raw, overrides)
        except UserError as error:
            raise UserError(f"{name}: {error_line(error)}") from None
        runs[name] = GridRun(name, folder / name, varied, overrides, config)
    check_root(folder)
    for run in runs.values():
        _check_existing(run)
    return list(runs.values())


def run_name(varied: Overrides) -> str:
    """Return the name of a run: its overrides, safe on disks and in buckets; with a digest if that needed changes."""
    exact = ",".join(f"{key}={value}" for key, value in sorted(varied.items()))
    name = ",".join(f"{key}={value.replace(',', '-')}" for key, value in sorted(varied.items()))
    safe = re.sub(r"[^A-Za-z0-9._=,+-]", "_", name)
    if safe == name and len(name) <= _MAX_NAME_CHARACTERS:
        return name
    return f"{safe[: _MAX_NAME_CHARACTERS - 9]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def check_root(root: epath.Path) -> None:
    """Raise UserError if the root of a grid is a run, a file, or holds what no grid has written."""
    if not exists(root):
        return
    if not is_bucket(root) and not root.is_dir():
        raise UserError(f"--root {root} is a file: give a directory")
    if is_run_directory(as_path(root)):
        raise UserError(f"--root {root} is a run: give a directory of its own to the grid")
    for path in sorted(root.iterdir()):
        is_known = path.name in ROOT_FILES or path.name.startswith(".") or _RUN_NAME.match(path.name)
        if not is_known:
            raise UserError(f"--root {root} holds {path.name}, which no grid writes: give another directory")


def grid_name(root: epath.Path) -> str:
    """Return a name for all jobs of a grid in a scheduler: at most 40 characters, a label of DNS (RFC 1123)."""
    text = re.sub(r"[^a-z0-9]+", "-", root.name.lower()).strip("-")[:25].strip("-")
    return f"pma-{text}-{hashlib.sha256(str(root).encode()).hexdigest()[:10]}"


def _convert(varied: Overrides) -> dict[str, str]:
    """Return values as the configuration converts them, sorted by key."""
    converted = {}
    for key, text in sorted(varied.items()):
        section, _, name = key.partition(".")
        values: dict[str, dict[str, Any]] = {section: {}}
        configuration.override(values, [f"{key}={text}"])
        converted[key] = _format_value(values[section][name])
    return converted


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) or "()" if isinstance(value, tuple) else str(value)


def _reject_repeated(keys: Sequence[str]) -> None:
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(f"{repeated} varies twice; keep one")


def _check_existing(run: GridRun) -> None:
    """Raise UserError if there is a run of the same name with another configuration."""
    if not is_run_directory(as_path(run.path)):
        return
    stored = read_json(as_path(run.path / "config.json"), dict[str, dict[str, Any]])
    old = configuration.resolve_stored(stored, run.path / "config.json")
    if changed := configuration.differences_affecting_results(old, run.config):
        raise UserError(
            f"{run.path} holds a run with another configuration ({'; '.join(changed)}): give another --root, or the "
            "configuration that it was started with"
        )
