"""Experiment trackers with the calls `init`, `log` and `finish`: wandb and trackio, which get what TensorBoard gets."""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from pma_jax.config import Config
from pma_jax.config.errors import UserError, error_line
from pma_jax.runs.directory import Run
from pma_jax.storage import atomic
from pma_jax.storage.json_files import read_json
from pma_jax.storage.paths import as_path, exists, is_bucket


def check_installed(config: Config) -> None:
    """Raise UserError if the library of `tracking.name` is not installed."""
    name = config.tracking.name
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"tracking.name={name} needs the library {name}: pip install 'pma-jax[{name}]'")


def is_tracked(run: Run) -> bool:
    """Return whether `tracking.name` has tracked the run before."""
    return run.config.tracking.name in _read_names(run)


def _read_names(run: Run) -> dict[str, str]:
    path = run.path / "tracking.json"
    return read_json(as_path(path), dict[str, str]) if exists(path) else {}


class Tracker:
    """One run of a tracker. A resumed run continues it, by its name, which is also its id, in RUN/tracking.json.

    The x axis of all metrics is the number of tokens trained on.

    Raises:
        UserError: The library refuses to start.
    """

    def __init__(self, run: Run):
        settings, names = run.config.tracking, _read_names(run)
        if settings.name not in names:
            names[settings.name] = f"{run.path.name}-{secrets.token_hex(4)}"
            atomic.write_text(run.path / "tracking.json", json.dumps(names) + "\n")
        identity = names[settings.name]
        self._name, self._library = settings.name, importlib.import_module(settings.name)
        arguments: dict[str, Any] = {"config": dataclasses.asdict(run.config), "resume": "allow"}
        if settings.name == "wandb":
            arguments |= {"id": identity} | ({} if is_bucket(run.path) else {"dir": str(run.path)})
        # Standard output is for results.
        with contextlib.redirect_stdout(sys.stderr):
            try:
                self._library.init(project=settings.project, name=identity, **arguments)
            except Exception as error:  # each library has classes of its own
                raise UserError(f"tracking.name={settings.name}: it does not start: {error_line(error)}") from error
        if settings.name == "wandb":
            self._library.define_metric("*", step_metric="tokens")

    def log(self, scalars: Mapping[str, float], tokens: int) -> None:
        """Log values by tag."""
        if self._name == "wandb":  # steps of its own may not decrease, as they do after a rollback
            self._library.log({**scalars, "tokens": tokens})
        else:
            self._library.log(dict(scalars), step=tokens)

    def finish(self) -> None:
        """Send what is not sent yet."""
        with contextlib.redirect_stdout(sys.stderr):
            self._library.finish()
