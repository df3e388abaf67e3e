"""A run directory's snapshots and states: save, list, restore.

    RUN/config.json            the resolved configuration
    RUN/run.json               corpus digest, versions, what it was forked from
    RUN/snapshots/<step>/      parameters, and the tokens, loss and configuration they belong to: what merging reads
    RUN/block_means/<step>/    the same, of the mean of the weights since the snapshot before (dense averaging)
    RUN/states/<step>/         parameters, optimizer, block mean and data position: what resuming and forking need
    RUN/metrics.jsonl          one record a line, by the process that trains
    RUN/watch.jsonl            previews of the same form, by `pma watch`: files that two processes add to would race
    RUN/lock                   who trains here (runs/lock.py)
    RUN/damaged/               what resuming passed over (training/resuming.py)

All are written asynchronously and published whole: a step without its commit mark does not exist (runs/steps.py). A
snapshot carries its configuration, so one that was copied or merged elsewhere still says what it is. All carry the
digests of their arrays, which are checked whenever these are read.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from orbax.checkpoint import v1 as ocp

from pma_jax import config as configuration
from pma_jax.config import SNAPSHOT_KINDS, Config
from pma_jax.model.decoder import init_params
from pma_jax.runs import integrity, restore, steps
from pma_jax.runs.retention import kept_snapshots, kept_states
from pma_jax.runs.steps import COMMIT_MARKER, StepWriter
from pma_jax.runtime import hosts
from pma_jax.runtime.errors import error_line
from pma_jax.runtime.mesh import abstract_on
from pma_jax.storage import digests
from pma_jax.storage.paths import check_bucket, is_bucket

STATES = "states"
STEP_FOLDERS = (*(kind.folder for kind in SNAPSHOT_KINDS.values()), STATES)
OPTIONAL = ("block", "detector", "ema")  # parts of a train state that may be missing


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Parameters at one point of a run, or a merge of several."""

    path: epath.Path
    step: int  # optimizer steps done
    tokens: int  # tokens consumed
    loss: float | None  # held-out nats a token, where it was evaluated
    config: Config
    merge: dict[str, Any] | None = None  # of a merged snapshot: recipe, sources, coefficients
    kind: str = "point"  # or "block_mean": of the weights since the snapshot before


@dataclasses.dataclass(frozen=True)
class SavedState:
    """A full state on disk."""

    path: epath.Path
    step: int
    tokens: int
    position: int  # sequences of the data consumed


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory: its configuration, and what it holds, oldest first."""

    path: epath.Path
    config: Config

    @property
    def snapshots(self) -> list[Snapshot]:
        """Published snapshots of the first kind that the run saves, by tokens."""
        return self.of_kind(self.config.checkpoint.kinds[0])

    def of_kind(self, kind: str) -> list[Snapshot]:
        """Published snapshots of one kind, "point" or "block_mean", by tokens."""
        found = (read_snapshot(p) for p in steps.published(self.path / SNAPSHOT_KINDS[kind].folder))
        return sorted(found, key=lambda s: s.tokens)

    @property
    def states(self) -> list[SavedState]:
        """Published states, by tokens; one whose metadata is damaged is none."""
        found = []
        for path in steps.published(self.path / STATES):
            with contextlib.suppress(ValueError):
                found.append(read_state(path))
        return sorted(found, key=lambda s: s.tokens)

    @property
    def newest_state(self) -> SavedState | None:
        """The first of `resumable_states`."""
        return next(iter(self.resumable_states), None)

    @property
    def resumable_states(self) -> list[SavedState]:
        """States to resume from, newest first, whose snapshots are there: a kill may have published a state before.

        Where there is no such state, the snapshots were taken away on purpose: all states.
        """
        origin = self.metadata.get("forked_from", {"tokens": 0})["tokens"]
        published = min(self._newest_tokens(kind) for kind in self.config.checkpoint.kinds)

        def is_covered(state: SavedState) -> bool:
            ends = range(state.tokens, origin, -self.config.batch_tokens)
            return published >= next((t for t in ends if self.config.is_snapshot(t)), 0)

        states = self.states[::-1]
        return list(filter(is_covered, states)) or states

    def _newest_tokens(self, kind: str) -> int:
        for path in reversed(steps.published(self.path / SNAPSHOT_KINDS[kind].folder)):
            with contextlib.suppress(ValueError):  # a damaged one is told where it is read
                return read_snapshot(path).tokens
        return 0

    @property
    def metadata(self) -> dict[str, Any]:
        """What run.json holds: the corpus digest, versions, and what the run was forked from."""
        return read_json(self.path / "run.json")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, then those of watch.jsonl.

        A run that resumes drops its own records past its state and writes them again; a watcher's stay, as the
        snapshots that they are of do.
        """
        return [*read_records(self.path / "metrics.jsonl"), *read_records(self.path / "watch.jsonl")]


def read_records(path: epath.Path) -> list[dict[str, Any]]:
    """One record a line; a last line that is still being written is left out, and no file is no records.

    Raises ValueError that names the line when one is damaged.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            if type(record["tokens"]) is not int or not isinstance(record["kind"], str):
                raise TypeError("a record has kind and tokens")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged in line {number}: remove that line ({error})") from error
        records.append(record)
    return records


def record_lines(records: Iterable[dict[str, Any]]) -> str:
    """What `read_records` reads: one record a line."""
    return "".join(json.dumps(record) + "\n" for record in records)


def read_json(path: epath.Path) -> dict[str, Any]:
    """A small file of a run. Raises ValueError that names it when it is missing or damaged."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error_line(error)}") from error
    return found


def absolute(path: epath.PathLike) -> epath.Path:
    """The path that Orbax wants: absolute, `~` expanded; a bucket's address stays as it is."""
    check_bucket(path)
    given = epath.Path(path)
    return given if is_bucket(given) else given.expanduser().resolve()


def is_run(path: epath.PathLike) -> bool:
    """Whether a run lives in this directory; a Hugging Face model has a config.json too, but no run.json."""
    return all((absolute(path) / name).exists() for name in ("run.json", "config.json"))


def open_run(path: epath.PathLike) -> Run:
    """Open a run directory. Raises ValueError when there is none."""
    folder = absolute(path)
    if not is_run(folder):
        raise ValueError(
            f"{path} is not a run directory (run.json and config.json): give the --workdir of a `pma train`"
        )
    raw = read_json(folder / "config.json")
    try:
        return Run(folder, configuration.resolve(raw))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from error


def create_run(path: epath.PathLike, config: Config, facts: dict[str, Any]) -> Run:
    """Write config.json and run.json; the configuration comes last, and with it the run exists."""
    folder = absolute(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "run.json", json.dumps(facts, indent=2) + "\n")
    write_text(folder / "config.json", configuration.to_json(config))
    return Run(folder, config)


def is_snapshot(path: epath.PathLike) -> bool:
    """Whether this directory is a published snapshot."""
    folder = absolute(path)
    return (folder / COMMIT_MARKER).exists() and (folder / "params").exists()


def read_snapshot(path: epath.PathLike) -> Snapshot:
    """What a snapshot says of itself; reads no array. Raises ValueError when it is not one."""
    folder = absolute(path)
    if not is_snapshot(folder):
        raise ValueError(f"{path} is neither a run nor a snapshot: give RUN, RUN/snapshots/STEP or a merge's --out")
    facts = steps.read_metadata(folder, ("step", "tokens", "loss", "config", "kind"))
    config = configuration.resolve(facts["config"])
    merge = _merge_facts(folder)
    return Snapshot(folder, facts["step"], facts["tokens"], facts["loss"], config, merge, facts["kind"])


def read_state(path: epath.Path) -> SavedState:
    """What a state says of itself; reads no array. Raises ValueError when it is damaged."""
    facts = steps.read_metadata(path, ("step", "tokens", "position"))
    return SavedState(path, facts["step"], facts["tokens"], facts["position"])


def find_snapshots(paths: Sequence[epath.PathLike], kind: str | None = None) -> list[Snapshot]:
    """The snapshots of runs, and snapshots named themselves, by tokens; all of one kind.

    Of a run, those of `kind` ("point" or "block_mean"), or of the first kind that it saves. Raises ValueError for
    anything else, for snapshots of another kind, and where there is none.
    """
    found = []
    for path in paths:
        found += _of_run(open_run(path), kind) if is_run(path) else [read_snapshot(path)]
    if not found:
        raise ValueError(f"no snapshot in {', '.join(map(str, paths))}: train until the first token mark")
    check_one_kind(found, kind)
    return sorted(found, key=lambda s: s.tokens)


def check_one_kind(snapshots: Sequence[Snapshot], kind: str | None = None) -> None:
    """Raise ValueError that names two snapshots where points and block means are mixed, or one that is not `kind`."""
    wanted = kind or snapshots[0].kind
    for other in snapshots:
        if other.kind != wanted:
            asked = "asked for" if kind else f"what {snapshots[0].path} is"
            raise ValueError(
                f"{other.path} is a {other.kind}, and a {wanted} is {asked}: points and block means do not mix, "
                "give snapshots of one kind"
            )


def _of_run(run: Run, kind: str | None) -> list[Snapshot]:
    if kind is not None and kind not in run.config.checkpoint.kinds:
        kept = ", ".join(run.config.checkpoint.kinds)
        raise ValueError(f"{run.path} keeps {kept} snapshots, not {kind!r}: train it with checkpoint.kinds={kind}")
    return run.snapshots if kind is None else run.of_kind(kind)


def snapshot_writer(run: Run, kind: str) -> StepWriter:
    """Open the root of one kind of snapshots for writing, under the retention of the run's configuration."""
    return _writer(run.path / SNAPSHOT_KINDS[kind].folder, functools.partial(kept_snapshots, run.config))


def state_writer(run: Run) -> StepWriter:
    """Open RUN/states for writing, under the retention of the run's configuration."""
    return _writer(run.path / STATES, functools.partial(kept_states, run.config))


def save_snapshot(writer: StepWriter, params: Any, snapshot: Snapshot) -> None:
    """Start writing `params` as `snapshot`; returns when the arrays may be donated. A step that exists is kept.

    Raises ValueError when a leaf is not finite (naming it), or the last step could not be written.
    """
    writer.save(snapshot.step, {"params": params}, _facts(snapshot, params))


def write_snapshot(params: Any, snapshot: Snapshot) -> None:
    """Write one snapshot at `snapshot.path`, outside a run. Raises ValueError when something is there already."""
    if snapshot.path.exists():
        raise ValueError(f"{snapshot.path} exists already: choose another --out, or remove it")
    snapshot.path.parent.mkdir(parents=True, exist_ok=True)
    facts = digests.add_metadata_digest(_facts(snapshot, params))
    with steps.plain_arrays(), steps.writing(snapshot.path):
        ocp.save_checkpointables(snapshot.path, {"params": params}, custom_metadata=facts)


def save_state(writer: StepWriter, state: Any, step: int, tokens: int, position: int) -> None:
    """Start writing a full state; returns when the arrays may be donated. A step that exists is kept.

    Raises as `save_snapshot` does.
    """
    _refuse_non_finite(state.params, step, tokens)
    # What is optional lies beside the rest, so that a fork can leave it, or begin what its parent did not have.
    beside = {name: part for name in OPTIONAL if (part := getattr(state, name)) is not None}
    items = {"state": dataclasses.replace(state, **dict.fromkeys(OPTIONAL))} | beside
    writer.save(step, items, {"step": step, "tokens": tokens, "position": position} | _digests(items))


def abstract_params(config: Config, mesh: jax.sharding.Mesh) -> Any:
    """Shape, dtype and sharding on `mesh` of every parameter of the model."""
    return abstract_on(mesh, lambda: init_params(config.model, jax.random.key(0)))


def copy_state(saved: SavedState, folder: epath.Path) -> None:
    """Copy a state's files into the run directory `folder`, published whole; one that is there is kept."""
    target = folder / STATES / saved.path.name
    if (target / COMMIT_MARKER if is_bucket(target) else target).exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_bucket(target):
        _copy_tree(saved.path, target, last=COMMIT_MARKER)
        return
    temporary = target.parent / f".{saved.path.name}.copying"
    if temporary.exists():
        temporary.rmtree()
    _copy_tree(saved.path, temporary)
    if not (saved.path / COMMIT_MARKER).exists():
        temporary.rmtree()
        raise ValueError(f"{saved.path} was taken away while it was copied: fork from another state")
    temporary.rename(target)


def restore_params(snapshot: Snapshot, abstract: Any) -> Any:
    """A snapshot's parameters with the shapes, dtypes and shardings of `abstract`.

    Raises ValueError that names every leaf (the first ten, and a count) that is missing, unknown, of another shape,
    not what was written (by its digest), or not finite.
    """
    params = restore.restore(snapshot.path, "params", abstract)
    bad = integrity.non_finite_leaves(params)
    if bad:
        raise ValueError(f"{snapshot.path} has weights that are not finite, and is not used: {', '.join(bad[:10])}")
    return params


def restore_state(saved: SavedState, abstract: Any) -> Any:
    """A full state with the shapes, dtypes and shardings of `abstract`; raises as `restore_params` does.

    The block mean, the detector of spikes and the moving average are restored where `abstract` has them. Where the
    state on disk has none, because a run that keeps none was forked, or a detector of another window, they begin empty.
    """
    state = restore.restore(saved.path, "state", dataclasses.replace(abstract, **dict.fromkeys(OPTIONAL)))
    stored, digests_of = restore.stored(saved.path), restore.recorded_digests(saved.path)
    for name in OPTIONAL:
        part = getattr(abstract, name)
        if part is None:
            continue
        if stored.get(name) is None and any(leaf.startswith(f"{name}.") for leaf in digests_of):
            raise ValueError(f"{saved.path} is damaged or incomplete: its {name} is gone")
        if stored.get(name) is not None and restore.shapes(stored[name]) == restore.shapes(part):
            part = restore.restore(saved.path, name, part)
        else:
            part = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), part)
        state = dataclasses.replace(state, **{name: part})
    return state


def write_parts(path: epath.Path, parts: dict[str, Any]) -> None:
    """Write named pytrees at `path`, in place of what is there."""
    if path.exists() and hosts.is_first():
        path.rmtree()
    hosts.barrier("checkpoint.write_parts")
    with steps.plain_arrays(), steps.writing(path):
        ocp.save_checkpointables(path, parts, custom_metadata=digests.add_metadata_digest(_digests(parts)))


def restore_part(path: epath.Path, name: str, abstract: Any) -> Any:
    """One of the pytrees that `write_parts` wrote; raises as `restore_params` does."""
    return restore.restore(path, name, abstract)


def _writer(folder: epath.Path, kept: Any) -> StepWriter:
    return StepWriter(folder, kept, removes=hosts.is_first())


def _facts(snapshot: Snapshot, params: Any) -> dict[str, Any]:
    _refuse_non_finite(params, snapshot.step, snapshot.tokens)
    return {
        "step": snapshot.step,
        "tokens": snapshot.tokens,
        "loss": snapshot.loss,
        "kind": snapshot.kind,
        "config": json.loads(configuration.to_json(snapshot.config)),
    } | _digests(params)


def _digests(tree: Any) -> dict[str, Any]:
    return {"checksum": integrity.CHECKSUM, "leaves": integrity.tree_digests(tree)}


def _refuse_non_finite(params: Any, step: int, tokens: int) -> None:
    bad = integrity.non_finite_leaves(params)
    if bad:
        raise ValueError(
            f"step {step:,} ({tokens:,} tokens): {len(bad)} leaves of the weights are not finite and are not saved: "
            f"{', '.join(bad[:10])}"
        )


def _merge_facts(folder: epath.Path) -> dict[str, Any] | None:
    """What a merge made of this snapshot's provenance, shortened; None where no merge made it."""
    path = folder / "provenance.json"
    if not path.exists():
        return None
    with restore.readable(path):
        facts = json.loads(path.read_text())
        sources = [{"path": s["source"], "step": s["step"], "tokens": s["tokens"]} for s in facts["sources"]]
        dtypes = ", ".join(facts["accumulation_dtypes"])
        short = {key: facts[key] for key in ("recipe", "coefficients")}
        return short | {"sources": sources, "accumulation_dtype": dtypes}


def _copy_tree(source: epath.Path, target: epath.Path, last: str = "") -> None:
    target.mkdir(exist_ok=bool(last))
    for item in sorted(source.iterdir(), key=lambda item: item.name == last):
        if item.is_dir():
            _copy_tree(item, target / item.name, last)
        else:
            item.copy(target / item.name, overwrite=bool(last))


def write_text(path: epath.Path, text: str) -> None:
    """Write a small file whole, or not at all."""
    temporary = path.parent / f".{path.name}.writing"
    temporary.write_text(text)
    temporary.replace(path)
