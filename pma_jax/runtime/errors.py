"""What a person is told of an error: one line."""


def error_line(error: BaseException) -> str:
    """What `error` says, its line ends and runs of blanks as one blank each; its kind, where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
