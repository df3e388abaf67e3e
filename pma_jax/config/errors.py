"""The errors that `pma` reports as one line, and the formatting of exceptions.

A `UserError` is something that the user can mend: bad input, a missing file, a damaged checkpoint. Any other exception
is a bug of pma_jax and keeps its traceback. Library calls that raise ValueError for bad input are wrapped where they
are made, so that the message can say which input was wrong and what to do.
"""


class UserError(ValueError):
    """A problem that the user can solve. The message is one line: what is wrong, then what to do."""


def error_line(error: BaseException) -> str:
    """Format an exception as one line: its message with whitespace collapsed, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Format an exception as the first line of its message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
