"""`pma evaluate` without --tasks: from the options to held-out losses, and losses as text."""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pma_jax.evaluation.targets import evaluate_targets
from pma_jax.runtime import hosts
from pma_jax.runtime.formatting import format_difference, format_loss, format_text
from pma_jax.runtime.progress import show_progress

NUMBERS = ("loss", "standard_error", "perplexity", "bits_per_byte")


def evaluate(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluate the targets that the options name."""
    with show_progress("models", is_shown=hosts.is_first_process()) as progress:
        return evaluate_targets(options.target, options.overrides, options.part, progress)


def table(rows: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Return the rows of a table: one per target."""
    compared = ["minus the first"] if len(rows) > 1 else []
    header = ["target", "tokens", "loss", *compared, "perplexity", "bits/byte", "held-out text"]
    cells = [
        [
            r["target"],
            "-" if r["tokens"] is None else f"{r['tokens']:,}",
            format_loss(r),
            *(["-" if r is rows[0] else format_difference(r)] if compared else []),
            f"{r['perplexity']:.3f}",
            f"{r['bits_per_byte']:.4f}",
            format_text(r["held_out"]),
        ]
        for r in rows
    ]
    return [header, *cells]


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a target, None if they are not finite, and the digest of the text."""
    values = {name: row[name] for name in NUMBERS if row[name] is not None}
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return finite | {"held_out": row["held_out"]["digest"]}


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on what makes the losses unreliable."""
    return [note for row in rows for note in row["notes"]]
