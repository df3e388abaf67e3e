"""Multiple-choice questions about Python source: a function's last line, its documentation string, closing brackets.

The questions depend only on the documents, on every machine and in every version of Python that reads them alike: what
is drawn is drawn by SHA-256. They are ordered so that every prefix is spread over the documents, and each position
among the four is right equally often.

A prompt and its longest answer are at most `SHORT_BYTES` UTF-8 bytes together, the sequence length of the default
configuration; of `pma:last_line` at most `LONG_BYTES`, because few functions are as short. Prompts do not end in white
space, which tokenizers and harnesses treat in different ways.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from pma_jax.evaluation.tasks.python_source import find_closing_brackets, find_functions

SHORT_BYTES, LONG_BYTES = 128, 256
MAX_QUESTIONS = 500
MAX_PER_DOCUMENT = 16
CHOICES = 4
_LINE_CHARACTERS = (8, 80)  # of an answer that is a line: least and most
_SUMMARY_CHARACTERS = (12, 90)
_MAX_PER_BRACKETS = MAX_QUESTIONS // 6  # "))" alone would be more than half of all


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and the texts of which one continues it."""

    prompt: str
    choices: tuple[str, ...]
    answer: int  # index of the right one


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A prompt and its answer, before wrong answers are chosen."""

    prompt: str
    answer: str
    kind: str = ""  # answers of the same kind are preferred as wrong ones
    before: str = ""  # precedes every choice
    after: str = ""  # follows every choice
    most_bytes: int = SHORT_BYTES  # of the prompt and a choice

    def fits(self, least: int, most: int) -> bool:
        """Return whether the answer has that many characters and is short enough with its prompt."""
        text = self.prompt + self.before + self.answer + self.after
        return least <= len(self.answer) <= most and len(text.encode()) <= self.most_bytes


def last_line_questions(documents: Iterable[str]) -> list[Question]:
    """Ask for the last line of a function. Wrong answers are last lines of other functions, of similar length.

    They have the indentation of the right one, and begin with the same keyword where enough lines do.
    """

    def find(text: str) -> Iterator[_Candidate]:
        for function in find_functions(text):
            keyword = function.last_line.split(" ")[0] if function.last_line.startswith(("return ", "raise ")) else ""
            indentation = f"\n{function.indentation}"
            candidate = _Candidate(function.head, function.last_line, keyword, indentation, "\n", LONG_BYTES)
            if "\n" in function.head and candidate.fits(*_LINE_CHARACTERS):
                yield candidate

    found = _gather(documents, find)
    return _ask(found, _similar_answers(found))


def docstring_questions(documents: Iterable[str]) -> list[Question]:
    """Ask for the first line of the documentation string that follows a signature.

    Wrong answers are those of other functions, of similar length.
    """

    def find(text: str) -> Iterator[_Candidate]:
        for function in find_functions(text):
            candidate = _Candidate(f'{function.signature}\n    """', function.summary)
            if function.signature and candidate.fits(*_SUMMARY_CHARACTERS):
                yield candidate

    found = _gather(documents, find)
    return _ask(found, _similar_answers(found))


def bracket_questions(documents: Iterable[str]) -> list[Question]:
    """Ask which closing brackets stand side by side after source with open ones.

    The prompt begins at the outermost open bracket's line, or with as many lines before it as fit. No bracket sequence
    answers more than a sixth of `MAX_QUESTIONS`, and wrong answers are the most frequent ones of the same length, so
    that a model which only knows the frequencies gains little.
    """
    found = _gather(documents, _find_brackets)
    counts = Counter(candidate.answer for candidates in found for candidate in candidates)

    @functools.cache
    def most_frequent(length: int) -> list[str]:
        all_brackets = map("".join, itertools.product(")]}", repeat=length))
        return sorted(all_brackets, key=lambda brackets: (-counts[brackets], brackets))

    def choose(candidate: _Candidate) -> list[str]:
        return [brackets for brackets in most_frequent(len(candidate.answer)) if brackets != candidate.answer]

    return _ask(found, choose, most_per_answer=_MAX_PER_BRACKETS)


def _find_brackets(text: str) -> Iterator[_Candidate]:
    for closing in find_closing_brackets(text):
        prompt = closing.before
        for line in reversed(closing.preceding.splitlines(keepends=True)):
            if len((line + prompt + closing.brackets).encode()) > SHORT_BYTES:
                break
            prompt = line + prompt
        candidate = _Candidate(prompt, closing.brackets)
        if prompt == prompt.rstrip() and candidate.fits(2, 3):
            yield candidate


def _gather(documents: Iterable[str], find: Callable[[str], Iterator[_Candidate]]) -> list[list[_Candidate]]:
    """Return the candidates of each document, at most `MAX_PER_DOCUMENT` of each, drawn by their hashes."""
    seen: set[tuple[str, str]] = set()
    found = []
    for text in documents:
        new = {(candidate.prompt, candidate.answer): candidate for candidate in find(text)}
        chosen = sorted(new.keys() - seen, key=lambda key: _hash("draw", *key))[:MAX_PER_DOCUMENT]
        seen.update(chosen)
        found.append([new[key] for key in chosen])
    return found


def _similar_answers(found: Sequence[Sequence[_Candidate]]) -> Callable[[_Candidate], list[str]]:
    """Return a function that orders all answers from the best wrong one of a candidate to the worst."""
    kinds = {candidate.answer: candidate.kind for candidates in found for candidate in candidates}
    # Functions may share a prompt: then the answers of all of them are right.
    right = {(candidate.prompt, candidate.answer) for candidates in found for candidate in candidates}

    def choose(candidate: _Candidate) -> list[str]:
        def unlikeness(answer: str) -> tuple[bool, int, int]:
            difference = abs(len(answer) - len(candidate.answer))
            return kinds[answer] != candidate.kind, difference // 4, _hash("wrong", candidate.prompt, answer)

        return sorted((answer for answer in kinds if (candidate.prompt, answer) not in right), key=unlikeness)

    return choose


def _ask(
    found: Sequence[Sequence[_Candidate]],
    choose: Callable[[_Candidate], list[str]],
    most_per_answer: int = MAX_QUESTIONS,
) -> list[Question]:
    """Turn candidates into at most `MAX_QUESTIONS` questions: the first of each document, then the second of each."""
    questions: list[Question] = []
    asked: Counter[str] = Counter()
    rounds = [[candidates[k] for candidates in found if k < len(candidates)] for k in range(MAX_PER_DOCUMENT)]
    for candidate in (candidate for candidates in rounds for candidate in candidates):
        wrong = [answer for answer in choose(candidate) if _fits_prompt(candidate, answer)][: CHOICES - 1]
        if len(wrong) < CHOICES - 1 or asked[candidate.answer] == most_per_answer or len(questions) == MAX_QUESTIONS:
            continue
        asked[candidate.answer] += 1
        position = _position(len(questions))
        answers = [*wrong[:position], candidate.answer, *wrong[position:]]
        choices = tuple(f"{candidate.before}{answer}{candidate.after}" for answer in answers)
        questions.append(Question(candidate.prompt, choices, position))
    return questions


def _fits_prompt(candidate: _Candidate, answer: str) -> bool:
    return dataclasses.replace(candidate, answer=answer).fits(1, LONG_BYTES)


def _position(index: int) -> int:
    """Return the position of the right answer of a question: each once in every four questions."""
    block, place = divmod(index, CHOICES)
    return sorted(range(CHOICES), key=lambda position: _hash("position", str(block), str(position)))[place]


def _hash(*parts: str) -> int:
    """Return 64 bits of the SHA-256 of texts."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode()
        hasher.update(len(data).to_bytes(8, "big") + data)
    return int.from_bytes(hasher.digest()[:8], "big")
