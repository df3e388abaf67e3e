"""The `pma` command: run one verb, and turn its errors and signals into one line and an exit status."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pma_jax.cli.arguments import parser
from pma_jax.runtime import signals
from pma_jax.runtime.errors import error_line

CONFIG_PREFIX = "--config."
# What a signal leaves behind; the verbs that are not listed write nothing before they finish.
STOPPED = {
    "train": "the same command resumes from the last saved state",
    "fork": "the same command resumes from the last saved state",
    "merge": "nothing was published; the same command resumes the merge",
    "sweep": "nothing of this grid was written",
    "watch": "the same command continues after the last preview",
    "report": "each file that was written is complete; the same command writes the rest",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status.

    0: done. 1: failed, with one line on standard error. 2: called wrongly. 130 and 143: stopped by SIGINT (Ctrl-C) or
    SIGTERM, with one line about what was kept.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    overrides = [word.removeprefix(CONFIG_PREFIX) for word in words if word.startswith(CONFIG_PREFIX)]
    options = parser().parse_args([word for word in words if not word.startswith(CONFIG_PREFIX)])
    if overrides and not options.takes_config:
        print(f"error: `pma {options.verb}` takes no --config.key=value: remove it", file=sys.stderr)
        return 2
    options.overrides, options.words = overrides, words
    _silence_libraries()
    try:
        with signals.catch_signals(raises_stopped=True), _distributed(options):
            options.function(options)
    except (ValueError, OSError) as error:
        print(f"error: {error_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(str(stop) or f"stopped: {STOPPED.get(options.verb, 'nothing was written')}", file=sys.stderr)
        return getattr(stop, "status", 130)
    return 0


@contextlib.contextmanager
def _distributed(options: argparse.Namespace) -> Iterator[None]:
    """With --distributed, join the other processes; on an error exit at once, because they may be waiting for this one.

    Training sets up the allocator first, which must happen before JAX starts threads.
    """
    if options.verb in ("train", "fork"):
        from pma_jax.runtime.allocator import keep_freed_memory

        keep_freed_memory()
    if not getattr(options, "distributed", False):
        yield
        return
    from pma_jax.runtime import hosts

    with hosts.exit_on_error():
        # JAX's collectives on CPU (gloo) log to file descriptor 1, which is for tables and JSON.
        sys.stdout = os.fdopen(os.dup(1), "w")
        with Path(os.devnull).open("w") as devnull:
            os.dup2(devnull.fileno(), 1)
        hosts.initialize_distributed(options.heartbeat_seconds)
        yield


def _silence_libraries() -> None:
    """Keep the libraries' own logs out of the terminal: errors reach `main` as exceptions, and it prints one line."""
    import logging

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # absl: Orbax logs a failed write four times, with the traceback of every thread. asyncio: a failed read leaves
    # other reads behind in Orbax's event loop.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = hook
