"""Questions about Python source: right answers against Python's own parser, and what all of them must hold."""

import ast
import functools
import inspect
import json
import textwrap
from collections import Counter

import pytest

from pma_jax.evaluation.tasks.python_source import find_closing_brackets, find_functions
from pma_jax.evaluation.tasks.questions import (
    CHOICES,
    LONG_BYTES,
    MAX_PER_DOCUMENT,
    MAX_QUESTIONS,
    SHORT_BYTES,
    bracket_questions,
    docstring_questions,
    last_line_questions,
)

MAKERS = [last_line_questions, docstring_questions, bracket_questions]
DOCUMENTS = [inspect.getsource(module) for module in (ast, inspect, json.decoder, json.encoder, textwrap, functools)]
PAIRS = {"(": ")", "[": "]", "{": "}"}


@functools.cache
def _functions(document):
    """Return the dedented source of each function, by another route than the package's: the positions of `ast`.

    Comments after its last line's code are cut off.
    """
    nodes = [node for node in ast.walk(ast.parse(document)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines, sources = document.splitlines(keepends=True), []
    for node in nodes:
        *before, last = lines[node.lineno - 1 : node.end_lineno]
        sources.append(textwrap.dedent("".join([*before, last.encode()[: node.end_col_offset].decode()])))
    return sources


@functools.cache
def _unparsed(document):
    """Return the functions without comments and blank lines."""
    return {_without_comments(source) for source in _functions(document)}


@functools.cache
def _without_comments(source):
    return ast.unparse(ast.parse(source))


def _head_and_summary(source):
    """Return the lines of a function before its body, and the first line of its documentation string."""
    function = ast.parse(source).body[0]
    docstring = ast.get_docstring(function) or ""
    head = "\n".join(source.split("\n")[function.lineno - 1 : function.body[0].lineno - 1])
    return head, docstring.strip().split("\n")[0].strip()


@pytest.fixture(scope="module", params=MAKERS, ids=lambda maker: maker.__name__)
def made(request):
    return request.param, request.param(DOCUMENTS)


def test_questions_have_four_different_choices_a_short_prompt_and_balanced_answers(made):
    make, questions = made
    limit = LONG_BYTES if make is last_line_questions else SHORT_BYTES
    assert len(questions) > 20
    for question in questions:
        assert len(set(question.choices)) == CHOICES
        assert max(len((question.prompt + choice).encode()) for choice in question.choices) <= limit
        assert question.prompt == question.prompt.rstrip()
    counts = Counter(question.answer for question in questions)
    assert max(counts.values()) - min(counts[position] for position in range(CHOICES)) <= 1
    for start in range(0, len(questions) - CHOICES, CHOICES):
        assert {question.answer for question in questions[start : start + CHOICES]} == set(range(CHOICES))


def test_questions_are_the_same_every_time_and_none_is_asked_twice(made):
    make, questions = made
    assert make(DOCUMENTS) == questions
    assert len({(question.prompt, question.choices[question.answer]) for question in questions}) == len(questions)


@pytest.mark.slow
def test_every_prefix_of_the_questions_is_spread_over_the_documents(made):
    make, questions = made
    origins = [
        [index for index, document in enumerate(DOCUMENTS) if _belongs(make, question, document)]
        for question in questions
    ]
    assert all(origins)
    with_questions = {index for found in origins for index in found}
    first = {index for found in origins[: len(with_questions)] for index in found}
    assert first == with_questions
    assert max(Counter(found[0] for found in origins).values()) <= MAX_PER_DOCUMENT


def _belongs(make, question, document):
    gold = question.choices[question.answer]
    if make is bracket_questions:
        return question.prompt + gold in document
    if make is last_line_questions:
        return _without_comments(question.prompt + gold) in _unparsed(document)
    return (question.prompt.removesuffix('\n    """'), gold) in map(_head_and_summary, _functions(document))


def test_last_lines_complete_functions_and_have_one_indentation():
    for question in last_line_questions(DOCUMENTS):
        assert any(_belongs(last_line_questions, question, document) for document in DOCUMENTS)
        assert len({len(choice) - len(choice.lstrip()) for choice in question.choices}) == 1


def test_one_docstring_is_that_of_a_function_with_the_signature():
    known = {pair for document in DOCUMENTS for pair in map(_head_and_summary, _functions(document))}
    for question in docstring_questions(DOCUMENTS):
        signature = question.prompt.removesuffix('\n    """')
        right = [(signature, choice) in known for choice in question.choices]
        assert right == [position == question.answer for position in range(CHOICES)]


def test_functions_that_share_a_prompt_are_not_asked_for_each_others_answers():
    documents = [
        f'def close(self):\n    """Close number {d}, and free it."""\n\n\n'
        f'def open_{d}(self):\n    """Open number {d}, now."""\n'
        for d in range(9)
    ]
    for question in docstring_questions(documents):
        assert sum(choice.startswith("Close") for choice in question.choices) <= 1


def test_only_the_right_brackets_close_the_open_ones():
    source = "\n".join(
        f"value_{i} = f({i}, [a_{i}, (b, c{j}" + c for i in range(9) for j, c in enumerate([")])", ")])"])
    )
    source += "".join(
        f"\nx{i} = g({{1: h[{i}]}})\ny{i} = g(h[{i}])\nz{i} = g(h({i}))\nw{i} = k[h[{i}]]" for i in range(9)
    )
    questions = bracket_questions([source])
    assert {question.choices[question.answer] for question in questions} >= {"])", "))", "]]"}
    for question in questions:
        assert {choice for choice in question.choices if _closes(question.prompt, choice)} == {
            question.choices[question.answer]
        }


def _closes(prompt, brackets):
    """Follow brackets by hand: the source of this test has none in strings or comments."""
    expected = []
    for character in prompt + brackets:
        if character in PAIRS:
            expected.append(PAIRS[character])
        elif character in PAIRS.values() and (not expected or expected.pop() != character):
            return False
    return True


def test_no_brackets_are_the_answer_of_more_than_a_sixth_of_the_most_questions():
    source = "\n".join(f"print(str({i}))" for i in range(40))
    documents = [source.replace("print", f"print_{k}") + f"\nf([{k}])\nf(({k},), [{k}])\n" for k in range(60)]
    documents = [f"{text}\nf({{{k}: [{k}]}})\nf[[{k}]]\nf[g({k})]\n" for k, text in enumerate(documents)]
    questions = bracket_questions(documents)
    counts = Counter(question.choices[question.answer] for question in questions)
    assert counts["))"] == MAX_QUESTIONS // 6
    assert len(questions) <= MAX_QUESTIONS


def test_at_most_500_questions():
    documents = [
        "\n\n".join(f"def name_{d}_{i}(argument):\n    first = {d}\n    return first + a{i}{d}" for i in range(16))
        for d in range(40)
    ]
    assert len(last_line_questions(documents)) == MAX_QUESTIONS


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("text", ["", "no Python: (", "x = 1\n", "\0", "def f(:\n  pass", "'''"])
def test_text_without_python_asks_nothing(make, text):
    assert make([text]) == []


def test_brackets_in_strings_comments_and_formatted_strings_are_not_counted():
    source = 'f("((")  # ((\ng(f"{h(1)}", "]", [2])\n'
    assert [found.brackets for found in find_closing_brackets(source)] == ["])"]


def test_functions_that_share_a_line_with_others_and_compound_last_statements():
    source = (
        "def one(): return 1\n\ndef two():\n    if x:\n        return 2; y = 3\n\ndef three():\n    a = (1,\n      2)\n"
    )
    assert [(found.signature, found.last_line) for found in find_functions(source)] == [
        ("def two():", ""),
        ("def three():", ""),
    ]
