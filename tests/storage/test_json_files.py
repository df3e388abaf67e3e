"""JSON files as untrusted input: every error is one line that names the file and the field."""

import json
import os
import socket
import subprocess
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
import tiny

from pma_jax.config.bounds import Range
from pma_jax.config.errors import UserError
from pma_jax.storage import json_files
from pma_jax.storage.json_files import read_json, read_json_lines, read_json_object, update_json
from pma_jax.storage.json_schema import Count, Loss, check_schema
from pma_jax.storage.paths import read_file


class Inner(TypedDict):
    tokens: Count
    loss: NotRequired[Loss | None]


class Outer(TypedDict):
    name: str
    kind: NotRequired[Literal["point", "block_mean"]]
    share: NotRequired[Annotated[float, Range(0, 1, excludes_low=True)]]
    snapshots: NotRequired[list[Inner]]
    digests: NotRequired[dict[str, str]]
    extra: NotRequired[Any]


def refused(path, schema=Outer, **options):
    with pytest.raises(UserError) as error:
        read_json(path, schema, **options)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message and len(message) < 500 + len(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": 3}', ": name: expected text, got 3"),
        ("{}", ": name is missing"),
        ("[]", ": expected an object, got a list of 0"),
        ("null", "expected an object, got null"),
        ('{"name": "a", "kind": "other"}', ": kind: expected 'point' or 'block_mean', got 'other'"),
        ('{"name": "a", "kind": 1}', ": kind: expected 'point' or 'block_mean', got 1"),
        ('{"name": "a", "share": 0}', ": share: expected a finite number above 0 and at most 1, got 0"),
        ('{"name": "a", "share": true}', ": share: expected a finite number above 0 and at most 1, got true"),
        ('{"name": "a", "share": 1e400}', "1e400 is too large for a number"),
        ('{"name": "a", "share": NaN}', "NaN is not allowed"),
        ('{"name": "a", "snapshots": {}}', ": snapshots: expected a list, got an object of 0"),
        (
            '{"name": "a", "snapshots": [{"tokens": 1}, {"tokens": "x"}]}',
            ": snapshots[1].tokens: expected a whole number",
        ),
        (
            '{"name": "a", "snapshots": [{"tokens": -1}]}',
            ": snapshots[0].tokens: expected a whole number from 0 to 2^63",
        ),
        ('{"name": "a", "snapshots": [{"tokens": 1.0}]}', ": snapshots[0].tokens: expected a whole number"),
        ('{"name": "a", "snapshots": [{"tokens": false}]}', ": snapshots[0].tokens: expected a whole number"),
        (
            '{"name": "a", "snapshots": [{"tokens": 9223372036854775808}]}',
            ": snapshots[0].tokens: expected a whole number",
        ),
        ('{"name": "a", "snapshots": [{"tokens": 1' + "0" * 400 + "}]}", "an integer of more than 30 digits"),
        ('{"name": "a", "snapshots": [{"tokens": 1' + "0" * 5000 + "}]}", "invalid JSON"),
        ('{"name": "a", "snapshots": [{}]}', ": snapshots[0].tokens is missing"),
        ('{"name": "a", "snapshots": [{"tokens": 1, "loss": "x"}]}', ": snapshots[0].loss: expected a number or null"),
        ('{"name": "a", "digests": {"w": 1}}', ": digests.w: expected text, got 1"),
        ('{"name": "a", "digests": {"w\\n1": 1}}', ": digests['w\\n1']: expected text, got 1"),
        ('{"name": "a", "name": "b"}', "duplicate key 'name'"),
        ('{"name": "\\ud800"}', "half of a surrogate pair"),
        ('{"name": "a", "extra": {"\\udfff": 1}}', "half of a surrogate pair"),
        ('{"name": "a", "extra": ' + "[" * 101 + "]" * 101 + "}", "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "a"} {}', "Extra data"),
        ('{"name": "a"', "invalid JSON"),
        ("", "invalid JSON"),
        (" \n", "invalid JSON"),
        ("\0" * 100, "invalid JSON"),
        ('{"name": "a\0"}', "invalid JSON"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ("{}".encode("utf-16"), "byte order mark"),
        ("{}".encode("utf-16-le"), "invalid JSON"),
        (b'{"name": "\xff"}', "utf-8"),
    ],
)
def test_wrong_json_names_the_file_and_the_field(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in refused(path)


@pytest.mark.parametrize(
    "value",
    [
        {"name": "a"},
        {"name": "\U0001f600", "unknown": [1, None]},
        {"name": "a", "kind": "point", "share": 1, "digests": {}},
        {"name": "a", "snapshots": [{"tokens": 2**63 - 1, "loss": None, "new": {}}], "extra": [[[]]]},
    ],
)
def test_right_json_is_returned_with_unknown_fields(tmp_path, value):
    (tmp_path / "x.json").write_text(json.dumps(value, indent=1).replace("\n", "\r\n"))
    assert read_json(tmp_path / "x.json", Outer) == value


def test_nan_is_accepted_only_where_the_schema_says_so(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"tokens": 1, "loss": Infinity}')
    assert read_json(path, Inner, allow_nan=True)["loss"] == float("inf")
    path.write_text('{"name": "a", "share": NaN}')
    assert ": share: expected a finite number" in refused(path, allow_nan=True)


def test_large_file_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    assert "more than the limit" in refused(path)
    with pytest.raises(UserError, match="more than the limit"):
        list(read_json_lines(path, lambda value: None))


@pytest.fixture(params=["pipe", "socket", "directory", "zero", "link to a pipe"])
def special(request, tmp_path, monkeypatch):
    """Return the path of something that is not a regular file."""
    path = tmp_path / "x.json"
    monkeypatch.chdir(tmp_path)  # the address of a socket has at most 108 bytes
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "directory":
        path.mkdir()
    elif request.param == "zero":
        path.symlink_to("/dev/zero")
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    return path


def test_what_is_not_a_regular_file_is_refused_at_once(special):
    for read in (read_json_object, lambda p: read_file(p, 10), lambda p: list(read_json_lines(p, lambda value: None))):
        with pytest.raises(UserError, match="not a regular file"):
            read(special)


def test_link_to_itself_is_an_error_of_the_system(tmp_path):
    (tmp_path / "x.json").symlink_to("x.json")
    with pytest.raises(OSError, match="symbolic links"):
        read_json_object(tmp_path / "x.json")


def read_lines(path, text):
    path.write_bytes(text)
    return list(read_json_lines(path, lambda value: check_schema(value, Inner, "record")))


def test_lines_are_read_up_to_the_last_newline(tmp_path):
    path = tmp_path / "x.jsonl"
    assert read_lines(path, b"") == []
    assert read_lines(path, b'{"tok') == []
    assert read_lines(path, b'{"tokens": 1}\r\n{"tokens": 2, "loss": NaN}\n{"tokens": 3}')[0] == {"tokens": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "Expecting value"),
        (b"{}", "tokens is missing"),
        (b'{"tokens": "x"}', "tokens: expected a whole number"),
        (b'{"tokens": 1}{"tokens": 2}', "Extra data"),
        (b'{"tokens": 1, "tokens": 2}', "duplicate key"),
        (b'{"tokens": 1, "x": "\\ud800"}', "surrogates"),
        (b'{"tokens": 1, "x": 1e999}', "too large"),
        (b"\0\0\0\0", "Expecting value"),
        (b"\xff", "utf-8"),
        (b"[" * 10_000, "recursion"),
    ],
)
def test_corrupt_line_is_refused_with_its_number(tmp_path, line, message):
    with pytest.raises(UserError, match="line 2 is corrupt: remove that line") as error:
        read_lines(tmp_path / "x.jsonl", b'{"tokens": 1}\n' + line + b'\n{"tokens": 3}\n')
    assert message in str(error.value) and "\n" not in str(error.value)


def test_line_without_end_is_refused_without_reading_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "MAX_LINE_BYTES", 1000)
    with pytest.raises(UserError, match=r"line 2 is corrupt: .*\(more than 1,000 bytes\)"):
        read_lines(tmp_path / "x.jsonl", b'{"tokens": 1}\n' + b" " * 5000)


CHANGE = """
import sys
from etils import epath
from pma_jax.storage.json_files import update_json
path, name = epath.Path(sys.argv[1]), sys.argv[2]
for i in range(40):
    update_json(path, dict[str, int], lambda content: (content or {}) | {f"{name} {i}": i})
"""


def test_processes_keep_each_others_changes(tmp_path):
    path = tmp_path / "losses.json"
    processes = [subprocess.Popen(tiny.python(CHANGE, path, name)) for name in "abcd"]
    assert [process.wait(timeout=120) for process in processes] == [0] * 4
    assert json.loads(path.read_text()) == {f"{name} {i}": i for name in "abcd" for i in range(40)}


def test_file_that_does_not_match_the_schema_is_not_replaced(tmp_path):
    path = tmp_path / "losses.json"
    path.write_text('{"a": "text"}')
    with pytest.raises(ValueError, match=r"losses\.json: a: expected a whole number"):
        update_json(path, dict[str, int], lambda content: content)
    assert path.read_text() == '{"a": "text"}'
