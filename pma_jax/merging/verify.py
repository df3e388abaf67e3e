"""Verify that stored arrays are what was written (`pma inspect --verify`): runs, snapshots, states and merges."""

from collections.abc import Iterator
from pathlib import Path

from etils import epath

from pma_jax.merging.engine import provenance
from pma_jax.runs import steps
from pma_jax.runs.directory import STEP_FOLDERS, Run, is_run, open_run
from pma_jax.storage.digests import METADATA_DIGEST_KEY
from pma_jax.storage.formats import orbax_read
from pma_jax.storage.paths import absolute_path


def verify(path: epath.PathLike, with_sources: bool = False) -> list[str]:
    """Read all arrays again, compare them with their recorded digests, and list the differences, one line each.

    Args:
        path: A run (all its snapshots, block means, states and records), a snapshot, a state, or a merge.
        with_sources: For a merge, also read its sources.

    Raises:
        ValueError: There are no digests to compare with, or a source no longer exists.
    """
    folder = absolute_path(path)
    if is_run(folder):
        return list(_verify_run(open_run(folder)))
    if (folder / provenance.FILE_NAME).exists() or not (folder / steps.METADATA_FILE).exists():
        return provenance.verify(str(folder), with_sources)
    if METADATA_DIGEST_KEY not in steps.read_metadata(folder, ()):
        raise ValueError(f"{folder} has no digests: it was imported, or written by an earlier version")
    return list(_verify_step(folder))


def _verify_run(run: Run) -> Iterator[str]:
    for read in (lambda: run.metadata, lambda: run.metrics):
        try:
            read()
        except ValueError as error:
            yield str(error)
    for name in STEP_FOLDERS:
        for path in steps.published(run.path / name):
            try:
                has_digests = METADATA_DIGEST_KEY in steps.read_metadata(path, ())
            except ValueError as error:
                yield str(error)
                continue
            if has_digests:
                yield from _verify_step(path)
            else:
                yield f"{path} has no digests: an earlier version wrote it"


def _verify_step(path: epath.Path) -> Iterator[str]:
    metadata = steps.read_metadata(path, ())
    recorded = metadata["leaves"]
    # A snapshot has one item, "params". In a state, a leaf's name starts with its item and a part of that item.
    is_state = "position" in metadata
    parts = {"/".join(name.split(".")[:2]) for name in recorded} if is_state else {"params"}
    compared: set[str] = set()
    for part in sorted(parts):
        prefix = f"{part.split('/')[0]}." if is_state else ""
        try:
            source = orbax_read.open_orbax(Path(path), part)
        except (ValueError, OSError) as error:
            yield f"{path}: {part} cannot be read: {error}"
            compared |= {name for name in recorded if name.startswith(part.replace("/", "."))}
            continue
        for name in source.leaves:
            compared.add(prefix + name)
            try:
                digest = provenance.compute_leaf_digest(source, name, metadata["checksum"])
            except (ValueError, OSError) as error:
                yield f"{path}: {name} cannot be read: {error}"
                continue
            if recorded.get(prefix + name) != digest:
                yield f"{path}: {name} is not what was written ({provenance.format_leaf_files(source, name)})"
    yield from (f"{path}: {name} is missing" for name in sorted(recorded.keys() - compared))
