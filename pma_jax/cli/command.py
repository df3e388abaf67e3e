"""The `pma` command: run one verb, and report errors and signals as one line and an exit status."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pma_jax.cli.arguments import parser
from pma_jax.config.errors import error_line
from pma_jax.runtime import signals
from pma_jax.runtime.failures import exit_status
from pma_jax.runtime.watchdog import end_process_soon

CONFIG_PREFIX = "--config."
# What to print if a signal stops a verb. Verbs that are not listed write nothing before they finish.
STOPPED_MESSAGES = {
    "train": "the same command resumes from the last saved state",
    "fork": "the same command resumes from the last saved state",
    "merge": "nothing was published; the same command resumes the merge",
    "sweep": "no results of this sweep were written",
    "watch": "the same command continues after the last preview",
    "report": "each file that was written is complete; the same command writes the rest",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status; see `_run_verb`. Without arguments, run that of the process.

    After an error, the process then ends within seconds, even if threads of libraries wait forever.
    """
    status = 1
    try:
        status = _run_verb(list(sys.argv[1:] if arguments is None else arguments))
    finally:
        if arguments is None and status:
            sys.stdout.flush()
            end_process_soon(status)
    return status


def _run_verb(argv: list[str]) -> int:
    """Run one verb and return the exit status.

    0: done. 1: failed, with one line on standard error. 75: the same, for a reason that may pass, such as a lost
    connection: try again. 2: called wrongly. 130 and 143: stopped by SIGINT (Ctrl-C) or
    SIGTERM, with one line about what was kept.
    """
    overrides = [word.removeprefix(CONFIG_PREFIX) for word in argv if word.startswith(CONFIG_PREFIX)]
    options = parser().parse_args([word for word in argv if not word.startswith(CONFIG_PREFIX)])
    if overrides and not options.takes_config:
        print(f"error: `pma {options.verb}` does not accept --config.SECTION.KEY=VALUE", file=sys.stderr)
        return 2
    keys = [assignment.partition("=")[0] for assignment in overrides]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        print(f"error: {CONFIG_PREFIX}{repeated} is given twice; keep one", file=sys.stderr)
        return 2
    options.overrides, options.argv = overrides, argv
    _silence_libraries()
    try:
        with signals.catch_signals(raises_stopped=True), _process_setup(options):
            options.function(options)
    except (ValueError, OSError) as error:
        print(f"error: {error_line(error)}", file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt as interrupt:
        print(
            str(interrupt) or f"stopped: {STOPPED_MESSAGES.get(options.verb, 'nothing was written')}", file=sys.stderr
        )
        return getattr(interrupt, "status", 130)
    return 0


@contextlib.contextmanager
def _process_setup(options: argparse.Namespace) -> Iterator[None]:
    """Set up the allocator and, with --distributed, `jax.distributed`, for the block in which the verb runs.

    The allocator is set up for `train` and `fork` only, before JAX starts threads. With --distributed, an error in the
    block exits the process immediately, because the other processes may be waiting for it in a collective.
    """
    if options.verb in ("train", "fork"):
        from pma_jax.runtime.allocator import keep_freed_memory

        keep_freed_memory()
    if not getattr(options, "distributed", False):
        yield
        return
    from pma_jax.runtime import hosts

    with hosts.exit_on_error():
        # JAX's collectives on CPU (gloo) log to file descriptor 1. Discard what is written to it, and print tables and
        # JSON through a copy.
        sys.stdout = os.fdopen(os.dup(1), "w")
        with Path(os.devnull).open("w") as devnull:
            os.dup2(devnull.fileno(), 1)
        hosts.initialize_distributed(options.heartbeat_seconds)
        yield


def _silence_libraries() -> None:
    """Keep the logs of libraries out of the terminal: `main` prints each error as one line."""
    import logging

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # absl: Orbax logs a failed write four times, with the traceback of every thread. asyncio and `hook`: a
    # failed read leaves other reads pending in Orbax's event loop.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = hook
