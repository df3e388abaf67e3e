"""Verify the stored arrays of runs, snapshots, states and merges against their digests (`pma inspect --verify`)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from etils import epath

from pma_jax.config.errors import DamageError, UserError
from pma_jax.merging.engine import provenance
from pma_jax.runs import steps
from pma_jax.runs.directory import Run, is_run, open_run
from pma_jax.storage.digests import METADATA_DIGEST_KEY, checkpoint_digest, file_sha256
from pma_jax.storage.formats import orbax_read
from pma_jax.storage.formats.open import open_source
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.paths import absolute_path, as_path, exists


def verify(path: epath.PathLike, with_sources: bool = False) -> list[str]:
    """Read all arrays, compare them with their recorded digests, and return one line per problem; empty if intact.

    Args:
        path: A run (all its snapshots, block means, states and metrics records), a snapshot, a state, or a merge.
        with_sources: Whether to also verify the sources of a merge, at the addresses in its provenance.

    Raises:
        OSError: A file cannot be read, which says nothing about its content.
        UserError: No digests are recorded, or a merge or one of its sources cannot be opened as a checkpoint.
    """
    folder = absolute_path(path)
    if is_run(folder):
        return list(_verify_run(open_run(folder)))
    if exists(folder / provenance.FILE_NAME) or not exists(folder / steps.METADATA_FILE):
        return list(_verify_merge(as_path(folder), with_sources))
    return list(_verify_step(folder))


def _verify_run(run: Run) -> Iterator[str]:
    for read in (lambda: run.metadata, lambda: run.metrics):
        try:
            read()
        except UserError as error:
            yield str(error)
    for name in run.step_folders:
        for path in steps.published_steps(run.path / name):
            try:
                yield from _verify_step(path)
            except UserError as error:
                yield str(error)


def _verify_step(path: epath.Path) -> Iterator[str]:
    metadata = steps.read_metadata(path, ())
    if METADATA_DIGEST_KEY not in metadata:
        raise UserError(f"{path} has no digests: it was imported, or written by an earlier version")
    # A snapshot has one item, "params". In a state, a leaf's name starts with its item and a part of that item.
    is_state = "position" in metadata
    digests_of: dict[str, dict[str, dict[str, str]]] = {}  # item -> part -> leaf -> digest
    for name, digest in metadata["leaves"].items():
        part = "/".join(name.split(".")[:2]) if is_state else "params"
        parts = digests_of.setdefault(part.partition("/")[0], {})
        parts.setdefault(part, {})[name.partition(".")[2] if is_state else name] = digest
    for item in sorted(digests_of):
        yield from _verify_parts(path, digests_of[item])


def _verify_parts(path: epath.Path, digests_of: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Verify parts of one item, all at once, or each alone if they cannot be opened, to name those that cannot."""
    try:
        source = orbax_read.open_orbax(as_path(path), sorted(digests_of))
    except (UserError, FileNotFoundError, NotADirectoryError) as error:
        if len(digests_of) == 1:
            yield f"{path}: {next(iter(digests_of))} cannot be read: {error}"
            return
        for part, digests in sorted(digests_of.items()):
            yield from _verify_parts(path, {part: digests})
        return
    digests_of_item = {name: digest for digests in digests_of.values() for name, digest in digests.items()}
    yield from _verify_leaves(str(path), source, digests_of_item)


def _verify_merge(directory: Path, with_sources: bool) -> Iterator[str]:
    recorded = provenance.read(directory)
    yield from _verify_checkpoint(directory.name, _open_recorded(directory, recorded["leaves"]), recorded)
    for name, digest in recorded["files"].items():
        path = directory / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            yield f"{provenance.FILE_NAME}: names {name[:80]!r}, which is outside the checkpoint"
        elif not path.is_file():
            yield f"{name}: is missing"
        elif file_sha256(path) != digest:
            yield f"{name}: has changed"
    for entry in recorded["sources"] if with_sources else []:
        source = _open_recorded(entry["source"], entry["leaves"])
        # The merge may have read one subtree of several.
        read = {name: leaf for name, leaf in source.leaves.items() if name in entry["leaves"]}
        yield from _verify_checkpoint(entry["source"], replace(source, leaves=read), entry)


def _open_recorded(address: str | Path, names: Iterable[str]) -> CheckpointSource:
    """Open a checkpoint with the subtrees that hold the recorded leaves, which a command may have named."""
    source, problem = None, None
    try:
        source = open_source(address)
    except DamageError:
        raise
    except UserError as error:  # it is not clear which subtree is meant
        problem = error
    if source is not None and set(names) <= source.leaves.keys():
        return source
    top_keys = dict.fromkeys(name.split("/" if "/" in name else ".")[0] for name in names)
    try:
        return open_source(address, list(top_keys))
    except UserError:
        if source is None:
            raise problem or AssertionError from None
        return source


def _verify_checkpoint(what: str, source: CheckpointSource, recorded: Mapping[str, Any]) -> Iterator[str]:
    problems = list(_verify_leaves(what, source, recorded["leaves"]))
    if not problems and checkpoint_digest(source.leaves, recorded["leaves"]) != recorded["digest"]:
        problems.append(f"{what}: a shape or dtype has changed")
    yield from problems


def _verify_leaves(what: str, source: CheckpointSource, digests: Mapping[str, str]) -> Iterator[str]:
    """Compare the leaves of a source with their recorded digests; `what` names the source in messages."""
    for name in source.leaves:
        try:
            digest = provenance.compute_leaf_digest(source, name)
        except UserError as error:
            yield f"{what}: {name} cannot be read: {error}"
            continue
        if digests.get(name) != digest:
            yield f"{what}: {name} does not match its digest ({provenance.format_leaf_files(source, name)})"
    yield from (f"{what}: {name} is missing" for name in digests if name not in source.leaves)
