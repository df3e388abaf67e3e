"""The shell commands that reproduce a report's runs."""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.runs.directory import Run

BASE = "demo"  # the shipped configuration that the training command starts from


def reproduction_commands(run: Run, forks: Sequence[Run], merges: Sequence[dict[str, Any]]) -> list[str]:
    """Return the `pma train`, `fork`, `sweep` and `report` commands, with every key that differs from their base."""
    origin = run.metadata.get("forked_from")
    if origin:
        parent = epath.Path(origin["path"]).name
        commands = [f"# {run.path.name} is itself a fork of {parent} at {origin['tokens']} tokens"]
    else:
        base = configuration.resolve(configuration.load(BASE))
        commands = [_command("train", "--config", BASE, "--workdir", _folder(run), *_overrides(base, run.config))]
    for fork in forks:
        at = fork.metadata["forked_from"]["tokens"]
        changed = _overrides(run.config, fork.config)
        commands.append(_command("fork", _folder(run), "--at-tokens", at, "--workdir", _folder(fork), *changed))
    for kind in dict.fromkeys(m["kind"] for m in merges):
        commands.append(_command("sweep", _folder(run), *_grid([m for m in merges if m["kind"] == kind])))
    return [*commands, _command("report", _folder(run), *(_folder(fork) for fork in forks))]


def _grid(merges: Sequence[dict[str, Any]]) -> list[str]:
    # dict.fromkeys keeps each value once, in the order of the sweep.
    recipes, windows, intervals = (
        ",".join(dict.fromkeys(str(m[key]) for m in merges)) for key in ("recipe", "window", "interval")
    )
    words = ["--recipes", recipes, "--windows", windows]
    words += ["--intervals", intervals] if intervals != "1" else []
    return words + (["--kind", merges[0]["kind"]] if merges[0]["kind"] != "point" else [])


def _folder(run: Run) -> str:
    # The commands reproduce runs under runs/, so that a shared report does not show the owner's paths.
    return f"runs/{run.path.name}"


def _command(*words: object) -> str:
    return shlex.join(["pma", *(str(word) for word in words)])


def _overrides(old: Config, new: Config) -> list[str]:
    keys = [line.split(":")[0] for line in configuration.differences(old, new)]
    values = dataclasses.asdict(new)
    return [f"--config.{key}={_text(values[key.split('.')[0]][key.split('.')[1]])}" for key in keys]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
