"""Merge Orbax checkpoints of every kind with `pma merge`, and open each result with Orbax, as their owner would.

A cell is an interface of Orbax, options of its storage and a tree. For each, three checkpoints are saved; the expected
merge is computed in float64 from what Orbax restores of them; and the output must, in Orbax,

- restore without being told the structure: the same containers, types and dtypes of leaves as an input, and the values
- restore into the tree that was saved, on another mesh too
- be recognised as a checkpoint, without a warning.

A second part damages or changes stored arrays: the merge must be refused with a true reason, or be right.

    python experiments/faults/foreign_orbax.py [--only TEXT] [--package ROOT]

One line for each cell, then the counts; exit status 1 if a cell failed. It takes about ten minutes on 2 cores.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import contextlib
import io
import logging
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from orbax.checkpoint import v1 as ocp

sys.path.insert(0, str(Path(__file__).parent))

from merge_command import FLOATS, WEIGHTS, check_leaf, merge
from orbax_damage import damage_cells
from orbax_writers import STORAGES, TREES, WRITERS, Tree, Writer

ROOT = Path(__file__).parent.parent.parent


def check_values(got: Tree, inputs: list[Tree], weights: np.ndarray) -> None:
    """Compare a restored merge with the float64 merge of the restored inputs: containers, types, dtypes and values."""
    is_leaf = _is_key
    assert jax.tree.structure(got, is_leaf=is_leaf) == jax.tree.structure(inputs[0], is_leaf=is_leaf), (
        f"the structure is {jax.tree.structure(got)} instead of {jax.tree.structure(inputs[0])}"
    )
    leaves = [jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf) for tree in (got, *inputs)]
    for (path, value), *others in zip(*leaves, strict=True):
        name, first = jax.tree_util.keystr(path), others[0][1]
        assert type(value) is type(first), f"{name} is a {type(value).__name__} instead of a {type(first).__name__}"
        if isinstance(first, str):
            assert value == first, f"{name} is {value!r} instead of {first!r}"
            continue
        if _is_key(first):
            assert value.dtype == first.dtype, f"{name} is {value.dtype} instead of {first.dtype}"
            value, *arrays = (jax.random.key_data(key) for key in (value, *[other for _, other in others]))
        else:
            arrays = [other for _, other in others]
        if isinstance(first, jax.Array) and not _is_key(first):
            assert value.sharding.is_equivalent_to(first.sharding, value.ndim), f"{name} has another sharding"
        check_leaf(name, np.asarray(value), [np.asarray(array) for array in arrays], weights)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@contextlib.contextmanager
def no_complaints() -> Iterator[None]:
    """Fail if the block logs or prints that a checkpoint is malformed, or that its data are missing."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    loggers = [logging.getLogger(), logging.getLogger("absl")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    said = text.getvalue() + "".join(str(warning.message) for warning in caught)
    assert "not found" not in said and "malformed" not in said, f"Orbax warns: {said[:300]}"


def abstract(tree: Tree, sharding: jax.sharding.Sharding | None = None) -> Tree:
    """Return the shapes and dtypes of a tree's JAX arrays, and the other leaves as they are."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or _is_key(leaf):
            return leaf
        target = sharding if sharding is not None and leaf.ndim == 2 else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)

    return jax.tree.map(one, tree, is_leaf=_is_key)


def check_cell(
    package: Path, root: Path, writer: Writer, storage: dict[str, Any], trees: list[Tree], select: Any
) -> str:
    """Save, merge and restore one cell; return "right".

    Raises:
        AssertionError: The merge is refused, or what Orbax restores is wrong.
    """
    paths = [writer.save(root / f"{number + 1}000", tree, storage) for number, tree in enumerate(trees)]
    inputs = [select(writer.restore(path)) for path in paths]
    result = merge(package, paths, root / "out")
    assert result.status == 0, f"refused: {result.text.strip()[-300:]}"
    with no_complaints():
        check_values(select(writer.restore(root / "out")), inputs, WEIGHTS)
    assert ocp.is_orbax_checkpoint(str(root / "out")), "v1.is_orbax_checkpoint says no"
    from orbax.checkpoint._src.path.format_utils import is_orbax_checkpoint

    assert is_orbax_checkpoint(root / "out"), "utils.is_orbax_checkpoint says no"
    for folder in (root / "out").iterdir():
        if (folder / "_METADATA").exists():
            assert is_orbax_checkpoint(folder), "utils.is_orbax_checkpoint says no to the item"
    if select(trees[0]) is trees[0]:
        _check_targets(writer, root / "out", paths, trees)
    return "right"


def _check_targets(writer: Writer, out: Path, paths: list[Path], trees: list[Tree]) -> None:
    """Restore the output into the tree that was saved, and onto another mesh, where Orbax can do so with an input."""
    turned = jax.sharding.NamedSharding(jax.make_mesh((2, 4), ("a", "b")), jax.P("b", "a"))
    divisible = all(
        leaf.shape[0] % 4 == 0 and leaf.shape[1] % 2 == 0
        for leaf in jax.tree.leaves(trees[0])
        if isinstance(leaf, jax.Array) and leaf.ndim == 2
    )
    for sharding in (None, turned) if divisible else (None,):
        target = abstract(trees[0], sharding)
        try:
            inputs = [writer.restore_into(path, target) for path in paths]
        except Exception:  # Orbax cannot restore its own checkpoint into this tree.
            continue
        with no_complaints():
            check_values(writer.restore_into(out, target), inputs, WEIGHTS)


class Cell(NamedTuple):
    """A cell of the matrix: its name, and a function of (package, empty directory) that returns the verdict."""

    name: str
    run: Callable[[Path, Path], str]


def _tree_cell(writer: str, storage: str, tree: str, place: Any = None, select: Any = None) -> Cell:
    def run(package: Path, root: Path) -> str:
        trees = [TREES[tree](np.random.default_rng(seed)) for seed in range(len(WEIGHTS))]
        trees = [jax.tree.map(place, one) for one in trees] if place else trees
        keep = select or (lambda one: one)
        return check_cell(package, root, WRITERS[writer], STORAGES[storage], trees, keep)

    return Cell(f"{writer} | {storage} | {tree}", run)


def _place(spec: tuple[str | None, ...]) -> Callable[[Any], Any]:
    mesh = jax.make_mesh((4, 2), ("x", "y"))

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, jax.P(*spec) if leaf.ndim == 2 else jax.P()))

    return place


def _dtype_cell(writer: str, dtype: str) -> Cell:
    """Merge into another dtype: arrays have it, Python numbers and integers are as they were."""

    def run(package: Path, root: Path) -> str:
        kind = WRITERS[writer]
        trees = [TREES["everything"](np.random.default_rng(seed)) for seed in range(len(WEIGHTS))]
        paths = [kind.save(root / f"{number + 1}000", tree, {}) for number, tree in enumerate(trees)]
        result = merge(package, paths, root / "out", "--dtype", dtype)
        assert result.status == 0, f"refused: {result.text.strip()[-300:]}"
        got = jax.tree_util.tree_leaves_with_path(kind.restore(root / "out"), is_leaf=_is_key)
        inputs = [jax.tree_util.tree_leaves_with_path(kind.restore(path), is_leaf=_is_key) for path in paths]
        for (path, value), *others in zip(got, *inputs, strict=True):
            first = others[0][1]
            assert type(value) is type(first), f"{path} is a {type(value).__name__}"
            if isinstance(first, str) or _is_key(first):
                continue
            arrays = [np.asarray(array) for _, array in others]
            if arrays[0].dtype in FLOATS and not isinstance(first, float):
                assert np.asarray(value).dtype == dtype, f"{path} is {np.asarray(value).dtype}"
                exact = sum(c * array.astype(np.float64) for c, array in zip(WEIGHTS, arrays, strict=True))
                np.testing.assert_allclose(
                    np.asarray(value).astype(np.float64), exact, rtol=float(ml_dtypes.finfo(dtype).eps), atol=1e-6
                )
            else:
                check_leaf(str(path), np.asarray(value), arrays, WEIGHTS)
        return "right"

    return Cell(f"{writer} | --dtype {dtype} | everything", run)


def cells() -> list[Cell]:
    """List the matrix."""
    made = []
    for tree in TREES:
        for writer in ("v1 save", "v0 pytree"):
            select = None
            if tree == "flax TrainState":
                select = lambda one: {"params": one["params"] if isinstance(one, dict) else one.params}  # noqa: E731
            made.append(_tree_cell(writer, "default", tree, select=select))
    for writer in WRITERS:
        for storage in ("default", "files", "raw files", "chunks"):
            made.append(_tree_cell(writer, storage, "everything"))
    for storage in STORAGES:
        made += [_tree_cell(writer, storage, "float32") for writer in ("v1 save", "v0 pytree")]
    for spec in [("x", None), (None, "x"), ("x", "y"), (None, None)]:
        for writer, storage in (
            ("v1 save", "default"),
            ("v1 save", "raw files"),
            ("v0 pytree", "default"),
            ("manager", "default"),
        ):
            cell = _tree_cell(writer, storage, "bfloat16", _place(spec))
            made.append(cell._replace(name=f"{cell.name} | sharded {spec}"))
    made += [_dtype_cell(writer, dtype) for writer in ("v1 save", "v0 pytree") for dtype in ("float32", "bfloat16")]
    return [*{cell.name: cell for cell in made}.values(), *(Cell(*damage) for damage in damage_cells())]


def main() -> int:
    """Run the cells, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only the cells whose name contains this text")
    parser.add_argument("--package", type=Path, default=ROOT, help="the checkout whose `pma` is run")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    logging.getLogger("absl").setLevel(logging.WARNING)
    verdicts: Counter[str] = Counter()
    for cell in cells():
        if arguments.only not in cell.name:
            continue
        root = Path(tempfile.mkdtemp(prefix="foreign-orbax-"))
        try:
            verdict = cell.run(arguments.package, root)
        except AssertionError as error:
            verdict = f"WRONG: {(str(error) or repr(error)).splitlines()[0][:300]}"
        except Exception as error:  # what Orbax raises when it restores the output
            verdict = f"WRONG: {type(error).__name__}: {str(error).splitlines()[0][:300]}"
            if os.environ.get("PMA_DEBUG"):
                traceback.print_exc()
        finally:
            shutil.rmtree(root, ignore_errors=True)
        verdicts[verdict.split(":")[0]] += 1
        print(f"{cell.name}: {verdict}", flush=True)
    print(f"{sum(verdicts.values())} cells: " + ", ".join(f"{count} {name}" for name, count in verdicts.most_common()))
    return 1 if verdicts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
