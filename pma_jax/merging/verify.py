"""Whether what lies on disk is what was written: `pma inspect --verify`, for runs, snapshots, states and merges."""

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
    """Read everything again and compare it with its digests; every difference, one line each.

    Args:
        path: a run (all its snapshots, block means, states and records), a snapshot, a state, or a merge.
        with_sources: of a merge, read what it was made from too.

    Raises:
        ValueError: there is nothing to compare with: no digests, or a source is gone.
    """
    folder = absolute_path(path)
    if is_run(folder):
        return list(_run(open_run(folder)))
    if (folder / provenance.FILE_NAME).exists() or not (folder / steps.METADATA_FILE).exists():
        return provenance.verify(str(folder), with_sources)
    if METADATA_DIGEST_KEY not in steps.read_metadata(folder, ()):
        raise ValueError(f"{folder} has no digests: it was imported, or written by an earlier version")
    return list(_step(folder))


def _run(run: Run) -> Iterator[str]:
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
                yield from _step(path)
            else:
                yield f"{path} has no digests: an earlier version wrote it"


def _step(path: epath.Path) -> Iterator[str]:
    facts = steps.read_metadata(path, ())
    names = facts["leaves"]
    # Of a snapshot the leaves are those of its one item; of a state they begin with the item, and then a part of it.
    of_state = "position" in facts
    parts = {"/".join(name.split(".")[:2]) for name in names} if of_state else {"params"}
    seen: set[str] = set()
    for part in sorted(parts):
        prefix = f"{part.split('/')[0]}." if of_state else ""
        try:
            source = orbax_read.open_orbax(Path(path), part)
        except (ValueError, OSError) as error:
            yield f"{path}: {part} cannot be read: {error}"
            seen |= {name for name in names if name.startswith(part.replace("/", "."))}
            continue
        for name in source.leaves:
            seen.add(prefix + name)
            try:
                digest = provenance.compute_leaf_digest(source, name, facts["checksum"])
            except (ValueError, OSError) as error:
                yield f"{path}: {name} cannot be read: {error}"
                continue
            if names.get(prefix + name) != digest:
                yield f"{path}: {name} is not what was written ({provenance.format_leaf_files(source, name)})"
    yield from (f"{path}: {name} is missing" for name in sorted(names.keys() - seen))
