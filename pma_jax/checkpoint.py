"""A run directory's snapshots and states: save, list, restore. Orbax lives here.

    RUN/config.json            the resolved configuration
    RUN/run.json               corpus digest, versions, what it was forked from
    RUN/snapshots/<step>/      parameters, and the tokens, loss and configuration they belong to: what merging reads
    RUN/block_means/<step>/    the same, of the mean of the weights since the snapshot before (dense averaging)
    RUN/states/<step>/         parameters, optimizer, block mean and data position: what resuming and forking need
    RUN/metrics.jsonl          one record a line, by the process that trains
    RUN/watch.jsonl            previews of the same form, by `pma watch`: files that two processes add to would race

All are written asynchronously and published whole: a step without its commit mark does not exist. A snapshot
carries its configuration, so one that was copied or merged elsewhere still says what it is.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from pma_jax import config as configuration
from pma_jax.config import FOLDERS, Config
from pma_jax.mesh import abstract_on
from pma_jax.model.decoder import init_params
from pma_jax.retention import KeepStates, KeepWindows

STATES = "states"
OPTIONAL = ("block", "detector")  # parts of a train state that may be missing
COMMIT_MARK = "commit_success.txt"
Checkpointer = ocp.training.Checkpointer


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
        return sorted((read_snapshot(p) for p in _published(self.path / FOLDERS[kind])), key=lambda s: s.tokens)

    @property
    def states(self) -> list[SavedState]:
        """Published states, by tokens."""
        return sorted((_read_state(p) for p in _published(self.path / STATES)), key=lambda s: s.tokens)

    @property
    def newest_state(self) -> SavedState | None:
        """The newest state whose snapshots of every kind are there: a kill may have published a state before them.

        Where there is no such state, the snapshots were taken away on purpose: the newest of all.
        """
        origin = self.facts.get("forked_from", {"tokens": 0})["tokens"]
        published = min(max((s.tokens for s in self.of_kind(kind)), default=0) for kind in self.config.checkpoint.kinds)

        def is_whole(state: SavedState) -> bool:
            steps = range(state.tokens, origin, -self.config.batch_tokens)
            return published >= next((t for t in steps if self.config.is_snapshot(t)), 0)

        states = self.states
        return next(filter(is_whole, reversed(states)), states[-1] if states else None)

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json holds: the corpus digest, versions, and what the run was forked from."""
        return json.loads((self.path / "run.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, then those of watch.jsonl.

        A run that resumes drops its own records past its state and writes them again; a watcher's stay, as the
        snapshots that they are of do.
        """
        return [*read_records(self.path / "metrics.jsonl"), *read_records(self.path / "watch.jsonl")]


def read_records(path: epath.Path) -> list[dict[str, Any]]:
    """One record a line; a last line that is still being written is left out, and no file is no records."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def absolute(path: epath.PathLike) -> epath.Path:
    """The path that Orbax wants: absolute, `~` expanded; a bucket's address stays as it is."""
    given = epath.Path(path)
    return given if "://" in str(given) else given.expanduser().resolve()


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
    try:
        return Run(folder, configuration.from_json((folder / "config.json").read_text()))
    except (OSError, ValueError) as error:
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
    return (folder / COMMIT_MARK).exists() and (folder / "params").exists()


def read_snapshot(path: epath.PathLike) -> Snapshot:
    """What a snapshot says of itself; reads no array. Raises ValueError when it is not one."""
    folder = absolute(path)
    if not is_snapshot(folder):
        raise ValueError(f"{path} is neither a run nor a snapshot: give RUN, RUN/snapshots/STEP or a merge's --out")
    facts = _custom_metadata(folder, ("step", "tokens", "loss", "config", "kind"))
    config = configuration.resolve(facts["config"])
    merge = _merge_facts(folder)
    return Snapshot(folder, facts["step"], facts["tokens"], facts["loss"], config, merge, facts["kind"])


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


def snapshot_writer(run: Run, kind: str) -> Checkpointer:
    """Open the root of one kind of snapshots for writing, under the retention of the run's configuration."""
    return _writer(run.path / FOLDERS[kind], KeepWindows(run.config))


def state_writer(run: Run) -> Checkpointer:
    """Open RUN/states for writing, under the retention of the run's configuration."""
    return _writer(run.path / STATES, KeepStates(run.config))


def save_snapshot(writer: Checkpointer, params: Any, snapshot: Snapshot) -> None:
    """Start writing `params` as `snapshot`; returns when the arrays may be donated. A step that exists is kept."""
    if snapshot.step in {c.step for c in writer.checkpoints}:
        return
    with _plain():
        writer.save_checkpointables_async(
            snapshot.step,
            {"params": params},
            metrics={"tokens": snapshot.tokens},
            custom_metadata=_facts(snapshot),
        )


def write_snapshot(params: Any, snapshot: Snapshot) -> None:
    """Write one snapshot at `snapshot.path`, outside a run. Raises ValueError when something is there already."""
    if snapshot.path.exists():
        raise ValueError(f"{snapshot.path} exists already: choose another --out, or remove it")
    snapshot.path.parent.mkdir(parents=True, exist_ok=True)
    with _plain():
        ocp.save_checkpointables(snapshot.path, {"params": params}, custom_metadata=_facts(snapshot))


def save_state(writer: Checkpointer, state: Any, step: int, tokens: int, position: int) -> None:
    """Start writing a full state; returns when the arrays may be donated. A step that exists is kept."""
    if step in {c.step for c in writer.checkpoints}:
        return
    # What is optional lies beside the rest, so that a fork can leave it, or begin what its parent did not have.
    beside = {name: part for name in OPTIONAL if (part := getattr(state, name)) is not None}
    with _plain():
        writer.save_checkpointables_async(
            step,
            {"state": dataclasses.replace(state, **dict.fromkeys(OPTIONAL)), **beside},
            metrics={"tokens": tokens},
            custom_metadata={"step": step, "tokens": tokens, "position": position},
        )


def abstract_params(config: Config, mesh: jax.sharding.Mesh) -> Any:
    """Shape, dtype and sharding on `mesh` of every parameter of the model."""
    return abstract_on(mesh, lambda: init_params(config.model, jax.random.key(0)))


def stored_leaves(path: epath.Path) -> dict[str, dict[str, Any]]:
    """Name -> shape, dtype and number of elements of each stored parameter; reads no array."""
    stored = _stored(path)["params"]
    leaves = jax.tree_util.tree_flatten_with_path(stored)[0]
    return {
        jax.tree_util.keystr(key, simple=True, separator="/"): {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "size": math.prod(leaf.shape),
        }
        for key, leaf in leaves
    }


def copy_state(saved: SavedState, folder: epath.Path) -> None:
    """Copy a state's files into the run directory `folder`, published whole; one that is there is kept."""
    target = folder / STATES / saved.path.name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{saved.path.name}.copying"
    if temporary.exists():
        temporary.rmtree()
    _copy_tree(saved.path, temporary)
    temporary.rename(target)


def restore_params(snapshot: Snapshot, abstract: Any) -> Any:
    """A snapshot's parameters with the shapes, dtypes and shardings of `abstract`.

    Raises ValueError that names every leaf (the first ten, and a count) that is missing, unknown or of another shape.
    """
    return _restore(snapshot.path, "params", abstract)


def restore_state(saved: SavedState, abstract: Any) -> Any:
    """A full state with the shapes, dtypes and shardings of `abstract`; raises as `restore_params` does.

    The block mean and the detector of spikes are restored where `abstract` has them. Where the state on disk has none,
    because a run that keeps none was forked, or a detector of another window, they begin empty.
    """
    state = _restore(saved.path, "state", dataclasses.replace(abstract, **dict.fromkeys(OPTIONAL)))
    stored = _stored(saved.path)
    for name in OPTIONAL:
        part = getattr(abstract, name)
        if part is None:
            continue
        if name in stored and _shapes(stored[name]) == _shapes(part):
            part = _restore(saved.path, name, part)
        else:
            part = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), part)
        state = dataclasses.replace(state, **{name: part})
    return state


def write_parts(path: epath.Path, parts: dict[str, Any]) -> None:
    """Write named pytrees at `path`, in place of what is there."""
    if path.exists() and jax.process_index() == 0:
        path.rmtree()
    multihost_utils.sync_global_devices(f"{path} is free")
    with _plain():
        ocp.save_checkpointables(path, parts)


def restore_part(path: epath.Path, name: str, abstract: Any) -> Any:
    """One of the pytrees that `write_parts` wrote; raises as `restore_params` does."""
    return _restore(path, name, abstract)


def _writer(folder: epath.Path, preservation: Any) -> Checkpointer:
    # The loop decides when to save; the writer saves what it is given.
    every: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
    return Checkpointer(
        folder, save_decision_policy=every, preservation_policy=preservation, cleanup_tmp_directories=True
    )


def _plain() -> ocp.Context:
    # Weights hardly compress, and zstd decodes at a tenth of the rate of a plain read, which is all that merging does.
    context = ocp.Context()
    context.array.saving.use_compression = False
    return context


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "step": snapshot.step,
        "tokens": snapshot.tokens,
        "loss": snapshot.loss,
        "kind": snapshot.kind,
        "config": json.loads(configuration.to_json(snapshot.config)),
    }


def _published(folder: epath.Path) -> list[epath.Path]:
    if not folder.exists():
        return []
    return [p for p in folder.iterdir() if p.name.isdigit() and (p / COMMIT_MARK).exists()]


def _merge_facts(folder: epath.Path) -> dict[str, Any] | None:
    """What a merge made of this snapshot's provenance, shortened; None where no merge made it."""
    path = folder / "provenance.json"
    if not path.exists():
        return None
    with _readable(path):
        facts = json.loads(path.read_text())
        sources = [{"path": s["source"], "step": s["step"], "tokens": s["tokens"]} for s in facts["sources"]]
        dtypes = ", ".join(facts["accumulation_dtypes"])
        short = {key: facts[key] for key in ("recipe", "coefficients")}
        return short | {"sources": sources, "accumulation_dtype": dtypes}


def _custom_metadata(path: epath.Path, keys: Sequence[str]) -> dict[str, Any]:
    with _readable(path):
        facts = ocp.checkpointables_metadata(path).custom_metadata
    if not isinstance(facts, dict) or not facts.keys() >= set(keys):
        raise ValueError(f"{path} has none of pma_jax's metadata: it is damaged, or not of this version")
    return facts


@contextlib.contextmanager
def _readable(path: epath.Path) -> Iterator[None]:
    """What Orbax and TensorStore raise over broken files, of many types and pages long, as one error."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        said = said if len(said) <= 300 else f"{said[:300]} ..."
        raise ValueError(f"{path} is damaged or incomplete: {type(error).__name__}: {said}") from error


def _read_state(path: epath.Path) -> SavedState:
    facts = _custom_metadata(path, ("step", "tokens", "position"))
    return SavedState(path, facts["step"], facts["tokens"], facts["position"])


def _restore(path: epath.Path, name: str, abstract: Any) -> Any:
    stored = _shapes(_stored(path)[name])
    if not stored:
        raise ValueError(f"{path} is damaged or incomplete: it lists no arrays")
    differences = _leaf_differences(stored, _shapes(abstract))
    if differences:
        listed = "; ".join(differences[:10])
        raise ValueError(f"{path} does not fit the model: {len(differences)} leaves differ: {listed}")
    with _readable(path):
        return ocp.load_checkpointables(path, {name: abstract})[name]


def _stored(path: epath.Path) -> dict[str, Any]:
    # What lies there, by name (params; state, block), with the shape and dtype of every leaf.
    with _readable(path):
        return ocp.checkpointables_metadata(path).metadata


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    # Orbax's metadata of a dataclass is a dict: compare names as text, whatever the kind of key.
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}


def _leaf_differences(stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    found = [f"{name} is missing" for name in wanted if name not in stored]
    found += [f"{name} is unknown" for name in stored if name not in wanted]
    both = [name for name in wanted if name in stored and stored[name] != wanted[name]]
    return found + [f"{name} is {stored[name]}, not {wanted[name]}" for name in both]


def _copy_tree(source: epath.Path, target: epath.Path) -> None:
    target.mkdir()
    for item in source.iterdir():
        if item.is_dir():
            _copy_tree(item, target / item.name)
        else:
            item.copy(target / item.name)


def write_text(path: epath.Path, text: str) -> None:
    """Write a small file whole, or not at all."""
    temporary = path.parent / f".{path.name}.writing"
    temporary.write_text(text)
    temporary.replace(path)
