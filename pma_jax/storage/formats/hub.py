"""Checkpoints on the Hugging Face hub (hf://org/repo@revision): list revisions and download one into the hub's cache.

Public model suites keep one checkpoint per branch. A revision may be a pattern: braces give a range of integers
(`step-{30000..34000..400}`) or a list of alternatives (`step{1000,2000}`), and `*` matches any text.
"""

import fnmatch
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError, error_line
from pma_jax.storage.formats.names import NameProgress, expand_braces, parse_name, stage_words
from pma_jax.storage.matching import match_files

PREFIX = "hf://"
_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@(.+))?")
# Weights in a supported format, and the small files that merges copy; no pickles, which can run code.
_DOWNLOADED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*")


def parse_address(address: str) -> tuple[str, str]:
    """Split hf://org/repo@revision into (org/repo, revision); the revision defaults to "main".

    Raises:
        UserError: The address has another form.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise UserError(f"{address}: is not hf://org/repo or hf://org/repo@revision")
    return parts[1], parts[2] or "main"


def expand_revisions(address: str) -> tuple[list[str], list[str]]:
    """Expand a revision pattern to the addresses that match it.

    Returns:
        The addresses, oldest first, and notes about missing revisions and mixed stages.

    Raises:
        UserError: The address is malformed, the hub cannot be reached, or no revision matches.
    """
    repo, pattern = parse_address(address)
    names = expand_braces(pattern)
    if len(names) == 1 and "*" not in names[0]:
        return [address], []

    def list_refs(api: Any) -> list[str]:
        refs = api.list_repo_refs(repo)
        return [ref.name for ref in (*refs.branches, *refs.tags)]

    existing = _call_api(address, list_refs)
    matches = {name: fnmatch.filter(existing, name) for name in names}
    revisions = list(dict.fromkeys(match for group in matches.values() for match in group))
    missing = [name for name, group in matches.items() if not group]
    if not revisions:
        raise UserError(f"{address}: no revision matches; {repo} has {', '.join(sorted(existing)[:5])} …")
    notes = [f"{repo} has no {', '.join(missing[:5])} ({len(missing)} missing)"] if missing else []
    progress = {name: parse_name(name) for name in revisions}
    left_out = [name for name in revisions if not progress[name].is_known]
    if len(left_out) < len(revisions):
        revisions = [name for name in revisions if name not in left_out]
        if left_out:
            notes.append(f"left out of {address}, no step in the name: {', '.join(left_out[:5])}")
    stages = sorted({progress[name].stage for name in revisions})
    if len(stages) > 1:
        notes.append(f"the revisions are of several stages or runs ({', '.join(stages[:5])}); merge within one")
    revisions.sort(key=lambda name: (progress[name].stage, progress[name].step or 0, name))
    return [f"{PREFIX}{repo}@{name}" for name in revisions], notes


def parse_progress(address: str) -> NameProgress:
    """Parse the progress from the revision's name, or from the repository's if the revision's states none."""
    repo, revision = parse_address(address)
    progress = parse_name(revision)
    return progress if progress.is_known else parse_name(repo.partition("/")[2])


def repo_and_stage(address: str) -> str | None:
    """Return what contains a revision: the repository and the stage or parallel run, such as "org/repo stage1".

    Return None if neither the revision nor the repository states progress or a stage: such a checkpoint may be merged
    with any other.
    """
    repo, revision = parse_address(address)
    progress = parse_name(revision)
    if progress.is_known:
        return f"{repo} {progress.stage}".strip()
    organization, _, name = repo.partition("/")
    of_repo = parse_name(name)
    if of_repo.is_known:
        return f"{organization} {of_repo.stage}".strip()
    words = stage_words(f"{name} {revision}")
    return f"{repo} {words}" if words else None


def download(address: str) -> Path:
    """Download one revision into the hub's cache unless it is cached, and return its directory, named by the commit.

    Raises:
        UserError: The revision cannot be downloaded, or contains only pickles.
    """
    repo, revision = parse_address(address)

    def fetch(api: Any) -> str:
        return api.snapshot_download(repo, revision=revision, allow_patterns=list(_DOWNLOADED))

    folder = Path(_call_api(address, fetch))
    if not any(match_files(folder, "*.safetensors")):
        names = _call_api(address, lambda api: api.list_repo_files(repo, revision=revision))
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        if pickles:
            raise UserError(
                f"{address}: contains only pickles ({pickles[0]}), which can run any code when loaded; if you trust "
                f"them, convert them: AutoModelForCausalLM.from_pretrained('{repo}', revision='{revision}')"
                ".save_pretrained('OUT')"
            )
    return folder


def _call_api(address: str, request: Callable[[Any], Any]) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"{address}: needs huggingface_hub; pip install 'pma-jax[hub]'") from None
    try:
        return request(huggingface_hub.HfApi())
    except Exception as error:
        # The client's exceptions depend on its HTTP library; the user needs only the reason for the failure.
        if isinstance(error, (TypeError, AttributeError, NameError, AssertionError)):  # a bug
            raise
        raise UserError(f"{address}: the request to the Hugging Face hub failed: {error_line(error)[:200]}") from error
