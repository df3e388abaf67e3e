"""JAX's persistent compilation cache, in a directory on a disk or in a bucket."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from pma_jax.config.errors import UserError, error_line
from pma_jax.storage.paths import absolute_path, check_supported


@contextlib.contextmanager
def compile_cache(directory: str) -> Iterator[None]:
    """Load programs from `directory` that an earlier process has compiled, and add those that it lacks.

    Programs are found by what they compute, the compiler and the devices, so that runs may share a directory. Small
    programs are added too: a process that finds all its programs compiles nothing. With several processes, process 0
    writes, and all read.

    Args:
        directory: Local path or address in a bucket; empty: JAX's own settings apply.

    Raises:
        UserError: The directory cannot be created.
    """
    if not directory:
        yield
        return
    path = absolute_path(directory)
    try:
        check_supported(path)
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, UserError) as error:
        raise UserError(f"runtime.compile_cache_dir {directory}: {error_line(error)}") from error
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": str(path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    try:
        _apply(settings)
        yield
    finally:
        _apply(before)


def _apply(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX opens the directory once, when it first compiles
