"""Bits per byte of the gold answer: what moves for small models before accuracy does."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class GoldBits:
    """The bits per byte of a task's gold answers."""

    bits_per_byte: float
    standard_error: float | None  # over documents; None for a single document
    documents: int
    left_out: int  # documents whose gold answer is empty or is none of their choices


def measure_gold_bits(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], tasks: Mapping[str, Any]
) -> dict[str, GoldBits]:
    """Compute the bits per byte of the gold answers of each task.

    Args:
        samples: `samples` of the results of `lm_eval.evaluator.evaluate(..., log_samples=True)`, by task.
        tasks: The tasks by name (`load_tasks(...)["tasks"]`).

    Returns:
        By task, without those that generate text, whose answers have no likelihood.
    """
    raise NotImplementedError
