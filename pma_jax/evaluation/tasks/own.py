"""The tasks that ship with the package, `pma:NAME`: questions about the held-out source of a run."""

from pma_jax.config.errors import UserError
from pma_jax.evaluation.tasks.held_out_source import HeldOutText
from pma_jax.evaluation.tasks.questions import bracket_questions, docstring_questions, last_line_questions
from pma_jax.evaluation.tasks.requests import Request

OWN_TASKS = {
    "brackets": bracket_questions,
    "docstring": docstring_questions,
    "last_line": last_line_questions,
}
VERSION = 1  # raise it with every change of the questions: scores of different versions are not comparable
MAX_DOCUMENTS = 2000  # read, in the order of samples


def make_questions(name: str, text: HeldOutText) -> list[Request]:
    """Make the questions of the task `name` of `OWN_TASKS` from a part of the held-out text.

    Raises:
        UserError: The text has no Python source to ask about.
    """
    questions = OWN_TASKS[name](text.read(MAX_DOCUMENTS))
    if not questions:
        raise UserError(
            f"pma:{name}: the part {text.part!r} of the held-out text has no Python functions to ask about: leave the "
            "task out, or evaluate a run that was trained on Python source"
        )
    return [
        Request([question.prompt] * len(question.choices), question.choices, question.choices, question.answer)
        for question in questions
    ]
