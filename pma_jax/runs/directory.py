"""A run directory: open or create one, and list what it contains.

    RUN/config.json            resolved configuration
    RUN/run.json               metadata: corpus digest, versions, origin of a fork
    RUN/snapshots/<step>/      parameters with their tokens, loss and configuration: what merging reads
    RUN/block_means/<step>/    the same for the mean of the parameters since the previous snapshot
    RUN/worker_<k>/<step>/     the same for the parameters of worker k of `replicas`
    RUN/states/<step>/         parameters, optimizer, block mean and data position: what resuming and forking need
    RUN/metrics.jsonl          one record per line, written by the training process
    RUN/watch.jsonl            records written by `pma watch` and `pma evaluate --tasks`, while a process may train
    RUN/tracking.json          the name of the run in the trackers of `tracking.name`
    RUN/lock                   held by the training process (runs/lock.py)
    RUN/job.*                  what `pma grid` did to the run (launch/job.py)
    RUN/damaged/               corrupt steps that resuming set aside (training/resume.py)

Snapshots and states are written asynchronously and published atomically: a step without its commit marker does not
exist (runs/steps.py). Each snapshot contains its configuration, so a copied or merged one is self-describing. Each
snapshot and state contains the digests of its arrays, which are checked on every read.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import SNAPSHOT_KINDS, WORKER_PREFIX, Config, snapshot_kind
from pma_jax.config.errors import DamageError, UserError
from pma_jax.data.sampling import SampleDescription
from pma_jax.runs import steps
from pma_jax.runs.snapshots import Snapshot, read_snapshot
from pma_jax.runs.states import STATES, SavedState, read_state
from pma_jax.runs.steps import StepWriter
from pma_jax.storage import atomic, locks
from pma_jax.storage.json_files import read_json, read_json_lines
from pma_jax.storage.json_schema import Count, Loss, check_schema
from pma_jax.storage.lines import LineFile
from pma_jax.storage.paths import absolute_path, as_path, exists, is_bucket


class ForkOrigin(TypedDict):
    """The training state that a fork starts from."""

    path: str
    tokens: Count
    step: Count
    weights: NotRequired[str]


class RunMetadata(TypedDict):
    """Contents of run.json."""

    corpus: NotRequired[str]
    evaluation: NotRequired[Any]  # digest of the held-out text of the run's evaluations
    held_out: NotRequired[SampleDescription]  # how that text was sampled; early versions read the first tokens
    versions: NotRequired[dict[str, str]]
    forked_from: NotRequired[ForkOrigin | None]


class MetricRecord(TypedDict):
    """One line of metrics.jsonl or watch.jsonl: the fields of every kind of record."""

    kind: str
    tokens: Count
    step: NotRequired[Count]


class _LossRecord(MetricRecord):
    loss: Loss
    standard_error: NotRequired[Loss | None]  # of a held-out loss, over documents
    text: NotRequired[str]  # digest of the held-out text


class _WorkerRecord(_LossRecord):
    worker: Count


class _PreviewRecord(_LossRecord):
    recipe: str


class _TaskRecord(MetricRecord):
    model: str  # raw, block/raw, or a merge such as sma:10
    task: str
    metric: str
    value: Loss
    standard_error: Loss | None
    is_higher_better: bool
    documents: Count
    questions: str  # digest: values with equal digests are comparable


class _SpikeRecord(MetricRecord):
    onset_tokens: Count
    verdict: str
    loss: Loss | None
    peak_loss: Loss | None
    median_loss: Loss | None
    spread_nats: Loss | None


class _RecoveryRecord(MetricRecord):
    number: Count


# Kinds that are not listed are accepted with the fields of `MetricRecord`.
_RECORD_TYPES = {
    **{kind.record_kind: _LossRecord for kind in SNAPSHOT_KINDS.values()},
    "train": _LossRecord,
    "worker": _WorkerRecord,
    "preview": _PreviewRecord,
    "task": _TaskRecord,
    "spike": _SpikeRecord,
    "recovery": _RecoveryRecord,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory: its configuration and its contents, oldest first.

    The metadata of snapshots and states are read once each and then cached; a file that changes is read again.
    """

    path: epath.Path
    config: Config
    _cache: dict[epath.Path, tuple[Any, Any]] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def snapshots(self) -> list[Snapshot]:
        """Published snapshots of the first kind listed in `config.checkpoint.kinds`, sorted by tokens."""
        return self.of_kind(self.config.checkpoint.kinds[0])

    def of_kind(self, kind: str) -> list[Snapshot]:
        """List the published snapshots of one kind, such as "point", "block_mean" or "worker_0", sorted by tokens."""
        return self.read_steps(snapshot_kind(kind).folder)

    @property
    def step_folders(self) -> list[str]:
        """Names of the folders of steps: those of snapshots, and that of states. Some may not exist."""
        return [*self.snapshot_folders, STATES]

    @property
    def snapshot_folders(self) -> list[str]:
        """Names of the folders of snapshots: one per kind, which may not exist, and one per worker that has any."""
        return [*(kind.folder for kind in SNAPSHOT_KINDS.values()), *self.worker_kinds]

    @property
    def worker_kinds(self) -> list[str]:
        """Kinds of the snapshots of workers, which are also names of folders, in the order of the workers."""
        names = [path.name for path in self.path.iterdir()] if exists(self.path) else []
        workers = [name for name in names if name.startswith(WORKER_PREFIX)]
        return sorted(workers, key=lambda name: int(name.removeprefix(WORKER_PREFIX)))

    @property
    def states(self) -> list[SavedState]:
        """Published states, sorted by tokens, without those whose metadata are corrupt."""
        return self.read_steps(STATES, skip_corrupt=True)

    @property
    def newest_resumable_state(self) -> SavedState | None:
        """The newest of `resumable_states`, which may be older than the newest of `states`; None if there is none."""
        return next(iter(self.resumable_states), None)

    @property
    def resumable_states(self) -> list[SavedState]:
        """States to resume from, newest first.

        A killed run may have published a state but not the snapshots before it; such a state is omitted, because
        resuming from it would lose these snapshots. If no state has all its snapshots, the user has removed snapshots,
        and all states are returned.
        """
        start_tokens = self.start_tokens
        kinds = [kind for kind in self.config.checkpoint.kinds if kind in SNAPSHOT_KINDS]
        newest_complete_tokens = min(map(self._newest_tokens, kinds))

        def has_its_snapshots(state: SavedState) -> bool:
            step_ends = range(state.tokens, start_tokens, -self.config.batch_tokens)
            return newest_complete_tokens >= next((t for t in step_ends if self.config.is_snapshot_due(t)), 0)

        states = self.states[::-1]
        return list(filter(has_its_snapshots, states)) or states

    @property
    def start_tokens(self) -> int:
        """Tokens at which the run began: 0, or those of the state that it was forked from."""
        return (self.metadata.get("forked_from") or {"tokens": 0})["tokens"]

    @property
    def metadata(self) -> dict[str, Any]:
        """Contents of run.json: the corpus digest, versions, and the origin of a fork."""
        return read_json(as_path(self.path / "run.json"), RunMetadata)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl, then those of watch.jsonl.

        Resuming removes the records after the restored state from metrics.jsonl, and training writes them again. The
        records of watch.jsonl are kept, because the snapshots that they evaluate are kept.
        """
        return [*read_metric_records(self.path / "metrics.jsonl"), *read_metric_records(self.path / "watch.jsonl")]

    def writer(self, folder: str) -> StepWriter:
        """Open a folder of steps for writing."""
        return StepWriter(self.path / folder, lambda path: self.read_step(path).tokens)

    def read_steps(self, folder: str, skip_corrupt: bool = False) -> list[Any]:
        """List the published steps in a folder, sorted by tokens.

        Raises:
            DamageError: The metadata of a step are corrupt, and `skip_corrupt` is False.
        """
        entries = []
        for path in steps.published_steps(self.path / folder):
            try:
                entries.append(self.read_step(path))
            except DamageError:
                if not skip_corrupt:
                    raise
        return sorted(entries, key=lambda entry: entry.tokens)

    def _newest_tokens(self, kind: str) -> int:
        intact = self.read_steps(SNAPSHOT_KINDS[kind].folder, skip_corrupt=True)
        return intact[-1].tokens if intact else 0

    def read_step(self, path: epath.Path) -> Any:
        """Read the metadata of a snapshot or state, unless this run has read them and they did not change.

        Raises:
            DamageError: They are corrupt.
        """
        read = read_state if path.parent.name == STATES else read_snapshot
        try:
            status = as_path(path / steps.METADATA_FILE).stat()
            version = (status.st_mtime_ns, status.st_size)
        except OSError:
            return read(path)  # raises an error that describes the problem
        if path not in self._cache or self._cache[path][0] != version:
            self._cache[path] = version, read(path)
        return self._cache[path][1]


def is_run(path: epath.PathLike) -> bool:
    """Return whether `path` has run.json and config.json (a Hugging Face model has only the second)."""
    return all(exists(absolute_path(path) / name) for name in ("run.json", "config.json"))


def open_run(path: epath.PathLike) -> Run:
    """Open a run directory.

    Raises:
        UserError: `path` is not a run directory, or its configuration cannot be read.
    """
    folder = absolute_path(path)
    if not is_run(folder):
        raise UserError(
            f"{path} is not a run directory (run.json and config.json): specify the --workdir of a `pma train`"
        )
    raw = read_json(as_path(folder / "config.json"), dict[str, dict[str, Any]])
    return Run(folder, configuration.resolve_stored(raw, folder / "config.json"))


def create_run(path: epath.PathLike, config: Config, metadata: dict[str, Any]) -> Run:
    """Create a run directory: write run.json, then config.json, after which the run exists.

    Existing files are replaced: the caller checks that there is no run at `path`.
    """
    folder = absolute_path(path)
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / "run.json", json.dumps(metadata, indent=2) + "\n")
    atomic.write_text(folder / "config.json", configuration.to_json(config))
    if not is_bucket(folder):
        atomic.fsync_parents(Path(folder))
    return Run(folder, config)


def newest_snapshot(path: epath.PathLike) -> Snapshot:
    """Return the snapshot at `path`, or the last of `Run.snapshots` if `path` is a run.

    Raises:
        UserError: `path` is neither a run nor a snapshot, or the run has no snapshot.
    """
    if not is_run(path):
        return read_snapshot(path)
    snapshots = open_run(path).snapshots
    if not snapshots:
        raise UserError(f"no snapshot in {path}: train until the first multiple of checkpoint.interval_tokens")
    return snapshots[-1]


def read_metric_records(path: epath.Path) -> list[dict[str, Any]]:
    """Read a file of metric records (JSON objects with `kind` and `tokens`), one per line.

    The result is empty if the file does not exist. An unfinished last line is ignored.

    Raises:
        UserError: A line is corrupt, or lacks `kind` or `tokens`; the message gives its number.
    """
    if not exists(path):
        return []
    return list(read_json_lines(as_path(path), _check_record))


def _check_record(record: Any) -> None:
    kind = record.get("kind") if isinstance(record, dict) else None
    check_schema(record, _RECORD_TYPES.get(kind, MetricRecord) if isinstance(kind, str) else MetricRecord, "record")


def lock_watch_records(run_dir: epath.Path) -> contextlib.AbstractContextManager[Any]:
    """Hold the lock of RUN/watch.jsonl, for each change of that file. A bucket is not locked."""
    return contextlib.nullcontext() if is_bucket(run_dir) else locks.locked(Path(run_dir / ".watch.lock"))


def append_watch_records(run_dir: epath.Path, records: Iterable[dict[str, Any]]) -> None:
    """Append records to RUN/watch.jsonl. Call it while holding `lock_watch_records`."""
    path = run_dir / "watch.jsonl"
    # A killed process may have written part of a line; the next record would be appended to it.
    data = path.read_bytes() if exists(path) else b""
    if data and not data.endswith(b"\n"):
        atomic.write_bytes(path, data[: data.rfind(b"\n") + 1])
    with contextlib.closing(LineFile(path)) as file:
        file.write_lines(record_lines(records))


def record_lines(records: Iterable[dict[str, Any]]) -> str:
    """Format metric records as `read_metric_records` reads them: one per line."""
    return "".join(json.dumps(record) + "\n" for record in records)
