"""Reading and writing of JSON files. Files are parsed as untrusted input, and checked against a schema."""

import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pma_jax.config.errors import UserError, error_line
from pma_jax.storage import atomic
from pma_jax.storage.json_schema import check_schema
from pma_jax.storage.locks import locked
from pma_jax.storage.paths import as_path, exists, is_bucket, name_file, open_regular_file, read_file

if TYPE_CHECKING:  # its import takes a fifth of the time in which `pma merge` starts
    from etils import epath

MAX_JSON_BYTES = 100_000_000  # the limit that the safetensors library sets for headers
MAX_DEPTH = 100  # levels of lists and objects; no file of a model or a run has more than about ten
MAX_LINE_BYTES = 2**24
MAX_LINES_BYTES = 2**32  # about 20 million metric records
_SPACE_BEFORE_COLON = re.compile(rb'"[ \t\n\r]+:')
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # may also be one of a pair


def read_json(path: Path, schema: Any, allow_nan: bool = False) -> Any:
    """Read a JSON file of at most `MAX_JSON_BYTES`, and check it against a schema.

    Args:
        path: The file, local or in a bucket.
        schema: The type of its content, as `check_schema` describes it.
        allow_nan: Whether to parse NaN and Infinity, which Python's json module writes but the JSON standard does not
            allow. The schema decides in which fields they are accepted.

    Raises:
        FileNotFoundError: There is no file.
        UserError: `path` is not a regular file, the file is too large, is no JSON, or does not match the schema. The
            message is one line that names the file and the field.
    """
    return parse_json(read_file(path, MAX_JSON_BYTES), str(path), schema, allow_nan)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object whose fields the caller checks, from a file of at most `MAX_JSON_BYTES`.

    Raises:
        FileNotFoundError: There is no file.
        UserError: `path` is not a regular file, the file is too large, or does not contain a JSON object. The message
            is one line and names the file.
    """
    value = parse_untrusted_json(read_file(path, MAX_JSON_BYTES), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_json(data: bytes, source: str, schema: Any, allow_nan: bool = False) -> Any:
    """Parse UTF-8 JSON from an untrusted source, and check it against a schema; see `read_json`."""
    value = parse_untrusted_json(data, source, allow_nan)
    check_schema(value, schema, source)
    return value


def parse_untrusted_json(data: bytes, source: str, allow_nan: bool = False) -> Any:
    """Parse UTF-8 JSON from an untrusted source.

    Duplicate keys, numbers that overflow, lone surrogates and more than `MAX_DEPTH` levels are rejected. The size is
    not checked: the caller limits it.

    Args:
        data: The encoded text.
        source: What `data` was read from, such as a path: the prefix of error messages.
        allow_nan: Whether to accept NaN and Infinity, which Python's json module writes but the JSON standard does not
            allow.

    Raises:
        UserError: `data` is not such JSON. The message is one line.
    """
    try:
        text = _decode_utf8(data)
        value = (_FAST_NAN_DECODER if allow_nan else _FAST_DECODER).decode(text)
        # Each key ends with a quote and a colon. If the data has more of these than the value has keys, a key is
        # duplicate or a string contains them: then decode again with the hook, which takes 1.4 times as long.
        if _count_keys(value) != data.count(b'":') or _SPACE_BEFORE_COLON.search(data):
            value = (_NAN_DECODER if allow_nan else _DECODER).decode(text)
        if _LONE_SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise UserError(f"{source}: JSON is nested too deeply: replace or remove the file") from None
    except UnicodeEncodeError:
        raise UserError(
            f"{source}: a text in the JSON is not Unicode (half of a surrogate pair): replace or remove the file"
        ) from None
    except ValueError as error:
        raise UserError(f"{source}: invalid JSON ({error_line(error)[:200]}): replace or remove the file") from None
    return value


def read_json_lines(path: Path, check: Callable[[Any], None]) -> Iterator[Any]:
    """Read a file with one JSON value per line. A last line without a newline, left by a killed writer, is ignored.

    Args:
        path: The file, local or in a bucket.
        check: Called with each value; raises UserError for a wrong one.

    Yields:
        The values. NaN and Infinity are parsed.

    Raises:
        FileNotFoundError: There is no file.
        UserError: `path` is not a regular file, the file or a line is too large, or a line is corrupt. The message is
            one line and gives its number.
    """
    with name_file(path), open_regular_file(path, MAX_LINES_BYTES) as file:
        for number, line in enumerate(_lines(file), start=1):
            try:
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(f"more than {MAX_LINE_BYTES:,} bytes")
                value = _parse_line(line)
                check(value)
                if b"\\u" in line and _LONE_SURROGATE.search(line):
                    json.dumps(value, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                reason = error_line(error)[:200]
                raise UserError(f"{path}: line {number} is corrupt: remove that line ({reason})") from None
            yield value


def serialize_json(value: Mapping[str, Any]) -> bytes:
    """Serialize a mapping to indented UTF-8 JSON that ends with a newline.

    Raises:
        UserError: `value` contains NaN or Infinity.
    """
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def update_json(path: "epath.Path", schema: Any, change: Callable[[Any], Any]) -> Any:
    """Replace the content of a JSON file that other processes may change too; return the new content.

    The file is read, changed and written under a lock, so that no change is lost. In a bucket, which has no file locks,
    one process can overwrite what another has written.

    Args:
        path: The file.
        schema: The type of its content.
        change: Maps the content, or None if there is no file, to the new content. NaN is allowed.

    Raises:
        UserError: The file does not match the schema.
    """
    lock = contextlib.nullcontext() if is_bucket(path) else locked(Path(path.parent / f".{path.stem}.lock"))
    with lock:
        changed = change(read_json(as_path(path), schema, allow_nan=True) if exists(path) else None)
        atomic.write_text(path, json.dumps(changed, indent=1) + "\n")
        return changed


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the complete lines of a file; one that is too long is cut and is the last."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if line.endswith(b"\n") or len(line) > MAX_LINE_BYTES:
            yield line
        if len(line) > MAX_LINE_BYTES:
            return


def _parse_line(line: bytes) -> Any:
    """Parse one line: first without the hooks that reject duplicate keys and overflows, which are twice as slow."""
    text = line.decode()
    value = _LINE_DECODER.decode(text)
    # Outside texts, a line has one colon per key. A text with a colon and a list with an infinity are parsed again.
    if type(value) is dict and len(value) == line.count(b":"):
        values = value.values()
        if math.inf not in values and -math.inf not in values and b"[" not in line:
            return value
    return _NAN_DECODER.decode(text)


def _decode_utf8(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        raise ValueError("it starts with a byte order mark: save it as UTF-8 without one")
    return data.decode()


def _count_keys(value: Any) -> int:
    """Return the number of keys in all levels of a value; raise RecursionError above `MAX_DEPTH` levels."""
    level, keys = [value] if type(value) in (dict, list) else [], 0
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return keys
        keys += sum(len(parent) for parent in level if type(parent) is dict)
        items = itertools.chain.from_iterable(parent.values() if type(parent) is dict else parent for parent in level)
        level = [item for item in items if type(item) in (dict, list)]
    raise RecursionError


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        duplicate, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise UserError(f"duplicate key {duplicate[:80]!r} ({count} times)")
    return value


def _reject_constant(constant: str) -> float:
    raise UserError(f"{constant} is not allowed in JSON")


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise UserError(f"{text[:40]} is too large for a number")
    return value


# Made once: json.loads with these arguments would make a decoder for each call.
_LINE_DECODER = json.JSONDecoder()
_FAST_DECODER, _FAST_NAN_DECODER, _DECODER, _NAN_DECODER = (
    json.JSONDecoder(object_pairs_hook=hook, parse_float=_parse_float, parse_constant=parse_constant)
    for hook in (None, _reject_duplicate_keys)
    for parse_constant in (_reject_constant, float)
)
