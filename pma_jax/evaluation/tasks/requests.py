"""The requests of a document of a task."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Request:
    """One pair of context and continuation for each choice of a document."""

    contexts: Sequence[str]
    continuations: Sequence[str]
    choices: Sequence[
        str
    ]  # the continuations without what separates them from the context: `acc_norm` divides by these
    answer: int  # index of the gold choice
    source: str = ""  # what the document is called where it comes from
