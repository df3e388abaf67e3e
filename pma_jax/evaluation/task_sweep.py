"""Sweeps of tasks: merges of a run's newest snapshots over a grid, each scored on tasks in memory.

The scores are appended to RUN/watch.jsonl, from which `pma report` draws them. No merge is written.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.held_out import check_corpus, prepare_tokens
from pma_jax.evaluation.merges import score_merges
from pma_jax.evaluation.snapshot_tokenizer import TextTokenizer, tokenizer_of_snapshot
from pma_jax.evaluation.sweep import RAW, Cell, plan_grid, weigh_snapshots
from pma_jax.evaluation.task_scores import RAW_LABEL, TaskScores, load_on_first, score_on_mesh, task_records
from pma_jax.evaluation.tasks.load import OWN_PREFIX
from pma_jax.evaluation.token_scores import make_model
from pma_jax.runs.directory import Run, append_watch_records, lock_watch_records
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import make_mesh
from pma_jax.runtime.progress import Progress


def sweep_tasks(
    run: Run,
    names: Sequence[str],
    recipe_texts: Sequence[str],
    windows: Sequence[int],
    intervals: Sequence[int] = (1,),
    kind: str = "point",
    *,
    limit: int | None = None,
    shots: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score every recipe with every window and interval at the newest snapshot.

    Each snapshot is read once, if the merges fit into memory (`score_merges`). Held-out text is the part `select`.

    Args:
        run: The run, with snapshots of `kind`.
        names: The tasks (`evaluation.tasks.load.load_tasks`).
        recipe_texts: Recipes in the syntax of `recipes.parse`, without a window.
        windows: Numbers of snapshots to merge.
        intervals: Distances between merged snapshots, in snapshots.
        kind: The kind of snapshots, "point" or "block_mean".
        limit: Number of documents of each task, from its first; None: all.
        shots: Number of examples in each prompt; None: what each task says.
        progress: As in `score_merges`.

    Returns:
        tokens: of the newest snapshot. raw: `TaskScores` of the point snapshot there, or None. rows: the keys of a
        `Cell` and its `text` for each merge, with its `TaskScores`. left_out: text of a merge -> why it cannot be made.
        passes and seconds: as `EvaluatedMerges`.

    Raises:
        UserError: As `plan_grid` and `load_tasks`, the run's tokenizer is not found, or the text is another one.
    """
    began = time.perf_counter()
    snapshots, grid, left_out = plan_grid(run, recipe_texts, windows, intervals, kind)
    newest, mesh = snapshots[-1], make_mesh(run.config.mesh)
    tokenizer = _open_text(run, newest, names)
    tasks = load_on_first(names, run.config, shots=shots, part=SELECT)
    kinds = {k: run.of_kind(k) for k in dict.fromkeys([kind, RAW.kind])}
    has_raw = any(snapshot.tokens == newest.tokens for snapshot in kinds[RAW.kind])
    cells = [cell for cell in grid if cell.text not in left_out and cell != RAW]
    scored_cells = [*([RAW] if has_raw else []), *cells]
    weighed = weigh_snapshots(run.config, kinds, [(cell, newest.tokens) for cell in scored_cells])

    def score(params: Any) -> TaskScores:
        return score_on_mesh(make_model(run.config, params, mesh), tokenizer, tasks, limit)

    scored = score_merges(run.config, *weighed, score, progress)
    scores = dict(zip(scored_cells, scored.scores, strict=True))
    _record(run, newest.tokens, newest.step, scores, {"limit": limit, "shots": shots})
    return {
        "tokens": newest.tokens,
        "raw": scores.get(RAW),
        "rows": [{"text": cell.text, **vars(cell), **scores[cell]} for cell in cells],
        "left_out": left_out,
        "passes": scored.passes,
        "seconds": scored.seconds | {"all": time.perf_counter() - began},
    }


def _open_text(run: Run, newest: Snapshot, names: Sequence[str]) -> TextTokenizer:
    """Return the run's tokenizer, and check the text that `pma:` tasks are made from."""
    if any(name.startswith(OWN_PREFIX) for name in names):
        check_corpus(run, prepare_tokens(run.config))
    return tokenizer_of_snapshot(newest, run.config)


def _record(
    run: Run, tokens: int, step: int, scores: Mapping[Cell, TaskScores], settings: Mapping[str, int | None]
) -> None:
    if hosts.is_first_process():
        labels = {cell: RAW_LABEL if cell == RAW else cell.text for cell in scores}
        places = {cell: {"tokens": tokens, "step": step, "model": labels[cell]} for cell in scores}
        with lock_watch_records(run.path):
            append_watch_records(
                run.path, [r for cell in scores for r in task_records(places[cell], scores[cell], settings)]
            )
