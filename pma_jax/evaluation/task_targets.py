"""Tasks of the targets of `pma evaluate --tasks`: snapshots, runs, and directories of Hugging Face models.

The scores of what lies in a run are appended to RUN/watch.jsonl, from which `pma report` draws them.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import SNAPSHOT_KINDS, Config
from pma_jax.config.errors import UserError
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation import hf_backend, hf_directory
from pma_jax.evaluation.held_out import check_corpus, prepare_tokens
from pma_jax.evaluation.snapshot_tokenizer import TextTokenizer, tokenizer_of_snapshot
from pma_jax.evaluation.task_scores import RAW_LABEL, TaskScores, load_on_first, score_on_mesh, task_records
from pma_jax.evaluation.tasks import load
from pma_jax.evaluation.tasks.digest import digest_tasks
from pma_jax.evaluation.token_scores import make_model
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import snapshots
from pma_jax.runs.directory import append_watch_records, is_run, lock_watch_records, newest_snapshot, open_run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import make_mesh
from pma_jax.runtime.progress import Progress


def score_targets(
    paths: Sequence[epath.PathLike],
    names: Sequence[str],
    overrides: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    part: str = REPORT,
    is_recorded: bool = True,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Score each target on the tasks; all targets answer the same questions.

    Args:
        paths: Snapshots, runs (their newest snapshot) and directories of Hugging Face models.
        names: The tasks (`evaluation.tasks.load.load_tasks`).
        overrides: Changes of each configuration as `section.key=value`.
        limit: Number of documents of each task, from its first; None: all.
        shots: Number of examples in each prompt; None: what each task says.
        part: The part of the held-out text that `pma:` tasks are made from.
        is_recorded: Whether to record the scores of what lies in a run there.
        progress: Called after each model, with the number of models so far and in all.

    Returns:
        One dict per path: target (the path), tokens (None for a Hugging Face model), `TaskScores`, and, if they are
        not recorded, asked: the digest of the tasks (`evaluation.tasks.digest`).

    Raises:
        UserError: lm-eval is not installed, a task does not exist, a path is no target, or its tokenizer does not fit.
    """
    targets = [_open_target(path, overrides) for path in paths]
    own = [target for target in targets if target.config is not None]
    config = own[0].config if own else None
    if made := [name for name in names if name.startswith(load.OWN_PREFIX)]:
        _check_text(own, made[0])
    tasks = load_on_first(names, config, shots=shots, part=part)
    asked = {} if is_recorded or not hosts.is_first_process() else {"asked": digest_tasks(tasks)}
    rows, settings = [], {"limit": limit, "shots": shots}
    for target in targets:
        scores = _score(target, tasks, limit)
        if progress:
            progress(len(rows) + 1, len(targets))
        if target.snapshot is not None and is_recorded:
            _record(target.snapshot, scores, settings)
        tokens = target.snapshot and target.snapshot.tokens
        rows.append({"target": target.path, "tokens": tokens, **scores, **asked})
    return rows


@dataclasses.dataclass(frozen=True)
class _Target:
    """A model to score; without a snapshot, a Hugging Face model."""

    path: str
    snapshot: Snapshot | None = None
    config: Config | None = None
    tokenizer: TextTokenizer | None = None


def _open_target(path: epath.PathLike, overrides: Sequence[str]) -> _Target:
    if hf_directory.is_model_directory(path):
        hf_directory.check_installed()
        if overrides:
            raise UserError(f"{path} is a Hugging Face model, which has no --config keys: leave them out")
        return _Target(str(path))
    snapshot = newest_snapshot(path)
    config = configuration.resolve(snapshot.config, overrides)
    make_mesh(config.mesh)  # sets the number of simulated devices, which is fixed after the first use of JAX
    return _Target(str(path), snapshot, config, tokenizer_of_snapshot(snapshot, config))


def _check_text(targets: Sequence[_Target], name: str) -> None:
    """Check that no target may have been trained on the held-out text that a task is made from.

    Raises:
        UserError: Targets have different data keys, or the text of a run has changed.
    """
    checked: dict[epath.Path, None] = {}
    for target in targets:
        assert target.config is not None and target.snapshot is not None and targets[0].config is not None
        data = [
            dataclasses.replace(c.data, cache_dir="", tokenizer="bytes") for c in (targets[0].config, target.config)
        ]
        if data[0] != data[1]:
            raise UserError(
                f"{name} is made from held-out text, and {targets[0].path} and {target.path} have other data keys: "
                "score them one at a time"
            )
        run = _run_of(target.snapshot)
        if run is not None and run not in checked and target.config.data == target.snapshot.config.data:
            check_corpus(open_run(run), prepare_tokens(target.config))
            checked[run] = None


def _run_of(snapshot: Snapshot) -> epath.Path | None:
    """Return the run that holds a snapshot (RUN/snapshots/STEP) or a merge of its snapshots (RUN/merged/NAME)."""
    run = snapshot.path.parent.parent
    sources = [] if snapshot.merge is None else snapshot.merge["sources"]
    return run if is_run(run) and all(epath.Path(source["path"]).parent.parent == run for source in sources) else None


def _score(target: _Target, tasks: Mapping[str, Any], limit: int | None) -> TaskScores:
    if target.snapshot is None or target.config is None or target.tokenizer is None:
        return hf_backend.score_directory(target.path, tasks, limit)
    mesh = make_mesh(target.config.mesh)
    params = snapshots.restore_params(target.snapshot, abstract_params(target.snapshot.config.model, mesh))
    model = make_model(target.config, params, mesh)
    return score_on_mesh(model, target.tokenizer, tasks, limit, by_document=True)


def _record(snapshot: Snapshot, scores: TaskScores, settings: Mapping[str, Any]) -> None:
    """Append the scores to the records of the run that holds the snapshot, if there is one."""
    run = _run_of(snapshot)
    if hosts.is_first_process() and run is not None:
        place = {"tokens": snapshot.tokens, "step": snapshot.step, "model": _model_label(snapshot)}
        with lock_watch_records(run):
            append_watch_records(run, task_records(place, scores, settings))


def _model_label(snapshot: Snapshot) -> str:
    """Return what records call the model of a snapshot: `raw`, `block/raw`, or a merge as `sma:10` or `sma:10@2`."""
    prefix = SNAPSHOT_KINDS[snapshot.kind].label_prefix
    if snapshot.merge is None:
        return prefix + RAW_LABEL
    sources = snapshot.merge["sources"]
    numbers = [snapshot.config.snapshot_number(source["tokens"]) for source in sources]
    distances = {newer - older for older, newer in itertools.pairwise(numbers)}
    label = f"{prefix}{snapshot.merge['recipe']}:{len(sources)}"
    if distances <= {1}:
        return label
    return f"{label}@{distances.pop()}" if len(distances) == 1 else f"{label} ({snapshot.path.name})"
