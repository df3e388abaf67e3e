"""Pairs of a prompt and an answer, of which the answer alone is learned: Python functions from docstring to body."""

import ast
import io
import textwrap
import warnings
from collections.abc import Iterator


def extract_function_pairs(source: str, limit_bytes: int) -> Iterator[tuple[str, str]]:
    """(signature and docstring, body) of every function that has both, top to bottom; both end with a newline.

    Each function is moved to the left margin; decorators are left out, and so is a function longer than `limit_bytes`
    of UTF-8. A source that is not today's Python (the standard library's tests have some) gives nothing.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as a "\d" in a text: nothing of the source is run
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    # The parser's lines: str.splitlines would also break at form feeds.
    lines = io.StringIO(source, newline=None).readlines()
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(found, key=lambda node: node.lineno):
        docstring_end, end = node.body[0].end_lineno, node.end_lineno
        if ast.get_docstring(node, clean=False) is None or len(node.body) == 1:
            continue
        assert docstring_end is not None and end is not None
        if node.body[1].lineno == docstring_end:  # on the docstring's own line, behind a semicolon
            continue
        moved = textwrap.dedent("".join(lines[node.lineno - 1 : end])).rstrip("\n").split("\n")
        head = docstring_end - node.lineno + 1
        prompt, body = ("\n".join(part) + "\n" for part in (moved[:head], moved[head:]))
        if len((prompt + body).encode()) <= limit_bytes:
            yield prompt, body
