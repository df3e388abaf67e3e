"""The losses of a cache of runs, in one file that is small enough to be committed.

A study goes on from it on another machine, without the snapshots: a run whose losses are recorded is not trained again.
Numbers that an experiment read of the snapshots are recorded too. What it reads beyond, such as a merge that was not
evaluated, trains the run again.

The file is gzipped JSON lines, sorted by key, one `RecordedRun` per finished or diverged run. Losses are rounded to
`study.DECIMALS`. Paths in the cache, such as that of the run from which another was forked, are relative to it.

Command:   python -m pma_jax.studies.recorded_runs runs/science experiments/recorded_runs.jsonl.gz
           (adds the runs of the cache to the file; an experiment reads the file into its cache by itself)
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from etils import epath

from pma_jax.config.errors import UserError, error_line
from pma_jax.evaluation.trajectory import LOSSES_FILE_NAME, LossesByDigest
from pma_jax.runs.directory import RunMetadata
from pma_jax.storage import atomic
from pma_jax.storage.json_files import parse_json, read_json
from pma_jax.storage.paths import absolute_path
from pma_jax.studies import run_cache
from pma_jax.studies.estimate import PROBE_SEED
from pma_jax.studies.study import DECIMALS

MAX_BYTES = 2**30  # of the uncompressed file
CACHE = "CACHE/"  # stands at the beginning of a path in the cache
_KEY = re.compile(r"[0-9a-f]{16}")  # of an entry: it becomes the name of a folder


class RecordedRun(TypedDict):
    """One line of the file: the JSON files of a cache entry that experiments read of a finished run."""

    key: str  # of the cache entry
    config: dict[str, dict[str, Any]]
    metadata: RunMetadata
    trained: run_cache.Trained
    evaluated: dict[str, float]
    losses: LossesByDigest
    readings: NotRequired[run_cache.Readings]  # of runs whose snapshots an experiment reads


def add_to_file(cache: Path, path: Path) -> int:
    """Add the finished and diverged runs of a cache to the file; return the number of runs in it.

    A run that the file has already keeps the losses that it has there, and gets those that are new. If it was trained
    again on another machine, with slightly other weights, the losses of the two trainings are not mixed: the training
    with more of them is recorded. Runs that measure the speed of the machine (their seeds are `PROBE_SEED` or more)
    are left out.

    Raises:
        UserError: The directory has no cache entries, or the file is corrupt.
    """
    entries = [trained.parent for trained in sorted(cache.glob(f"*/{run_cache.TRAINED}"))]
    if not entries:
        raise UserError(f"no runs in {cache}: give the directory that was the --runs of an experiment")
    recorded = {run["key"]: run for run in read_file(path)} if path.exists() else {}
    for run in filter(None, map(_record, entries)):
        known = recorded.get(run["key"], run)
        recorded[run["key"]] = (
            _join(run, known) if _is_one_training(run, known) else max(known, run, key=_count_results)
        )
    lines = [json.dumps(recorded[key], sort_keys=True) + "\n" for key in sorted(recorded)]
    atomic.write_bytes(epath.Path(path), gzip.compress("".join(lines).encode(), mtime=0))
    return len(lines)


def _is_one_training(run: RecordedRun, known: RecordedRun) -> bool:
    """Return whether two records of a run are of one training, or of two with the same result."""
    pairs = [
        (nats_D, known["losses"][digest][merge])
        for digest, by in run["losses"].items()
        for merge, nats_D in by.items()
        if merge in known["losses"].get(digest, {})
    ]
    if not pairs:
        return run["trained"] == known["trained"]
    # A run that diverged has None in place of losses.
    return all(
        a == b or (a is not None and b is not None and np.allclose(a, b, rtol=1e-5, equal_nan=True)) for a, b in pairs
    )


def _join(run: RecordedRun, known: RecordedRun) -> RecordedRun:
    """Return the record of a run with the losses and readings of both records; those of `known` win."""
    new, old = run["losses"], known["losses"]
    losses = {digest: new.get(digest, {}) | old.get(digest, {}) for digest in new.keys() | old.keys()}
    joined: RecordedRun = {**run, "losses": losses}
    if read := run.get("readings", {}) | known.get("readings", {}):
        joined["readings"] = read
    return joined


def _count_results(run: RecordedRun) -> int:
    """Count the merges whose losses a record has, and its readings."""
    return sum(map(len, run["losses"].values())) + len(run.get("readings", {}))


def machine_hours(runs: Iterable[RecordedRun]) -> float:
    """Return the machine hours in which runs were trained and evaluated, each where it was trained."""
    return sum(run["trained"]["seconds"] + run["evaluated"]["seconds"] for run in runs) / 3600


def read_into_cache(path: Path, cache: Path) -> int:
    """Create an entry without snapshots for each recorded run that the cache lacks; return how many were created.

    Raises:
        UserError: The file is corrupt.
    """
    created, root = 0, f"{absolute_path(cache)}/"
    for run in read_file(path):  # all lines are checked before the first entry is created
        entry = epath.Path(cache) / run["key"]
        if entry.exists():
            continue
        config, metadata = (_replace_prefix(part, CACHE, root) for part in (run["config"], run["metadata"]))
        files = {"config.json": config, "run.json": metadata, LOSSES_FILE_NAME: run["losses"]}
        (entry / "run").mkdir(parents=True)
        for name, content in files.items():
            atomic.write_text(entry / "run" / name, json.dumps(content, indent=1) + "\n")
        atomic.write_text(entry / run_cache.EVALUATED, json.dumps(run["evaluated"]) + "\n")
        if "readings" in run:
            atomic.write_text(entry / run_cache.READINGS, json.dumps(run["readings"]) + "\n")
        # Last: an entry without it is that of a run that has not begun.
        trained = run["trained"] | {"has_losses_only": True}
        atomic.write_text(entry / run_cache.TRAINED, json.dumps(trained) + "\n")
        created += 1
    return created


def read_file(path: Path) -> list[RecordedRun]:
    """Read the recorded runs of a file.

    Raises:
        UserError: The file is corrupt; the message names it and the line.
    """
    try:
        with gzip.open(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: not a gzipped file of recorded runs ({error_line(error)})") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{path}: more than {MAX_BYTES:,} bytes")
    runs = []
    for number, line in enumerate(data.splitlines(), start=1):
        run = parse_json(line, f"{path}, line {number}", RecordedRun, allow_nan=True)
        if not _KEY.fullmatch(run["key"]):
            raise UserError(f"{path}, line {number}: {run['key']!r} is not the key of a run: replace the file")
        runs.append(run)
    return runs


def _record(entry: Path) -> RecordedRun | None:
    """Read an entry of the cache; None if its run is neither finished nor diverged, or measures a speed."""
    trained = read_json(entry / run_cache.TRAINED, run_cache.Trained)
    if not trained["is_finished"] and "divergence" not in trained:
        return None
    trained.pop("has_losses_only", None)
    folder = entry / "run"
    config = read_json(folder / "config.json", dict[str, dict[str, Any]])
    if config["training"]["seed"] >= PROBE_SEED:  # its speed is that of this machine
        return None
    root = f"{absolute_path(entry.parent)}/"
    losses_path, cost_path = folder / LOSSES_FILE_NAME, entry / run_cache.EVALUATED
    stored = read_json(losses_path, LossesByDigest, allow_nan=True) if losses_path.exists() else {}
    recorded: RecordedRun = {
        "key": entry.name,
        "config": _replace_prefix(config, root, CACHE),
        "metadata": _replace_prefix(read_json(folder / "run.json", RunMetadata), root, CACHE),
        "trained": trained,
        "evaluated": read_json(cost_path, dict[str, float]) if cost_path.exists() else {"seconds": 0.0, "tokens": 0},
        "losses": {
            digest: {key: None if nats_D is None else np.round(nats_D, DECIMALS).tolist() for key, nats_D in by.items()}
            for digest, by in stored.items()
        },
    }
    if (path := entry / run_cache.READINGS).exists():
        recorded["readings"] = read_json(path, run_cache.Readings)
    return recorded


def _replace_prefix(part: Any, old: str, new: str) -> Any:
    """Replace the beginning `old` of all strings of a JSON object by `new`."""
    if isinstance(part, dict):
        return {key: _replace_prefix(value, old, new) for key, value in part.items()}
    if isinstance(part, list):
        return [_replace_prefix(value, old, new) for value in part]
    return new + part.removeprefix(old) if isinstance(part, str) and part.startswith(old) else part


def main() -> None:
    """Add the runs of a cache to a file, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="directory of cached runs: the --runs of an experiment")
    parser.add_argument("file", type=Path, help="file of recorded runs, which is created if it does not exist")
    options = parser.parse_args()
    try:
        count = add_to_file(options.runs, options.file)
        print(f"{options.file}: {count} runs, {machine_hours(read_file(options.file)):.1f} machine hours")
    except (UserError, OSError) as error:
        raise SystemExit(f"error: {error_line(error)}") from error


if __name__ == "__main__":
    main()
