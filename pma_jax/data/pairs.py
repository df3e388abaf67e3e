"""Pairs of prompt and answer from Python source: a function's signature and docstring, and its body."""

import ast
import io
import textwrap
import warnings
from collections.abc import Iterator


def extract_function_pairs(source: str, limit_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield (signature with docstring, body) of each function that has both a docstring and a body, in source order.

    Functions are dedented, and both parts end with a newline. Decorators are omitted. Source that the running Python
    cannot parse (the standard library's tests contain some) yields nothing.

    Args:
        source: Python source code.
        limit_bytes: Maximum length of a function in UTF-8 bytes; longer functions are skipped.
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
        docstring_end, end = node.body[0].end_lineno, node.end_lineno
        if ast.get_docstring(node, clean=False) is None or len(node.body) == 1:
            continue
        assert docstring_end is not None and end is not None
        if node.body[1].lineno == docstring_end:  # the body starts on the docstring's line, after a semicolon
            continue
        lines_of_function = textwrap.dedent("".join(lines[node.lineno - 1 : end])).rstrip("\n").split("\n")
        head = docstring_end - node.lineno + 1
        prompt, body = ("\n".join(part) + "\n" for part in (lines_of_function[:head], lines_of_function[head:]))
        if len((prompt + body).encode()) <= limit_bytes:
            yield prompt, body
