"""A loss or a gradient that is not finite ends the run before it can reach a snapshot."""

import math
from typing import Any

from pma_jax.runs import integrity


def check_record(record: dict[str, Any], numbers: dict[str, float], params: Any) -> None:
    """Check what a step measured; `params` are the weights now, up to a step later.

    Raises ValueError that names the step, the numbers and the leaves that are not finite.
    """
    bad = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if not bad:
        return
    leaves = integrity.non_finite_leaves(params)
    where = f"; of the weights {len(leaves)} leaves are not finite: {', '.join(leaves[:10])}" if leaves else ""
    raise ValueError(
        f"step {record['step']:,} ({record['tokens']:,} tokens): {', '.join(bad)}{where}. Nothing of it was saved. The "
        "same command would come here again: `pma fork` from an earlier state with a lower schedule.peak_rate or "
        "optimizer.clip_norm"
    )


def check_loss(loss: float, what: str, step: int, tokens: int) -> None:
    """Raise ValueError when a held-out loss is not finite: its snapshot would say so in every merge."""
    if not math.isfinite(loss):
        raise ValueError(
            f"step {step:,} ({tokens:,} tokens): the held-out loss of the {what} is {loss}; it is not saved"
        )
