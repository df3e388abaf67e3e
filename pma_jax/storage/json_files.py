"""Small JSON files of checkpoints: parsed as untrusted data, and written in one format."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pma_jax.runtime.errors import error_line

LIMIT_BYTES = 100_000_000  # the reference implementation's limit for headers of safetensors, too


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of at most `LIMIT_BYTES`.

    Raises:
        ValueError: one line that names the file and the reason.
    """
    if path.stat().st_size > LIMIT_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes is too large for metadata")
    value = parse_json(path.read_bytes(), str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object; it is damaged")
    return value


def parse_json(data: bytes, what: str) -> Any:
    """Parse untrusted JSON: UTF-8 only, no duplicate keys, no NaN, no nesting that breaks the parser.

    Raises:
        ValueError: one line that names `what` and the reason.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            twice, count = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"the name {twice[:80]!r} appears {count} times")
        return value

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ValueError(f"{what}: nested too deeply; the file is damaged or hostile") from None
    except ValueError as error:
        raise ValueError(f"{what}: not readable as JSON: {error_line(error)[:200]}; fetch the file again") from None


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Format an object as indented UTF-8 JSON."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
