"""Fixtures: run directories with metrics written by hand."""

import dataclasses
import json
import math

import pytest
from metrics_records import evaluation, preview

from pma_jax.config import Config, ScheduleConfig, TrainingConfig
from pma_jax.runs.directory import create_run

FACTS = {"corpus": "c0ffee", "evaluation": "e7a1", "versions": {"python": "3.11.9", "jax": "0.10.0"}}
HORIZON, FORK = 6_000_000, 4_800_000


@pytest.fixture
def make_run(tmp_path):
    """Return `make_run(name, records, sweep=..., decay=..., facts=...)`, which writes a run to a folder of its own."""

    def make(name, records, *, sweep=None, decay="none", facts=None, **data):
        schedule = ScheduleConfig(decay=decay, decay_start_tokens=FORK if decay != "none" else 0)
        config = Config(schedule=schedule, training=TrainingConfig(total_tokens=HORIZON))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, **data))
        run = create_run(tmp_path / name, config, FACTS | (facts or {}))
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        if sweep is not None:
            (run.path / "sweep.json").write_text(json.dumps(sweep))
        return run

    return make


@pytest.fixture
def forked():
    """Return the fork metadata of run.json."""
    return {"forked_from": {"path": "runs/demo", "tokens": FORK, "step": FORK // 2048}}


@pytest.fixture
def realistic(make_run, forked):
    """Return a run of 60 snapshots whose raw loss is 0.09 above its trend, and a fork that anneals this excess away."""

    def trend(t):
        return 0.95 + 0.45 / math.sqrt(t / 1e6)

    def noise(t):
        return 0.012 * math.sin(t / 53_000) + 0.006 * math.cos(t / 17_000)

    marks = [100_000 * k for k in range(1, 61)]
    records = []
    for k, t in enumerate(marks, start=1):
        records.append(evaluation(t, trend(t) + 0.092 + noise(t)))
        for n in (3, 6, 10, 15):
            if k >= n:
                old = sum(trend(marks[k - 1 - j]) for j in range(n)) / n
                records.append(preview(t, f"sma:{n}", old + 0.092 / n**0.8 + noise(t) / n))
    branch = [t for t in marks if t > FORK]
    decay = [evaluation(t, trend(t) + 0.092 * (1 - (t - FORK) / (HORIZON - FORK)) + noise(t) / 4) for t in branch]
    last = {r["recipe"]: r["loss"] for r in records if r["kind"] == "preview" and r["tokens"] == HORIZON}
    shifts = {"sma": 0.0, "ema:alpha=0.1": 0.004, "ema:alpha=0.2": 0.002, "wma": -0.003}
    rows = [
        {"recipe": r, "window": n, "text": f"{r}:{n}", "loss": last[f"sma:{n}"] + s * (n / 6)}
        for r, s in shifts.items()
        for n in (3, 6, 10, 15)
    ]
    raw = next(r["loss"] for r in records if r["kind"] == "evaluation" and r["tokens"] == HORIZON)
    run = make_run("demo", records, sweep={"tokens": HORIZON, "raw_loss": raw, "rows": rows})
    return run, make_run("demo-annealed", decay, decay="cosine", facts=forked)
