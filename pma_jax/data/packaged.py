"""Packaged text: the Python sources of the standard library and of installed packages, without a download.

`data.package` names a package, or one of the corpora of `NAMED`. Each file is a document.
"""

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from pma_jax.config.errors import UserError
from pma_jax.storage.paths import raise_unless_absent

STUDIES = "stdlib-without-tests"  # the text of the experiments
LIBRARIES = "libraries-without-tests"  # for runs of more tokens than STUDIES has
# Requirements of pma_jax, so that every installation has them, at the versions of constraints.txt if it was used.
_LIBRARIES = (
    "bokeh",
    "etils",
    "flax",
    "grain",
    "jax",
    "jinja2",
    "matplotlib",
    "ml_collections",
    "numpy",
    "optax",
    "orbax",
    "pyarrow",
    "rich",
    "scipy",
    "tensorboardX",
    "tensorstore",
)
_TEST_FOLDERS = ("test", "tests", "_tests", "idle_test")
_OTHER_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


def list_files(package: str) -> dict[str, Path]:
    """Return the .py files of a package or of a named corpus: path by document name, in the order of names.

    Args:
        package: Name of an installed package, such as scipy; or a name of `NAMED`; or empty: all of Python's standard
            library, half of whose text is its tests.

    Raises:
        UserError: The package is not installed, or has no .py files.
    """
    files = dict(NAMED[package]() if package in NAMED else _walk(_package_folder(package)))
    if not files:
        raise UserError(
            f"data.package: no .py files in {package or 'the standard library'}: name another or set data.source=files"
        )
    return dict(sorted(files.items()))


def _walk(root: Path, left_out: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each .py file below `root`, but not of those in folders that are left out."""
    for folder, subfolders, names in os.walk(root, onerror=raise_unless_absent):
        subfolders[:] = [name for name in subfolders if name not in (*_OTHER_FOLDERS, *left_out)]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


def _package_folder(package: str) -> Path:
    # Dotted names are refused: find_spec would import their parent package.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"data.package: no package {package!r} is installed in this Python: install it, or name another or one of "
            f"{', '.join(filter(None, NAMED))}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _standard_library() -> Iterator[tuple[str, Path]]:
    return _walk(Path(sysconfig.get_path("stdlib")))


def _standard_library_without_tests() -> Iterator[tuple[str, Path]]:
    """Yield the files of the modules that Python documents as its own.

    These exclude files that a build or a distribution of Python adds. A distribution that omits modules, such as
    tkinter, has another text, and so another digest.
    """
    for name, path in _walk(Path(sysconfig.get_path("stdlib")), _TEST_FOLDERS):
        if name.partition("/")[0].removesuffix(".py") in sys.stdlib_module_names:
            yield name, path


def _libraries_without_tests() -> Iterator[tuple[str, Path]]:
    for package in _LIBRARIES:
        for name, path in _walk(_package_folder(package), _TEST_FOLDERS):
            yield f"{package}/{name}", path


NAMED: dict[str, Callable[[], Iterator[tuple[str, Path]]]] = {
    "": _standard_library,
    STUDIES: _standard_library_without_tests,
    LIBRARIES: _libraries_without_tests,
}
