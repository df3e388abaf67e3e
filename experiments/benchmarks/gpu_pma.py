"""The part `pma` of `gpu.py`: merged previews of a model that is too large to train on a CPU."""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import shutil
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_parts import make_config

TEXT_BYTES = 96_000_000


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the part trains."""

    config: str
    model: tuple[str, ...]  # overrides of the model
    sequences: int  # per step
    length: int  # tokens per sequence
    steps: int
    interval_steps: int  # between snapshots
    evaluation_tokens: int  # per snapshot, held out
    seeds: int  # runs, each with its own initial weights and order of the data


def pma(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Train at a constant rate on the sources of installed packages, preview merges, and anneal a branch, per seed.

    Returns:
        The text's digest, the losses of each seed, and means over the seeds with their 95% intervals.
    """
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder, "text.jsonl"))
        seeds = [train_and_anneal(setting, args, folder, seed) for seed in range(setting.seeds)]
    return text | average_over_seeds(seeds) | {"seeds": seeds}


def train_and_anneal(setting: Setting, args: argparse.Namespace, folder: str, seed: int) -> dict[str, Any]:
    """Train one run with previews, and a branch of it whose rate decays linearly to zero over the last eighth.

    Returns:
        Losses on held-out documents in nats per byte, and the speed of training.
    """
    from pma_jax.training.fork import fork
    from pma_jax.training.loop import train

    batch, length = setting.sequences, setting.length
    step_tokens = batch * length
    total, interval, fork_at = (
        n * step_tokens for n in (setting.steps, setting.interval_steps, setting.steps * 7 // 8)
    )
    keys = {
        "data.source": "files",
        "data.files": f"{folder}/*.jsonl",
        "data.held_out_percent": 3,
        "data.cache_dir": f"{folder}/cache",
        "training.seed": seed,
        "training.total_tokens": total,
        "training.log_interval_tokens": interval,
        "schedule.peak_rate": 1e-3,
        "schedule.warmup_tokens": total // 20,
        "checkpoint.kinds": "point",
        "checkpoint.interval_tokens": interval,
        "checkpoint.window": 10,
        "checkpoint.keep_windows": 1,
        "checkpoint.archive_interval_tokens": 0,
        "checkpoint.state_interval_tokens": 10**15,
        "checkpoint.keep_states_at_tokens": fork_at,
        "evaluation.tokens": setting.evaluation_tokens,
        "preview.windows": "4,10",
        "preview.start_tokens": total // 2,
        "runtime.compile_cache_dir": f"{folder}/compiled",
    }
    changes = [*(f"model.{key}" for key in setting.model), *(f"{key}={value}" for key, value in keys.items())]
    config = make_config(setting.config, batch, length, args, *changes)
    trunk, branch = Path(folder, f"trunk{seed}"), Path(folder, f"annealed{seed}")
    started = time.monotonic()
    run = train(config, str(trunk))
    trained = time.monotonic() - started
    decay = ("schedule.decay=linear", f"schedule.decay_start_tokens={fork_at}")
    annealing = make_config(setting.config, batch, length, args, *changes, *decay, "preview.windows=")
    fork(run, fork_at, annealing, str(branch))
    annealed = last_losses(train(annealing, str(branch)).metrics)
    figures = {"training_seconds": trained} | summarize(run.metrics, annealed)
    for path in (trunk, branch):
        shutil.rmtree(path)
    return figures


def average_over_seeds(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over seeds, the differences of merged from raw and annealed, and the counts of marks."""
    from pma_jax.studies.statistics import mean_interval, paired_difference

    losses = {name: [seed[name] for seed in seeds] for name in ("raw", "merged", "annealed")}
    means = {name: statistics.fmean(values) for name, values in losses.items()}
    means["tokens_per_second"] = statistics.fmean(seed["tokens_per_second"] for seed in seeds)
    intervals = {name: dataclasses.asdict(mean_interval(values)) for name, values in losses.items()}
    for first, second in (("merged", "raw"), ("merged", "annealed")):
        difference = paired_difference(losses[first], losses[second])
        means[f"{first}_minus_{second}"] = difference.mean
        intervals[f"{first}_minus_{second}"] = dataclasses.asdict(difference)
    counts = {name: sum(seed[name] for seed in seeds) for name in ("marks_with_a_merge_below_raw", "marks")}
    return means | counts | {"intervals": intervals}


def write_text(path: Path) -> dict[str, Any]:
    """Write .py files of the installed packages to a JSONL file, and return their number, size and digest.

    Packages contain copies of each other's files: one of each is taken. The order is that of the digests of the files,
    which is random, and ends at `TEXT_BYTES`.
    """
    by_digest = {}
    for file in Path(sysconfig.get_path("purelib")).rglob("*.py"):
        content = file.read_bytes()
        by_digest[hashlib.sha256(content).hexdigest()] = content
    digest, documents, total = hashlib.sha256(), 0, 0
    with path.open("w") as lines:
        for key in sorted(by_digest):
            with contextlib.suppress(UnicodeDecodeError):
                lines.write(json.dumps({"text": by_digest[key].decode()}) + "\n")
                digest.update(key.encode())
                documents, total = documents + 1, total + len(by_digest[key])
            if total >= TEXT_BYTES:
                break
    return {"documents": documents, "text_bytes": total, "text_digest": digest.hexdigest()[:16]}


def last_losses(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the held-out losses at the last snapshot: that of the raw weights, and of each preview by its recipe."""
    last = max(r["tokens"] for r in records if r["kind"] == "evaluation")
    at_last = [r for r in records if r["tokens"] == last and r["kind"] in ("evaluation", "preview")]
    return {r.get("recipe", "raw"): r["loss"] for r in at_last}


def summarize(records: list[dict[str, Any]], annealed: dict[str, float]) -> dict[str, Any]:
    """Return the losses of raw, merged and annealed weights, and how often a merge was below the raw weights."""
    curve: dict[int, dict[str, float]] = {}
    for r in records:
        if r["kind"] in ("evaluation", "preview"):
            curve.setdefault(r["tokens"], {})[r.get("recipe", "raw")] = r["loss"]
    previewed = {tokens: losses for tokens, losses in curve.items() if len(losses) > 1}
    below = sum(min(losses, key=losses.__getitem__) != "raw" for losses in previewed.values())
    train = [r for r in records if r["kind"] == "train"]
    losses = last_losses(records)
    merged = min((name for name in losses if name != "raw"), key=losses.__getitem__)
    return {
        "tokens": train[-1]["tokens"],
        "tokens_per_second": (train[-1]["tokens"] - train[1]["tokens"]) / (train[-1]["seconds"] - train[1]["seconds"]),
        "raw": losses["raw"],
        "merged": losses[merged],
        "annealed": annealed["raw"],
        "marks_with_a_merge_below_raw": below,
        "marks": len(previewed),
        "recipe": merged,
        "curve": curve,
    }
