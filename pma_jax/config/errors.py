"""The errors that `pma` reports as one line, and the formatting of exceptions.

A `UserError` is something that the user can mend: bad input, a missing file, a damaged checkpoint. Any other exception
is a bug of pma_jax and keeps its traceback. Library calls that raise ValueError for bad input are wrapped where they
are made, so that the message can say which input was wrong and what to do.

Stored data that cannot be read are one of two things. `DamageError` says that the data themselves are wrong: absent,
unparsable, or different from their digest; resuming sets such data aside. `StorageError` says that reading or writing
failed, which tells nothing about the data: nothing is moved or removed. `runtime/failures.py` tells the two apart.
"""

_MAX_LINE = 2000  # characters
_SHOWN_CHARACTERS = 100


class UserError(ValueError):
    """A problem that the user can solve. The message is one line: what is wrong, then what to do."""


class TemporaryError(UserError):
    """A problem of other processes or machines: the same command may succeed later."""


class DamageError(UserError):
    """Stored data are absent, cannot be parsed, or differ from their digest."""


class DivergenceError(UserError):
    """Training diverged, and training again diverges again.

    A metric, a parameter or a held-out loss is not finite, or a loss spike outlasts all rollbacks.
    """


class StorageError(OSError):
    """Reading or writing failed for a reason that says nothing about the stored data, such as too many open files.

    Args:
        message: One line.
        is_temporary: Whether the same command may succeed later.
    """

    def __init__(self, message: str, is_temporary: bool = False):
        super().__init__(message)
        self.is_temporary = is_temporary


def mendable_line(error: BaseException) -> str | None:
    """Return the one line that `pma` prints for an error that the user can mend, or None if the error is a bug.

    Besides `UserError`, these are errors of the operating system, which name the user's paths, and a lack of memory on
    the host or on a device.
    """
    if isinstance(error, UserError | OSError):
        return error_line(error)
    if isinstance(error, MemoryError):
        return f"out of memory ({error_line(error)}): use smaller batches or limits, or a machine with more memory"
    if isinstance(error, RecursionError):
        return f"a file of the input is nested too deeply ({error_line(error)}): replace it"
    if type(error).__name__ == "JaxRuntimeError" and str(error).startswith("RESOURCE_EXHAUSTED"):
        return f"out of memory on a device ({first_line(error)[:300]}): use smaller batches, or shard over more devices"
    return None


def shorten(value: object) -> str:
    """Format a value of a user for a message, in about 100 characters."""
    # An integer of thousands of digits cannot be formatted.
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length():,} bits"
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def error_line(error: BaseException) -> str:
    """Format an exception as one printable line: its message with whitespace collapsed, or its type if it has none."""
    line = " ".join(str(error).split()) or type(error).__name__
    line = line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def first_line(error: BaseException) -> str:
    """Format an exception as the first line of its message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
