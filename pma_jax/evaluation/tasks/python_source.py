"""Functions and closing brackets of Python source, from which questions are made."""

import ast
import dataclasses
import io
import textwrap
import tokenize
import warnings
from collections.abc import Iterator

_OPENING = {"(": ")", "[": "]", "{": "}"}


@dataclasses.dataclass(frozen=True)
class SourceFunction:
    """A function, dedented."""

    signature: str  # its lines up to the first of the body, without the last newline
    summary: str  # first line of its documentation string; empty: it has none
    head: str  # all lines before the last statement, without the last newline
    last_line: str  # its last statement, without indentation; empty: it is compound or has several lines
    indentation: str  # of the last statement


@dataclasses.dataclass(frozen=True)
class ClosingBrackets:
    """Closing brackets that stand side by side."""

    before: str  # the source from the first line of the outermost open bracket up to the closing brackets
    preceding: str  # the source before that
    brackets: str


def find_functions(source: str) -> Iterator[SourceFunction]:
    """Yield the functions and methods of Python source that start on a line of their own, in source order.

    Source that the running Python cannot parse yields nothing.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example about "\d" in a string: the source is only parsed
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    # Split lines as the parser does: str.splitlines would also split at form feeds.
    lines = io.StringIO(source, newline=None).readlines()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(functions, key=lambda node: node.lineno):
        end, body_line = node.end_lineno, node.body[0].lineno
        text = textwrap.dedent("".join(lines[node.lineno - 1 : end]))
        if not text.startswith(("def ", "async def ")) or body_line == node.lineno:
            continue
        function_lines = text.rstrip("\n").split("\n")
        signature = "\n".join(function_lines[: body_line - node.lineno]).rstrip()
        last_line = _last_statement(node, lines)
        final = function_lines[-1]
        yield SourceFunction(
            signature=signature if signature.endswith(":") else "",
            summary=_summary(node),
            head="\n".join(function_lines[:-1]).rstrip(),
            last_line=last_line,
            indentation=final[: len(final) - len(final.lstrip())],
        )


def find_closing_brackets(source: str) -> Iterator[ClosingBrackets]:
    """Yield each run of two or more closing brackets of Python source, outside strings and comments, in source order.

    Source that cannot be split into tokens yields nothing from where it cannot.
    """
    lines = io.StringIO(source, newline=None).readlines()
    open_brackets: list[tuple[str, int]] = []  # the bracket that closes it, and its line
    run, run_start, run_end = "", (0, 0), (0, 0)
    first_line = 0
    for token in _operators(lines):
        if token.string in _OPENING.values() and open_brackets and open_brackets[-1][0] == token.string:
            if not run or token.start != run_end:
                yield from _closing_brackets(lines, first_line, run_start, run)
                run, run_start, first_line = "", token.start, open_brackets[0][1]
            run, run_end = run + token.string, token.end
            open_brackets.pop()
            continue
        yield from _closing_brackets(lines, first_line, run_start, run)
        run = ""
        if token.string in _OPENING:
            open_brackets.append((_OPENING[token.string], token.start[0]))
    yield from _closing_brackets(lines, first_line, run_start, run)


def _last_statement(node: ast.AST, lines: list[str]) -> str:
    """Return the last statement of a function if it is alone on the function's last line, else an empty string."""
    statements = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    last = max(statements, key=lambda child: (child.end_lineno, child.lineno, child.col_offset))
    line = lines[last.lineno - 1].rstrip("\n")
    is_alone = last.lineno == last.end_lineno and not line.encode()[: last.col_offset].strip()
    if not is_alone or hasattr(last, "body") or isinstance(last, ast.Pass):
        return ""
    return line.encode()[last.col_offset : last.end_col_offset].decode()


def _summary(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    docstring = (ast.get_docstring(node) or "").strip()
    summary = docstring.split("\n")[0].strip()
    return "" if "\\" in summary or '"""' in summary else summary


def _operators(lines: list[str]) -> Iterator[tokenize.TokenInfo]:
    """Yield the operators of source outside formatted strings, which Python 3.12 and later split into tokens."""
    f_strings = 0
    try:
        for token in tokenize.generate_tokens(iter([*lines, ""]).__next__):
            name = tokenize.tok_name[token.type]
            f_strings += name.endswith("STRING_START") - name.endswith("STRING_END")
            if token.type == tokenize.OP and not f_strings:
                yield token
    except (tokenize.TokenError, SyntaxError, StopIteration):
        return


def _closing_brackets(lines: list[str], first_line: int, start: tuple[int, int], run: str) -> Iterator[ClosingBrackets]:
    if len(run) < 2:
        return
    row, column = start
    before = "".join(lines[first_line - 1 : row - 1]) + lines[row - 1][:column]
    yield ClosingBrackets(before, "".join(lines[max(first_line - 30, 1) - 1 : first_line - 1]), run)
