"""Validation of parsed JSON against a type: the schemas of the files that a run directory holds.

A schema is a type annotation: `bool`, `int`, `float`, `str`, `None`, `Any`, `Literal`, unions, `list[T]`,
`dict[str, T]`, and `TypedDict` classes, whose unknown fields are accepted so that files of newer versions open.
Integers must fit into an int64 and floats must be finite; `Annotated[int, Range(0)]` narrows a range, and
`Annotated[float, ANY_FLOAT]` accepts NaN and infinities.
"""

import functools
import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from pma_jax.config.bounds import MAX_INTEGER, Range
from pma_jax.config.errors import UserError

ANY_FLOAT = "any number, NaN or an infinity"  # metadata of an annotated float
Count = Annotated[int, Range(0)]
Loss = Annotated[float, ANY_FLOAT]  # NaN after a model has diverged

_INT64 = Range(-MAX_INTEGER - 1)
_FINITE = Range(-math.inf, math.inf, True, True)
_SHOWN_CHARACTERS = 60
_MISSING = object()
Check = Callable[[Any], None]


class _MismatchError(Exception):
    """A value does not have the expected type; `path` is the path to it, from the inside out."""

    def __init__(self, expected: str, value: Any):
        super().__init__()
        self.expected, self.value, self.path = expected, value, []


def check_schema(value: Any, schema: Any, source: str) -> None:
    """Check parsed JSON against a schema.

    Args:
        value: The parsed JSON.
        schema: A type annotation (see the description of the module).
        source: What the JSON was read from, such as a path: the prefix of error messages.

    Raises:
        UserError: The value does not have this type. The message is one line and gives the path of the field.
    """
    try:
        make_check(schema)(value)
    except _MismatchError as mismatch:
        field = "".join(reversed(mismatch.path)).removeprefix(".")
        where = f"{source}: {field}" if field else source
        if mismatch.value is _MISSING:
            raise UserError(f"{where} is missing: the file is damaged, or not of this version of pma_jax") from None
        raise UserError(f"{where}: expected {mismatch.expected}, got {format_value(mismatch.value)}") from None


def format_value(value: Any) -> str:
    """Format a parsed JSON value for a message, in at most about 60 printable characters."""
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if type(value) is int and not -(10**30) < value < 10**30:
        return "an integer of more than 30 digits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


@functools.cache
def make_check(schema: Any) -> Check:
    """Return a function that raises if its argument does not have the type `schema`; for `check_schema` only."""
    metadata: tuple[Any, ...] = ()
    while get_origin(schema) in (Annotated, NotRequired, Required):
        metadata += getattr(schema, "__metadata__", ())
        schema = get_args(schema)[0]
    if is_typeddict(schema):
        return _object_check(schema)
    if schema is Any:
        return lambda value: None
    if schema is float and ANY_FLOAT in metadata:
        return _type_check("a number", float, int)
    if schema in (int, float):
        return _number_check(schema, next((m for m in metadata if isinstance(m, Range)), None))
    if schema in _SIMPLE_TYPES:
        return _type_check(_SIMPLE_TYPES[schema], schema)
    origin, arguments = get_origin(schema), get_args(schema)
    if origin is Literal:
        return _literal_check(arguments)
    if origin in (Union, UnionType):
        return _union_check(arguments)
    if origin is list:
        return _list_check(*arguments)
    if origin is dict:
        return _dict_check(arguments[1])
    raise TypeError(f"{schema} is not a schema")


_SIMPLE_TYPES = {bool: "true or false", str: "text", NoneType: "null", dict: "an object", list: "a list"}


def _type_check(expected: str, *types: type) -> Check:
    def check(value: Any) -> None:
        if type(value) not in types:
            raise _MismatchError(expected, value)

    return check


def _number_check(kind: type, limits: Range | None) -> Check:
    types, noun = ((int,), "a whole number") if kind is int else ((int, float), "a finite number")
    bounds = limits or (_INT64 if kind is int else _FINITE)
    expected = f"{noun} {bounds}" if limits else noun if kind is float else f"{noun} of at most 64 bits"

    def check(value: Any) -> None:
        if type(value) not in types or value not in bounds:
            raise _MismatchError(expected, value)

    return check


def _literal_check(choices: tuple[Any, ...]) -> Check:
    expected = " or ".join(map(repr, choices))

    def check(value: Any) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _MismatchError(expected, value)

    return check


def _union_check(members: tuple[Any, ...]) -> Check:
    checks = [make_check(member) for member in members]

    def check(value: Any) -> None:
        mismatches = []
        for check_member in checks:
            try:
                return check_member(value)
            except _MismatchError as mismatch:
                mismatches.append(mismatch)
        # An error inside a list or object says more than that no member of the union fits.
        deepest = max(mismatches, key=lambda mismatch: len(mismatch.path))
        if deepest.path:
            raise deepest
        raise _MismatchError(" or ".join(mismatch.expected for mismatch in mismatches), value)

    return check


def _list_check(item: Any) -> Check:
    check_item = make_check(item)

    def check(value: Any) -> None:
        if type(value) is not list:
            raise _MismatchError("a list", value)
        for index, element in enumerate(value):
            try:
                check_item(element)
            except _MismatchError as mismatch:
                mismatch.path.append(f"[{index}]")
                raise

    return check


def _dict_check(item: Any) -> Check:
    check_item = make_check(item)

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise _MismatchError("an object", value)
        for key, element in value.items():
            try:
                check_item(element)
            except _MismatchError as mismatch:
                mismatch.path.append(
                    f".{key}" if key.isidentifier() and len(key) < _SHOWN_CHARACTERS else f"[{format_value(key)}]"
                )
                raise

    return check


def _object_check(schema: Any) -> Check:
    hints = get_type_hints(schema, include_extras=True)
    required = schema.__required_keys__
    # A field of a type that accepts anything needs no check of its value.
    fields = [(key, make_check(hint), key in required) for key, hint in hints.items()]

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise _MismatchError("an object", value)
        for key, check_field, is_required in fields:
            if key in value:
                try:
                    check_field(value[key])
                except _MismatchError as mismatch:
                    mismatch.path.append(f".{key}")
                    raise
            elif is_required:
                mismatch = _MismatchError("", _MISSING)
                mismatch.path.append(f".{key}")
                raise mismatch

    return check
