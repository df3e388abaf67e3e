"""A run's loss spikes, for its report: those that passed, and those from which the run went back."""

import math
from typing import Any

from pma_jax.runs.directory import Run, read_records
from pma_jax.training import recovery

SHOWN = ("onset_tokens", "tokens", "verdict", "loss", "peak_loss", "median_loss", "spread_nats")


def rows(run: Run) -> list[dict[str, Any]]:
    """One row a spike, by where it began: what was seen, and `went_back`, None or what was done about it.

    `went_back` has the recipe, the number of snapshots, the tokens to which the run went back, what became of the
    optimizer, whether data was passed over, the attempt, and the held-out losses that were set aside.
    """
    told = [{key: r[key] for key in SHOWN} | {"went_back": None} for r in run.metrics if r["kind"] == "spike"]
    for event in recovery.events(run):
        records = read_records(run.path / recovery.FOLDER / str(event["number"]) / "metrics.jsonl")
        went_back = {
            "tokens": event["tokens"],
            "recipe": event["recipe"],
            "snapshots": len(event["merged"]),
            "optimizer": event["optimizer"],
            "passes_over_data": event["position"] != event["position_there"],
            "attempt": event["attempt"],
            "set_aside": [
                [r["tokens"], r["loss"]] for r in records if r["kind"] == "evaluation" and math.isfinite(r["loss"])
            ],
        }
        told.append({key: event["spike"][key] for key in SHOWN} | {"went_back": went_back})
    return sorted(told, key=lambda row: (row["onset_tokens"], row["tokens"]))
