"""A digest of all that tasks may ask: sweeps that are resumed compare it, before a model is asked."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PLACES = ("dataset_path", "dataset_kwargs")  # where documents are read from: their content is in the digest


def digest_tasks(loaded: Mapping[str, Any]) -> str:
    """Return a SHA-256 (first 16 hex digits) of tasks (`load_tasks`): their definitions and all of their documents.

    It does not depend on the number of documents that are scored, and changes with each file of Python (`!function`)
    that defines a function of a task; not with files that such a file imports.
    """
    digest = hashlib.sha256()
    for name, group in sorted(loaded["groups"].items()):
        digest.update(_as_json([name, group.to_dict()]))
    for name, task in sorted(loaded["tasks"].items()):
        config = task.config.to_dict(keep_callable=True)
        digest.update(_as_json([name, {key: value for key, value in config.items() if key not in _PLACES}]))
        for doc in task.eval_docs:
            digest.update(_as_json(doc))
        if task.get_config("num_fewshot"):
            sampler = getattr(task, "sampler", None)  # none where the requests are given, with their examples
            digest.update(_as_json(list(getattr(sampler, "df", None) or ())))
    return digest.hexdigest()[:16]


def _as_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=_describe).encode()


def _describe(value: Any) -> str:
    """Describe a value that is no JSON value; a function by the text of its file."""
    if not callable(value):
        return str(value)
    function = getattr(value, "func", value)  # of functools.partial
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    text = Path(file).read_bytes() if file and Path(file).exists() else b""
    return f"{getattr(function, '__qualname__', type(function).__name__)} {hashlib.sha256(text).hexdigest()}"
