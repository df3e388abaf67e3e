"""Pages that are generated from the code when the site is built: configuration keys, the command line, notebooks.

They are written to docs/generated/, which git ignores. Docstrings are adapted to reStructuredText on the way.
"""

import argparse
import ast
import collections
import dataclasses
import inspect
import io
import json
import shutil
import tokenize
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from sphinx.application import Sphinx

from pma_jax.cli.arguments import parser
from pma_jax.config import Config

ROOT = Path(__file__).parents[2]
SECTIONS = ("Args:", "Attributes:", "Example:", "Examples:", "Note:", "Raises:", "Returns:", "Yields:")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the generator with Sphinx."""
    app.connect("builder-inited", generate)
    app.connect("autodoc-process-docstring", mark_literal_blocks, priority=100)  # before napoleon
    return {"parallel_read_safe": True}


def generate(app: Sphinx) -> None:
    """Write every generated page."""
    folder = Path(app.srcdir) / "generated"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "configuration.md").write_text(configuration_page())
    (folder / "commands.md").write_text(commands_page())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        # The notebooks use shell commands and magics, which the plain Python lexer rejects.
        notebook["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
        (folder / path.name).write_text(json.dumps(notebook))


def mark_literal_blocks(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make indented lines before the first section of a docstring a literal block: formulas, tables, file layouts."""
    end = next((i for i, line in enumerate(lines) if line in SECTIONS), len(lines))
    marked: list[str] = []
    literal = False
    for line in lines[:end]:
        if line.strip() and line.startswith("    ") != literal:
            literal = not literal
            marked += ["", "::", ""] if literal else [""]
        # A vertical bar, as in |c|², would begin a substitution.
        marked.append(line if literal or "`" in line else line.replace("|", "\\|"))
    lines[:end] = [*marked, ""]


def configuration_page() -> str:
    """Format every section and key of the configuration: type, default, and the comment of its field."""
    files = {inspect.getfile(type(getattr(Config(), section.name))) for section in dataclasses.fields(Config)}
    comments = {key: text for file in sorted(files) for key, text in field_comments(Path(file).read_text()).items()}
    lines = [
        "# Configuration keys\n",
        "Generated from `pma_jax/config`. Set a key in a configuration file (`c.training.seed = 1`) or on",
        "the command line (`--config.training.seed=1`). Unknown keys raise.\n",
    ]
    for section in dataclasses.fields(Config):
        default = getattr(Config(), section.name)
        lines += [f"## {section.name}\n", f"{inspect.getdoc(type(default))}\n"]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for field in dataclasses.fields(default):
            value = getattr(default, field.name)
            comment = comments[type(default).__name__, field.name].replace("|", "\\|")
            meaning = f"{comment[:1].upper()}{comment[1:].rstrip('.')}."
            lines.append(f"| `{section.name}.{field.name}` | `{format_type(field.type)}` | `{value!r}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def format_type(hint: Any) -> str:
    """Format a field's type, with its choices (Literal) or sign (Annotated)."""
    if get_origin(hint) is Literal:
        return ", ".join(get_args(hint))
    if get_origin(hint) is Annotated:
        return f"{get_args(hint)[0].__name__}, {get_args(hint)[1]}"
    return str(hint) if get_origin(hint) else hint.__name__


def field_comments(source: str) -> dict[tuple[str, str], str]:
    """Map (class, field) to the comment on the lines directly above the field and of its definition."""
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    source_lines = source.splitlines()
    found: dict[tuple[str, str], str] = collections.defaultdict(str)
    for node in ast.parse(source).body:
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                first = field.lineno
                while source_lines[first - 2].lstrip().startswith("#"):
                    first -= 1
                lines = range(first, (field.end_lineno or field.lineno) + 1)
                found[node.name, field.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return found


def commands_page() -> str:
    """Format the help of `pma` and of each verb."""
    top = parser()
    lines = ["# The command line\n", "Generated from the parser: what `pma --help` and `pma VERB --help` print.\n"]
    lines.append(f"```text\n{_help(top)}```\n")
    verbs = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    for name, verb in verbs.choices.items():
        lines += [f"## pma {name}\n", f"```text\n{_help(verb)}```\n"]
    return "\n".join(lines)


def _help(parser: argparse.ArgumentParser) -> str:
    width = 100  # argparse otherwise takes the terminal's
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=width)
    return parser.format_help()
