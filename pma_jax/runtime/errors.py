"""Formatting of exceptions."""


def error_line(error: BaseException) -> str:
    """Format an exception as one line: its message with whitespace collapsed, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Format an exception as the first line of its message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
