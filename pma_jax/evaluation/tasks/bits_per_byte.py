"""Bits per byte of the gold answer: what moves for small models before accuracy does.

It is -log2 of the probability that the model gives to the gold continuation, divided by the continuation's UTF-8 bytes,
averaged over documents. It needs nothing but the samples that lm-eval logs, so it is the same function for every model.

lm-eval's `TemplateLM` scores white space at the end of a context with the continuation (`_encode_pair`), so its bytes
count too. Tasks of type `loglikelihood_rolling` are left to lm-eval, which has their `bits_per_byte`; tasks that
generate text have no likelihoods.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SCORED_TYPES = ("multiple_choice", "loglikelihood")  # of tasks that have gold answers


@dataclasses.dataclass(frozen=True)
class DocumentBits:
    """The bits per byte of a document's answers."""

    gold: float | None  # None if the gold answer is empty, unknown, or none of the choices
    wrong: float | None  # mean over the other answers; None without any, or without a gold answer


@dataclasses.dataclass(frozen=True)
class GoldBits:
    """The bits per byte of a task's gold answers."""

    bits_per_byte: float | None  # mean over documents; None if all are left out
    standard_error: float | None  # over documents; None for fewer than two
    documents: int  # number of documents of the mean
    left_out: int  # number of documents whose gold answer is empty, unknown, or none of their choices


def measure_gold_bits(
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    tasks: Mapping[str, Any],
    groups: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, GoldBits]:
    """Compute the bits per byte of the gold answers of each task, and of groups over all documents of their tasks.

    If several answers are right, the one with the fewest bits per byte counts, as any of them counts for accuracy.

    Args:
        samples: `samples` of the results of `lm_eval.evaluator.evaluate(..., log_samples=True)`, by task.
        tasks: The tasks by name (`load_tasks(...)["tasks"]`).
        groups: The tasks of each group by name.

    Returns:
        By name, for tasks of the types `multiple_choice` and `loglikelihood` and groups that have only such tasks.
    """
    bits = {
        name: [document.gold for document in measure_document_bits(samples[name], tasks[name])]
        for name in samples
        if tasks[name].OUTPUT_TYPE in SCORED_TYPES
    }
    for group, members in (groups or {}).items():
        if members and all(member in bits for member in members):
            bits[group] = [value for member in members for value in bits[member]]
    return {name: _average(values) for name, values in bits.items()}


def measure_document_bits(samples: Sequence[Mapping[str, Any]], task: Any) -> list[DocumentBits]:
    """Compute the bits per byte of the answers of each document of a task of one of `SCORED_TYPES`.

    Args:
        samples: The samples of the task, as for `measure_gold_bits`.
        task: The task.
    """
    return [_document_bits(sample, task) for sample in _one_filter(samples)]


def _one_filter(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the samples of the first filter: lm-eval logs each document once for each filter of its task."""
    return [sample for sample in samples if sample["filter"] == samples[0]["filter"]]


def _average(bits_D: Sequence[float | None]) -> GoldBits:
    known_D = np.array([bits for bits in bits_D if bits is not None], np.float64)
    count = len(known_D)
    error = float(known_D.std(ddof=1) / math.sqrt(count)) if count > 1 else None
    return GoldBits(float(known_D.mean()) if count else None, error, count, len(bits_D) - count)


def _document_bits(sample: Mapping[str, Any], task: Any) -> DocumentBits:
    golds, count = _gold_indices(sample, task)
    bits = [_answer_bits(sample, index) for index in range(count)]
    gold = [value for index, value in enumerate(bits) if index in golds and value is not None]
    wrong = [value for index, value in enumerate(bits) if index not in golds and value is not None]
    return DocumentBits(min(gold, default=None), sum(wrong) / len(wrong) if gold and wrong else None)


def _answer_bits(sample: Mapping[str, Any], index: int) -> float | None:
    """Return the bits per byte of an answer, or None if it is empty."""
    context, continuation = sample["arguments"][index][:2]
    text = context[len(context.rstrip()) :] + continuation
    return -float(sample["filtered_resps"][index][0]) / (math.log(2) * len(text.encode())) if continuation else None


def _gold_indices(sample: Mapping[str, Any], task: Any) -> tuple[list[int], int]:
    """Return the indices of the gold answers among a document's requests, and the number of answers.

    They are those that lm-eval's `process_results` finds.
    """
    if task.OUTPUT_TYPE == "loglikelihood" and len(sample["arguments"]) == 1:
        return [0], 1
    gold, document = sample["target"], sample["doc"]
    if getattr(task, "multiple_input", 0):  # contexts differ, and the text says which is right
        choices, gold = task.doc_to_choice(document), task.doc_to_text(document)
    elif task.OUTPUT_TYPE == "multiple_choice":
        choices = task.doc_to_choice(document)
    else:  # lm-eval's class MultipleChoiceTask
        choices, gold = sample["arguments"], document.get("gold") if isinstance(document, Mapping) else None
    golds = gold if isinstance(gold, list) else [gold]
    golds = [choices.index(answer) if isinstance(answer, str) and answer in choices else answer for answer in golds]
    known = [int(index) for index in golds if isinstance(index, int | np.integer) and 0 <= index < len(choices)]
    return known, len(choices)
