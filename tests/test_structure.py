"""Check the structure of the package: imports between layers, cycles, loose modules, sizes of files, declared packages.

`FLOORS` documents the layers: a file imports from its own floor and from lower floors.
"""

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import pma_jax

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pma_jax"
FLOORS = (
    ("config", "runtime"),
    ("storage",),
    ("data", "model", "replicas"),
    ("runs",),
    ("merging",),
    ("evaluation",),
    ("training",),
    ("analysis", "interop", "planning"),
    ("launch",),
    ("studies",),
    ("reporting",),
    ("cli",),
)
FLOOR = {folder: number for number, floor in enumerate(FLOORS) for folder in floor}
FILE_LINES, FUNCTION_LINES = 400, 60
# Distribution name -> imported name, where they differ.
IMPORT_NAMES = {
    "orbax-checkpoint": "orbax",
    "ml-collections": "ml_collections",
    "tensorboardx": "tensorboardX",
    "huggingface-hub": "huggingface_hub",
    "pyyaml": "yaml",
    "google-cloud-storage": "google",
    "absl-py": "absl",
}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imports(path: Path) -> Iterator[str]:
    """Yield the modules of this package, or the names of other packages, that a file imports anywhere in its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in submodules)


@functools.cache
def _graph() -> dict[str, set[str]]:
    """Return the modules that each module imports.

    The root's names are loaded on first use, and importing any module runs the root, so it is on no floor.
    """
    return {
        module: {name for name in _imports(path) if name in MODULES and name != "pma_jax"}
        for module, path in MODULES.items()
        if module != "pma_jax"
    }


def _folder(module: str) -> str:
    return _module(MODULES[module].parent)


def _find_cycle(graph: Mapping[str, set[str]]) -> list[str] | None:
    """Return one cycle of a directed graph, or None."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for target in sorted(graph.get(node, ())):
            if cycle := visit(target, [*path, node]):
                return cycle
        done.add(node)
        return None

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), None)


def test_root_contains_only_init_and_every_folder_has_a_floor():
    assert [path.name for path in PACKAGE.glob("*.py")] == ["__init__.py"]
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= FLOOR.keys()


def test_no_import_from_a_higher_floor():
    upward = [
        f"{module} imports {target}"
        for module, targets in _graph().items()
        for target in targets
        if FLOOR[module.split(".")[1]] < FLOOR[target.split(".")[1]]
    ]
    assert not upward


def test_no_import_cycle_between_files():
    assert _find_cycle(_graph()) is None


def test_no_import_cycle_between_folders():
    folders: dict[str, set[str]] = {}
    for module, targets in _graph().items():
        folders.setdefault(_folder(module), set()).update(_folder(target) for target in targets)
    for name, targets in folders.items():
        targets.discard(name)
    assert _find_cycle(folders) is None
    rooms: dict[str, set[str]] = {}
    for module, targets in _graph().items():
        room = module.split(".")[1]
        rooms.setdefault(room, set()).update(target.split(".")[1] for target in targets)
        rooms[room].discard(room)
    assert _find_cycle(rooms) is None


@pytest.mark.parametrize("cycle", [{"a": {"b"}, "b": {"a"}}, {"a": {"b"}, "b": {"c"}, "c": {"b"}}, {"a": {"a"}}])
def test_find_cycle_detects_a_cycle(cycle):
    assert _find_cycle(cycle)
    assert _find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_class_names_are_unique():
    classes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in classes.items() if len(modules) > 1}


def test_files_and_functions_are_short():
    long = []
    for path in (*MODULES.values(), *sorted((ROOT / "experiments").rglob("*.py"))):
        text = path.read_text()
        if len(text.splitlines()) > FILE_LINES:
            long.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert not long


def _distributions(requirements: list[str]) -> set[str]:
    names = (re.split(r"[<>=!~\[; ]", text, maxsplit=1)[0].lower() for text in requirements)
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def test_imported_packages_are_declared_and_declared_packages_are_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    imported = {name.split(".")[0] for path in MODULES.values() for name in _imports(path)}
    imported -= {"pma_jax", *sys.stdlib_module_names}
    required = _distributions(project["dependencies"])
    optional = _distributions([text for extra in project["optional-dependencies"].values() for text in extra])
    assert imported <= required | optional
    # jax imports jaxlib; it is declared to exclude versions with defects.
    assert required - {"jaxlib"} <= imported


def test_one_version_is_named_everywhere_and_a_tag_of_another_is_refused():
    citation = re.search(r"^version: (.+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation and citation[1] == importlib.metadata.version("pma-jax") == pma_jax.__version__
    command = [sys.executable, ROOT / ".ci" / "check_version.py", "v99.0.0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("error: 99.0.0 in the tag, ")
    assert f"{pma_jax.__version__} in CITATION.cff" in result.stderr and result.stderr.count("\n") == 1
