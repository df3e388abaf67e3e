"""Small JSON files of checkpoints: parsed as untrusted data, and written in one format."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pma_jax.runtime.errors import error_line

MAX_JSON_BYTES = 100_000_000  # also the limit for headers in the reference implementation of safetensors


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of at most `MAX_JSON_BYTES`.

    Raises:
        ValueError: The file is too large, or not a JSON object. The message is one line that names the file.
    """
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes is more than the limit of {MAX_JSON_BYTES} for JSON")
    value = parse_untrusted_json(path.read_bytes(), str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object; the file is corrupt")
    return value


def parse_untrusted_json(data: bytes, source: str, allow_nan: bool = False) -> Any:
    """Parse JSON from an untrusted source: UTF-8, without duplicate keys or nesting that breaks the parser.

    Args:
        data: The text.
        source: What `data` was read from, such as a path; it starts the error message.
        allow_nan: Whether to accept NaN and Infinity, which Python writes although JSON does not have them.

    Raises:
        ValueError: `data` is not valid. The message is one line.
    """

    def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            duplicate, count = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"the name {duplicate[:80]!r} appears {count} times")
        return value

    def reject_constant(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        on_constant = float if allow_nan else reject_constant
        return json.loads(data.decode("utf-8"), object_pairs_hook=reject_duplicate_keys, parse_constant=on_constant)
    except RecursionError:
        raise ValueError(f"{source}: nested too deeply; the file is corrupt or malicious") from None
    except ValueError as error:
        raise ValueError(
            f"{source}: not readable as JSON: {error_line(error)[:200]}; the file is corrupt: replace or remove it"
        ) from None


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Format an object as indented UTF-8 JSON. Raise ValueError if it contains NaN or Infinity."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
