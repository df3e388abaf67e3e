"""Task scores of parameters while a run trains (`evaluation.tasks`)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from pma_jax.config import Config
from pma_jax.data.sampling import SELECT
from pma_jax.data.shards import TokenSet
from pma_jax.data.tokenizer import load_tokenizer
from pma_jax.evaluation.snapshot_tokenizer import TextTokenizer, text_tokenizer
from pma_jax.evaluation.task_scores import load_on_first, main_metric, score_on_mesh, task_records
from pma_jax.evaluation.token_scores import make_model
from pma_jax.model.decoder import Params


@dataclasses.dataclass(frozen=True)
class TaskScorer:
    """A function from parameters on `mesh` to the metric records of their scores on the run's tasks."""

    config: Config
    mesh: jax.sharding.Mesh
    tokenizer: TextTokenizer
    tasks: Mapping[str, Any]  # in the first process

    def __call__(self, params: Params, place: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the records of each task's main metric and accuracy; `place` has their tokens, step and model."""
        limit = self.config.evaluation.tasks_limit
        scores = score_on_mesh(make_model(self.config, params, self.mesh), self.tokenizer, self.tasks, limit)
        records = task_records(place, scores, {"limit": limit, "shots": None})
        kept = {(score["task"], name) for score in scores["tasks"] for name in (main_metric(score), "acc")}
        return [record for record in records if (record["task"], record["metric"]) in kept]


def make_task_scorer(config: Config, mesh: jax.sharding.Mesh, tokens: TokenSet) -> TaskScorer | None:
    """Load the tasks of `evaluation.tasks`; return None if there are none.

    Raises:
        UserError: lm-eval is not installed, a task does not exist, or its data cannot be read.
    """
    if not config.evaluation.tasks:
        return None
    tasks = load_on_first(config.evaluation.tasks, config, part=SELECT)
    tokenizer = text_tokenizer(load_tokenizer(tokens.directory / "tokenizer.json"))
    return TaskScorer(config, mesh, tokenizer, tasks)
