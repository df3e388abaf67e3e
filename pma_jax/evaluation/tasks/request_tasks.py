"""lm-eval tasks whose requests are given, instead of made from a dataset by a template.

Import this module only where lm-eval is installed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from pma_jax.evaluation.tasks.requests import Request

_SPLIT = "test"


def make_task(name: str, requests: Sequence[Request], shots: int, metadata: Mapping[str, Any]) -> "RequestTask":
    """Make a task: multiple choice if any document has several choices, else the likelihood of one continuation.

    Args:
        name: Name in the results.
        requests: One for each document.
        shots: Number of examples in the contexts, as the results state it.
        metadata: Where the requests come from; `version` is the task's version.
    """
    is_choice = any(len(request.continuations) > 1 for request in requests)
    return RequestTask(name, requests, shots, metadata, "multiple_choice" if is_choice else "loglikelihood")


class RequestTask(ConfigurableTask):
    """A task whose documents are `Request`s. Metrics are lm-eval's of the same names."""

    def __init__(
        self, name: str, requests: Sequence[Request], shots: int, metadata: Mapping[str, Any], output_type: str
    ):
        self._requests = requests
        is_choice = output_type == "multiple_choice"
        # Not lm-eval's `perplexity`: its exponential overflows for the long answers of some tasks.
        metrics = ("acc", "acc_norm", "acc_bytes") if is_choice else ("acc",)
        super().__init__(
            config={
                "task": name,
                "output_type": output_type,
                "test_split": _SPLIT,
                "doc_to_text": "",
                "doc_to_target": "",
                "doc_to_choice": "choices" if is_choice else None,
                "target_delimiter": "",
                "num_fewshot": shots,
                "metric_list": [
                    {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics
                ],
                "metadata": dict(metadata),
            }
        )

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Make the dataset of the requests."""
        rows = [dataclasses.asdict(request) for request in self._requests]
        self.dataset = {_SPLIT: datasets.Dataset.from_list(rows)}

    def fewshot_docs(self) -> None:
        """Return no documents: contexts have their examples."""

    def fewshot_context(self, doc: Mapping[str, Any], *args: Any, **kwargs: Any) -> str:
        """Return an empty context: `construct_requests` takes the document's."""
        return ""

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        """Return the context of the gold choice."""
        return doc["contexts"][doc["answer"]]

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> int | str:
        """Return the index of the gold choice, or the continuation where there is one."""
        return doc["answer"] if self.OUTPUT_TYPE == "multiple_choice" else doc["continuations"][0]

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Return a request for each choice."""
        metadata = kwargs["metadata"]
        pairs = zip(doc["contexts"], doc["continuations"], strict=True)
        return [Instance("loglikelihood", doc, pair, index, metadata) for index, pair in enumerate(pairs)]
