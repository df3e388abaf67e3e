"""The `pma` command: run one verb, and report errors and signals as one line and an exit status.

Whatever takes long to import is imported in functions, so that `main` soon handles signals.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pma_jax.runtime import signals
from pma_jax.runtime.watchdog import end_process_soon

if TYPE_CHECKING:
    import argparse

CONFIG_PREFIX = "--config."
# What to print if a signal stops a verb. Verbs that are not listed write nothing before they finish.
STOPPED_MESSAGES = {
    "train": "the same command resumes from the last saved state",
    "fork": "the same command resumes from the last saved state",
    "grid": "the states of the runs are saved; the same command continues",
    "merge": "nothing was published; the same command resumes the merge",
    "sweep": "what sweep.json has stays; the same command continues",
    "watch": "the same command continues after the last preview",
    "report": "each file that was written is complete; the same command writes the rest",
}
_OUTPUT_CLOSED = 128 + 13  # a shell's status of a command that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status.

    0: done. 1: failed, with one line on standard error. 75: the same, for a reason that may pass, such as a lost
    connection: try again. 2: called wrongly. 130 and 143: stopped by SIGINT (Ctrl-C) or SIGTERM, with one line about
    what was kept. 141: the reader of the output has closed it. A bug raises its exception.

    If the arguments are those of the process, SIGINT and SIGTERM end the process, from the first line on, and after an
    error it ends within seconds, even if threads of libraries wait forever. If they are other ones, as in a notebook,
    the caller's handlers of signals stay.

    Args:
        arguments: The words after `pma`; by default those of the process.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    is_process = arguments is None or argv == sys.argv[1:] != []
    if is_process:
        signals.end_process_on_signals(lambda: f"stopped: {_stopped_message(argv)}")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a path may not be text in the terminal's encoding
    status = 1
    try:
        status = _run_and_report(argv)
    finally:
        if is_process and status:
            end_process_soon(status)
            _discard_unwritable_output()
    if is_process:
        signals.finish(status)
    return status


def _stopped_message(argv: Sequence[str]) -> str:
    if "--distributed" in argv:
        return "the other processes stop too; the same command in all of them continues"
    return STOPPED_MESSAGES.get(argv[0] if argv else "", "nothing was written")


def _parse(argv: Sequence[str]) -> "argparse.Namespace | int":
    """Return the parsed options, or the exit status of `--help` or of a wrong call, which is reported."""
    from pma_jax.cli.arguments import parser
    from pma_jax.cli.launch_options import split_command
    from pma_jax.storage.paths import is_utf8

    argv, command = split_command(list(argv))
    overrides = [word.removeprefix(CONFIG_PREFIX) for word in argv if word.startswith(CONFIG_PREFIX)]
    if any("\0" in word for word in argv):
        _print_error("an argument contains a NUL character: remove it")
        return 2
    if word := next((word for word in argv if not is_utf8(word)), None):
        _print_error(f"the argument {word!r} is not UTF-8 text: rename the file, or write it otherwise")
        return 2
    try:
        options = parser().parse_args([word for word in argv if not word.startswith(CONFIG_PREFIX)])
    except SystemExit as usage:  # argparse has printed the help or the error
        return usage.code if isinstance(usage.code, int) else 0
    if overrides and not options.takes_config:
        _print_error(f"`pma {options.verb}` does not accept --config.SECTION.KEY=VALUE")
        return 2
    keys = [assignment.partition("=")[0] for assignment in overrides]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        _print_error(f"{CONFIG_PREFIX}{repeated} is given twice; keep one")
        return 2
    options.overrides, options.argv = overrides, list(argv)
    return options if options.verb != "launch" else _parse_launched(options, command)


def _parse_launched(options: "argparse.Namespace", command: list[str]) -> "argparse.Namespace | int":
    """Parse the command that `pma launch` is to run, so that a mistake in it is found here."""
    from pma_jax.cli.launch_options import find_misuse

    if not command:
        _print_error("pma launch runs a command on other machines: give it after --, such as -- train --config …")
        return 2
    if message := find_misuse(options):
        _print_error(f"{message}; see `pma launch --help`")
        return 2
    launched = _parse(command)
    if isinstance(launched, int):
        return launched
    if launched.verb in ("grid", "launch"):
        _print_error(f"pma launch runs one command, and `pma {launched.verb}` starts others: run it here")
        return 2
    options.command, options.command_options = command, launched
    return options


def _run(argv: Sequence[str]) -> int:
    """Parse the arguments, run the verb and flush the output; return the exit status."""
    options = _parse(argv)
    if not isinstance(options, int):
        _silence_libraries()
        with _process_setup(options):
            options.function(options)
    if sys.stdout is not None:
        sys.stdout.flush()
    return options if isinstance(options, int) else 0


def _run_and_report(argv: Sequence[str]) -> int:
    """Return the exit status; print an error that the user can mend, and raise any other."""
    try:
        return _run(argv)
    except KeyboardInterrupt as interrupt:
        _print_line(str(interrupt) or f"stopped: {_stopped_message(argv)}")
        return getattr(interrupt, "status", 130)
    except Exception as error:
        from pma_jax.config.errors import mendable_line
        from pma_jax.runtime.failures import exit_status

        signals.wait_if_ending()
        if isinstance(error, BrokenPipeError) and _discard_closed_outputs():
            return _OUTPUT_CLOSED
        line = mendable_line(error)
        if line is None:
            raise
        if "--debug" in argv or os.environ.get("PMA_DEBUG", "0") not in ("", "0"):
            import traceback

            traceback.print_exception(error)
        _print_error(line)
        return exit_status(error)


def _print_error(line: str) -> None:
    _print_line(f"error: {line}")


def _print_line(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _discard_unwritable_output() -> None:
    """Discard what standard output holds if it cannot be written: at exit, the interpreter would change the status."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _discard_closed_outputs() -> bool:
    """Return whether the reader of standard output or standard error has closed it, and discard what is written to it.

    Otherwise the interpreter would report an error at exit.
    """
    import select

    closed = []
    for stream in filter(None, (sys.stdout, sys.stderr)):
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            closed.append(stream)
    for stream in closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return bool(closed)


@contextlib.contextmanager
def _process_setup(options: "argparse.Namespace") -> Iterator[None]:
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        hosts.initialize_distributed(options.heartbeat_seconds)
        if options.verb not in ("train", "fork"):
            signals.install_again()  # of SIGTERM, for which JAX installs its own, and which only training polls
        yield


def _silence_libraries() -> None:
    """Keep the logs of libraries out of the terminal: `main` prints each error as one line."""
    import logging

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # absl: Orbax logs a failed write four times, with the traceback of every thread. asyncio and `hook`: a
    # failed read leaves other reads pending in Orbax's event loop, or ends their coroutines with errors.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        is_of_orbax = code is not None and f"{os.sep}orbax{os.sep}" in code.co_filename
        if not is_of_orbax and "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = hook
