"""The commands that make a report's runs again, as text to paste into a shell."""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.runs.directory import Run

BASE = "demo"  # the shipped configuration that the training command starts from


def reproduction(run: Run, forks: Sequence[Run], merges: Sequence[dict[str, Any]]) -> list[str]:
    """`pma train`, `fork`, `sweep` and `report`, with every key that differs from where each starts."""
    origin = run.metadata.get("forked_from")
    if origin:
        parent = epath.Path(origin["path"]).name
        commands = [f"# {run.path.name} was itself forked from {parent} at {origin['tokens']} tokens"]
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
    # dict.fromkeys: each once, in the order of the sweep.
    recipes, windows, intervals = (
        ",".join(dict.fromkeys(str(m[key]) for m in merges)) for key in ("recipe", "window", "interval")
    )
    words = ["--recipes", recipes, "--windows", windows]
    words += ["--intervals", intervals] if intervals != "1" else []
    return words + (["--kind", merges[0]["kind"]] if merges[0]["kind"] != "point" else [])


def _folder(run: Run) -> str:
    # Where the run lies is its owner's business; the commands make it again under runs/.
    return f"runs/{run.path.name}"


def _command(*words: object) -> str:
    return shlex.join(["pma", *(str(word) for word in words)])


def _overrides(old: Config, new: Config) -> list[str]:
    keys = [line.split(":")[0] for line in configuration.differences(old, new)]
    values = dataclasses.asdict(new)
    return [f"--config.{key}={_text(values[key.split('.')[0]][key.split('.')[1]])}" for key in keys]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
