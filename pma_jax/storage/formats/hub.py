"""Checkpoints on the Hugging Face hub: hf://org/repo@revision, through huggingface_hub and its cache.

Public suites keep a checkpoint a branch. A revision may be a pattern: braces count (`step-{3000000..3400000..40000}`)
or choose (`step{1000,2000}`), a star stands for anything.
"""

import fnmatch
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pma_jax.storage.formats.leaves import Source
from pma_jax.storage.formats.open import open_source, progress_from_name

_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@(.+))?")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
_STAGE = re.compile(r"(?:stage|ingredient|phase|run)-?\d+", re.IGNORECASE)
_MOST_REVISIONS = 10_000
# Weights in a format that is read, and the small files that are carried over; never a pickle.
_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*")


def expand(address: str) -> tuple[list[str], list[str]]:
    """The addresses that a pattern stands for, oldest first, and notes about what is missing or crosses a stage.

    Raises:
        ValueError: the address is not one, the hub cannot be asked, or nothing matches; one line.
    """
    repo, pattern = _parse(address)
    wanted = braces(pattern)
    if len(wanted) == 1 and "*" not in wanted[0]:
        return [address], []
    existing = _ask(address, lambda api: [ref.name for refs in _refs(api, repo) for ref in refs])
    found, missing = [], []
    for name in wanted:
        matches = fnmatch.filter(existing, name)
        found += [match for match in matches if match not in found]
        missing += [] if matches else [name]
    if not found:
        raise ValueError(f"{address}: no revision matches; {repo} has {', '.join(sorted(existing)[:5])} …")
    notes = [f"{repo} has no {', '.join(missing[:5])} ({len(missing)} missing)"] if missing else []
    stages = sorted({" ".join(_STAGE.findall(name)) for name in found})
    if len(stages) > 1:
        notes.append(f"the revisions are of several stages or runs ({', '.join(stages[:5])}); merge within one")
    found.sort(key=lambda name: (_STAGE.findall(name), progress_from_name(name)[0] or 0, name))
    return [f"hf://{repo}@{name}" for name in found], notes


def stage(address: str) -> str:
    """The repository, and the stage or parallel run that a revision's name tells ("stage1")."""
    repo, revision = _parse(address)
    return " ".join([repo, *_STAGE.findall(revision)])


def braces(pattern: str) -> list[str]:
    """Expands {a..b}, {a..b..step} and {a,b,c} as a shell does.

    Raises:
        ValueError: a range is empty or stands for too many.
    """
    parts: list[list[str]] = []
    for index, part in enumerate(_BRACES.split(pattern)):
        if index % 2 == 0:
            parts.append([part])
            continue
        count = _RANGE.fullmatch(part)
        if count is None:
            parts.append(part.split(","))
            continue
        first, last, step = int(count[1]), int(count[2]), int(count[3] or 1)
        if last < first or step < 1 or (last - first) // step >= _MOST_REVISIONS:
            raise ValueError(f"{{{part}}} stands for no revisions, or for more than {_MOST_REVISIONS}")
        parts.append([str(number) for number in range(first, last + 1, step)])
    total = 1
    for choices in parts:
        total *= len(choices)
    if total > _MOST_REVISIONS:
        raise ValueError(f"{pattern[:80]} stands for more than {_MOST_REVISIONS} revisions")
    return ["".join(choice) for choice in itertools.product(*parts)]


def open_revision(address: str, subtree: str | None = None) -> Source:
    """Fetches one revision into the hub's cache, if it is not there, and opens it.

    Raises:
        ValueError: it cannot be fetched, or holds only pickles; one line.
    """
    repo, revision = _parse(address)

    def fetch(api: Any) -> str:
        return api.snapshot_download(repo, revision=revision, allow_patterns=list(_WANTED))

    folder = Path(_ask(address, fetch))
    if not any(folder.glob("*.safetensors")):
        names = _ask(address, lambda api: api.list_repo_files(repo, revision=revision))
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        if pickles:
            raise ValueError(
                f"{address}: has only pickles ({pickles[0]}), which can run any code when opened; convert it where you "
                f"trust it: AutoModel.from_pretrained('{repo}', revision='{revision}').save_pretrained('OUT')"
            )
    source = open_source(folder, subtree)
    step, tokens = progress_from_name(revision)
    # The folder is named by the commit, so the provenance can name exactly what was read.
    return replace(source, origin=f"hf://{repo}@{folder.name}", step=step, tokens=tokens, notes=source.notes)


def named(address: str, subtree: str | None = None) -> Source:
    """A revision by its name alone: a suite has hundreds, and those that take no part need not be fetched.

    Its step and tokens are known, its leaves are not: `fetched` gives them.
    """
    step, tokens = progress_from_name(_parse(address)[1])
    return Source("named", Path(), address, {}, {}, tokens, step, metadata={"subtree": subtree})


def fetched(source: Source) -> Source:
    """The checkpoint that `named` stands for, with the position that it has there; any other as it is.

    Raises:
        ValueError: as `open_revision` does.
    """
    if source.kind != "named":
        return source
    opened = open_revision(source.origin, source.metadata["subtree"])
    return replace(opened, tokens=source.tokens, step=source.step)


def _parse(address: str) -> tuple[str, str]:
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"{address}: is not hf://org/repo or hf://org/repo@revision")
    return found[1], found[2] or "main"


def _refs(api: Any, repo: str) -> list[list[Any]]:
    refs = api.list_repo_refs(repo)
    return [refs.branches, refs.tags]


def _ask(address: str, question: Callable[[Any], Any]) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(f"{address}: needs huggingface_hub; pip install 'pma-jax[hub]'") from None
    try:
        return question(huggingface_hub.HfApi())
    except Exception as error:
        # What the hub's client raises depends on its HTTP library; to a user each is the same: it could not be fetched.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"{address}: cannot be fetched: {reason}") from error
