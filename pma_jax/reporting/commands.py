"""The shell commands that reproduce a report and its runs."""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.runs.directory import Run

BASE_CONFIG = "demo"  # shipped configuration that the `pma train` command starts from


def reproduction_commands(run: Run, forks: Sequence[Run], merges: Sequence[dict[str, Any]]) -> list[str]:
    """Return the `pma train`, `fork`, `sweep` and `report` commands that reproduce a report and its runs.

    The `pma train` command overrides the keys in which the configuration of `run` differs from `BASE_CONFIG`. A
    `pma fork` command overrides those in which the configuration of the fork differs from that of `run`.
    """
    origin = run.metadata.get("forked_from")
    if origin:
        parent = epath.Path(origin["path"]).name
        commands = [f"# {run.path.name} is itself a fork of {parent} at {origin['tokens']} tokens"]
    else:
        base = configuration.resolve(configuration.load(BASE_CONFIG))
        commands = [_pma("train", "--config", BASE_CONFIG, "--workdir", _run_path(run), *_overrides(base, run.config))]
    for fork in forks:
        at = fork.start_tokens
        changed = _overrides(run.config, fork.config)
        commands.append(_pma("fork", _run_path(run), "--at-tokens", at, "--workdir", _run_path(fork), *changed))
    for kind in dict.fromkeys(m["kind"] for m in merges):
        commands.append(_pma("sweep", _run_path(run), *_grid_options([m for m in merges if m["kind"] == kind])))
    return [*commands, _pma("report", _run_path(run), *(_run_path(fork) for fork in forks))]


def _grid_options(merges: Sequence[dict[str, Any]]) -> list[str]:
    # dict.fromkeys removes duplicates and keeps the order of the sweep. Options with default values are omitted.
    recipes, windows, intervals = (
        ",".join(dict.fromkeys(str(m[key]) for m in merges)) for key in ("recipe", "window", "interval")
    )
    words = ["--recipes", recipes, "--windows", windows]
    words += ["--intervals", intervals] if intervals != "1" else []
    return words + (["--kind", merges[0]["kind"]] if merges[0]["kind"] != "point" else [])


def _run_path(run: Run) -> str:
    # Use runs/ in place of the directory of the run, so that a published report does not show local paths.
    return f"runs/{run.path.name}"


def _pma(*words: object) -> str:
    return shlex.join(["pma", *(str(word) for word in words)])


def _overrides(old: Config, new: Config) -> list[str]:
    keys = [line.split(":")[0] for line in configuration.differences_affecting_results(old, new)]
    values = dataclasses.asdict(new)
    return [f"--config.{key}={_format_value(values[key.split('.')[0]][key.split('.')[1]])}" for key in keys]


def _format_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
