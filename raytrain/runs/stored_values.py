"""Whether values that were read from a document have the types that they should have: anybody may have written it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints


def known_fields(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``document`` that the dataclass ``kind`` has a field for, if they are of the field's type."""
    hints = get_type_hints(kind)
    return {name: value for name, value in document.items() if name in hints and matches(value, hints[name])}


def matches(value: object, hint: Any) -> bool:
    """Whether ``value``, of JSON and tuples, is of the type ``hint``. A float may be a whole number, but not NaN."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return matches(value, parts[0])
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Union, types.UnionType):
        return any(matches(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(matches(each, parts[0]) for each in cast(list[object], value))
    if origin is dict:
        values = cast(dict[str, object], value).values() if isinstance(value, dict) else None
        return values is not None and all(matches(each, parts[1]) for each in values)
    if origin is tuple:
        return isinstance(value, tuple) and _match(cast(tuple[object, ...], value), parts)
    if hint is float:
        return type(value) in (int, float) and value == value
    return hint is Any or type(value) is hint


def _match(values: tuple[object, ...], hints: tuple[Any, ...]) -> bool:
    """Whether each value matches its hint; ``hints`` may end in an ellipsis."""
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(values)
    return len(values) == len(hints) and all(matches(value, hint) for value, hint in zip(values, hints, strict=True))
