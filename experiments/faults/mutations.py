"""Systematic mutations of files: of any file as bytes, and of every field of a JSON file."""

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MAX_FIELDS = 40  # of one file; later ones are of the same kind, such as the digests of further leaves


class Mutation(NamedTuple):
    """A named change of one file in place."""

    name: str
    apply: Callable[[Path], None]


# Values that replace a field. `Raw` texts are not what json.dumps writes.
VALUES: dict[str, str] = {
    "null": "null",
    "true": "true",
    "text": '"x"',
    "empty text": '""',
    "text with a line break": '"a\\nb\\u0000c"',
    "lone surrogate": '"\\ud800"',
    "long text": '"' + "x" * 100_000 + '"',
    "path out": '"../../../../etc/passwd"',
    "minus one": "-1",
    "zero": "0",
    "half": "0.5",
    "2^63": str(2**63),
    "10^30": "1" + "0" * 30,
    "5000 digits": "9" * 5000,
    "1e400": "1e400",
    "NaN": "NaN",
    "minus infinity": "-Infinity",
    "list": "[]",
    "list of a list": "[[]]",
    "object": "{}",
    "deep list": "[" * 500 + "]" * 500,
    "long list": "[" + "0," * 50_000 + "0]",
}


def replace_file(path: Path, make: Callable[[Path], None]) -> None:
    """Remove a file or link, and let `make` create something else in its place."""
    path.unlink()
    make(path)


def _write(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return apply


def _make_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{folder}/{path.name}")  # an address has at most 108 bytes
    os.close(folder)


def _flip(fraction: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = int(len(data) * fraction)
        return data[:place] + bytes([data[place] ^ 0x11]) + data[place + 1 :] if data else b"\xff"

    return change


def _sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**37)


FILE_MUTATIONS = [
    Mutation("empty", _write(lambda data: b"")),
    Mutation("half", _write(lambda data: data[: len(data) // 2])),
    Mutation("last byte missing", _write(lambda data: data[:-1])),
    Mutation("garbage after the end", _write(lambda data: data + b"\x00garbage")),
    Mutation("zeros", _write(lambda data: bytes(len(data)))),
    Mutation("random bytes", _write(lambda data: os.urandom(max(len(data), 64)))),
    Mutation("byte order mark", _write(lambda data: b"\xef\xbb\xbf" + data)),
    Mutation("UTF-16", _write(lambda data: data.decode("latin-1").encode("utf-16"))),
    Mutation("lines of Windows", _write(lambda data: data.replace(b"\n", b"\r\n"))),
    Mutation("bit near the start", _write(_flip(0.02))),
    Mutation("bit in the middle", _write(_flip(0.5))),
    Mutation("bit near the end", _write(_flip(0.97))),
    Mutation("nested", _write(lambda data: b"[" * 200_000)),
    Mutation("one object more", _write(lambda data: data + b"{}")),
    Mutation("128 GiB of zeros", _sparse),
    Mutation("absent", lambda path: path.unlink()),
    Mutation("directory", lambda path: replace_file(path, lambda p: p.mkdir())),
    Mutation("named pipe", lambda path: replace_file(path, os.mkfifo)),
    Mutation("socket", lambda path: replace_file(path, _make_socket)),
    Mutation("endless device", lambda path: replace_file(path, lambda p: p.symlink_to("/dev/zero"))),
    Mutation("link to itself", lambda path: replace_file(path, lambda p: p.symlink_to(p.name))),
    Mutation("link to nothing", lambda path: replace_file(path, lambda p: p.symlink_to("nothing"))),
]


def json_mutations(path: Path) -> Iterator[tuple[str, Mutation]]:
    """Yield (path of a field, mutation) for the fields of a JSON file, or of the last line of a .jsonl file."""
    lines = path.suffix == ".jsonl"
    text = path.read_text()
    head, document = (
        text[: text[:-1].rfind("\n") + 1] if lines else "",
        json.loads(text.splitlines()[-1] if lines else text),
    )
    for keys in list(_fields(document))[:MAX_FIELDS]:
        field = ".".join(map(str, keys))
        for name, value in VALUES.items():
            changed = head + _with(document, keys, value) + "\n"
            yield field, Mutation(name, _write(lambda data, text=changed: text.encode()))
        yield field, Mutation("absent", _without(document, keys, head))


def _fields(value: Any, prefix: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every field; of a list or of an object with many fields, those of the first and last."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in items if len(items) <= 12 else [*items[:2], items[-1]]:
        yield (*prefix, key)
        yield from _fields(item, (*prefix, key))


def _with(document: Any, keys: tuple, raw: str) -> str:
    marker = "\u2603marker"
    changed = copy.deepcopy(document)
    parent = changed
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] = marker
    return json.dumps(changed).replace(json.dumps(marker), raw)


def _without(document: Any, keys: tuple, head: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        changed = copy.deepcopy(document)
        parent = changed
        for key in keys[:-1]:
            parent = parent[key]
        del parent[keys[-1]]
        path.write_text(head + json.dumps(changed) + "\n")

    return apply
