"""Reading and writing of the JSON metadata files of checkpoints. Files are parsed as untrusted input."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError, error_line

MAX_JSON_BYTES = 100_000_000  # the limit that the safetensors library sets for headers


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of at most `MAX_JSON_BYTES`.

    Raises:
        UserError: The file is too large or does not contain a JSON object. The message is one line and names the
            file.
    """
    if path.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{path}: {path.stat().st_size} bytes is more than the limit of {MAX_JSON_BYTES} for JSON")
    value = parse_untrusted_json(path.read_bytes(), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_untrusted_json(data: bytes, source: str, allow_nan: bool = False) -> Any:
    """Parse UTF-8 JSON from an untrusted source; reject duplicate keys and nesting that is too deep for the parser.

    The size is not checked: the caller limits it.

    Args:
        data: The encoded text.
        source: What `data` was read from, such as a path: the prefix of error messages.
        allow_nan: Whether to accept NaN and Infinity, which Python's json module writes but the JSON standard does not
            allow.

    Raises:
        UserError: `data` is not such JSON. The message is one line.
    """

    def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            duplicate, count = Counter(key for key, _ in pairs).most_common(1)[0]
            raise UserError(f"duplicate key {duplicate[:80]!r} ({count} times)")
        return value

    def reject_constant(constant: str) -> float:
        raise UserError(f"{constant} is not allowed in JSON")

    try:
        parse_constant = float if allow_nan else reject_constant
        return json.loads(data.decode("utf-8"), object_pairs_hook=reject_duplicate_keys, parse_constant=parse_constant)
    except RecursionError:
        raise UserError(f"{source}: JSON is nested too deeply: replace or remove the file") from None
    except ValueError as error:
        raise UserError(f"{source}: invalid JSON ({error_line(error)[:200]}): replace or remove the file") from None


def serialize_json(value: Mapping[str, Any]) -> bytes:
    """Serialize a mapping to indented UTF-8 JSON that ends with a newline.

    Raises:
        UserError: `value` contains NaN or Infinity.
    """
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
