"""Formatting of exceptions."""


def error_line(error: BaseException) -> str:
    """Format an exception as one line: its message with whitespace collapsed, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
