"""Values of options: how Python code may write them, their types and limits, and durations such as 90s or 2h."""

from __future__ import annotations

import ast
import json
import math
import operator
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Interval

from raytrain.errors import UsageError, did_you_mean, flag

T = TypeVar("T")

PositiveInt = Annotated[int, Interval(ge=1)]
NonNegativeInt = Annotated[int, Interval(ge=0)]
PositiveFloat = Annotated[float, Interval(gt=0)]
NonNegativeFloat = Annotated[float, Interval(ge=0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]

Location = str | os.PathLike[str]
"""A folder or a file, as a path or as text, or a URL."""

MAX_PORT = 65_535

Bound = tuple[Callable[[float, float], bool], str, float]
"""A comparison of a value with a limit, the words for it, and the limit: ``(operator.ge, "at least", 1)``."""

_COMPARISONS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}
_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
_PAIR = re.compile(r"[A-Z]+(=|/|\.\.)[A-Z]+")  # two values in the form of an option's: METRIC=X, K/N, MIN..MAX
_MAX_SHOWN = 80  # characters of a wrong value that an error shows
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


# Sections of options are frozen dataclasses. Code may give some options in several ways, of which :func:`read_values`
# makes one: a price as 2.5, a path as a Path. Type checkers learn them from the converter of the option's field.

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

Given = TypeVar("Given", contravariant=True)
Kept = TypeVar("Kept", covariant=True)


class Accepts(Generic[Given, Kept]):
    """Says to type checkers what code may give for an option, and what the option then is; nothing calls it.

    Example: ``Accepts[str | os.PathLike[str], str]()`` for an option that takes a path and holds text.
    """

    def __call__(self, value: Given) -> Kept:
        """Never called: :func:`read_values` knows the type from the annotation."""
        raise NotImplementedError


def option_field(*, default: Any, converter: Accepts[Any, Any]) -> Any:
    """Return the field of an option that code may give in several ways.

    Type checkers read these from ``converter``, as ``dataclass_transform`` tells them to. At run time it is ignored:
    :func:`read_values` knows them from the annotation.

    Example: ``price: tuple[str, ...] = option_field(default=(), converter=TEXTS)``
    """
    del converter
    return field(default=default)


if TYPE_CHECKING:

    @dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field, option_field))
    def section(options: type[T], /) -> type[T]:
        """Make a section of options of a class."""
        ...

else:
    section = dataclass(frozen=True, kw_only=True)

TEXTS = Accepts[str | float | Sequence[str | float] | Set[str] | Mapping[str, object] | None, tuple[str, ...]]()
NUMBERS = Accepts[float | Sequence[float] | None, tuple[float, ...] | None]()
LOCATION = Accepts[Location, str]()
OPTIONAL_LOCATION = Accepts[Location | None, str | None]()


def read_values(config: Any) -> None:
    """Replace each value of ``config``, a frozen dataclass, by the same one in types of JSON, with tuples for lists.

    Raises UsageError if a value is not of its field's type.
    """
    for name, hint in hints_of(config.__class__).items():
        object.__setattr__(config, name, read_value(name, getattr(config, name), hint))


def read_value(name: str, value: object, hint: Any, *, numbers_as_text: bool = True) -> Any:
    """Return the value of the option ``name`` in plain types: those of JSON, and tuples.

    If the command line takes text, Python code may give values of other types: numbers in place of several texts, a
    dictionary for ``NAME=VALUE`` or JSON, two values for a form such as ``MIN..MAX``, and None for no values. Without
    ``numbers_as_text``, numbers are not accepted as texts.

    Raises UsageError if it is not of the type ``hint``. Example: ``read_value("mean", [0.5], tuple[float, ...])``
    """
    # Try the value itself, then its text, then a tuple that has only this value, and for None an empty tuple.
    plain = _plain(value)
    if not matches(plain, hint) and str in _alternatives(hint):
        plain = _as_text(value, plain, hint, numbers_as_text=numbers_as_text)
    if not matches(plain, hint) and matches((plain,), hint):
        plain = (plain,)
    if plain is None and not matches(None, hint) and matches((), hint):
        plain = ()

    # Let NaN pass: check_limits refuses it with a sentence that names the limits.
    is_nan = isinstance(plain, float) and math.isnan(plain) and float in _alternatives(hint)
    if not matches(plain, hint) and not is_nan:
        raise _wrong_type(name, value, hint)
    return plain


def matches(value: object, hint: Any) -> bool:
    """Return True if ``value``, of JSON and tuples, is of the type ``hint``.

    A float may be a whole number, but not NaN. Of a dict only the values are checked: its keys, as in JSON, are texts.

    Example: ``matches((1, 2), tuple[int, ...])``
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return matches(value, parts[0])
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Union, types.UnionType):
        return any(matches(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(matches(item, parts[0]) for item in cast(list[object], value))
    if origin is dict:
        values = cast(dict[str, object], value).values() if isinstance(value, dict) else None
        return values is not None and all(matches(item, parts[1]) for item in values)
    # A tuple has a type for each item, or one type and an ellipsis for any number of items.
    if origin is tuple:
        items = cast(tuple[object, ...], value) if isinstance(value, tuple) else None
        if items is not None and parts[-1] is Ellipsis:
            parts = parts[:1] * len(items)
        return items is not None and len(items) == len(parts) and all(map(matches, items, parts))
    # type, not isinstance: True is no number here.
    if hint is float:
        return type(value) in (int, float) and value == value
    return hint is Any or type(value) is hint


def check_limits(config: object) -> None:
    """Raise UsageError if a number in ``config`` is not finite, too large, or outside the limits in its annotation."""
    for name in _bounds(type(config)):
        check_limit(type(config), name, getattr(config, name))


def check_limit(options: type, name: str, value: object) -> None:
    """Raise UsageError if a number in the ``value`` of an option is infinite, or outside the limits in its annotation.

    A whole number must also fit into 64 bits. Example: ``check_limit(TrainConfig, "epochs", 0)`` raises it.
    """
    bounds = _bounds(options)[name]
    parts = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
    numbers = [part for part in parts if isinstance(part, (int, float))]
    allowed = " and ".join(f"{words} {limit}" for _, words, limit in bounds)
    subject = "each number" if isinstance(value, tuple) else "it"
    # Such a number is not shown, as it may have thousands of digits.
    if not all(fits_64_bits(number) for number in numbers if isinstance(number, int)):
        advice = f"{subject} must be {allowed}" if bounds else "give a smaller one"
        raise UsageError(f"{flag(name)} is a whole number that does not fit into 64 bits; {advice}.")
    if not all(holds(number, limit) for number in numbers for holds, _, limit in bounds):
        raise UsageError(f"{flag(name)} is {value}; {subject} must be {allowed}.")
    if not all(map(math.isfinite, numbers)):
        raise UsageError(f"{flag(name)} is {', '.join(map(str, numbers))}; give a finite number.")


def fits_64_bits(number: int) -> bool:
    """Return True if a whole number fits into 64 bits with a sign, as those of NumPy, Arrow and torch do.

    Example: ``not fits_64_bits(2**63)``
    """
    return -(2**63) <= number < 2**63


def seconds(text: str) -> float | None:
    """Return the seconds in a time such as 90s, 10m, 2h or 1d; None if ``text`` is something else.

    Example: ``seconds("1.5m") == 90``
    """
    parts = re.fullmatch(r"(\d*\.?\d+)([smhd])", text)
    duration_s = float(parts[1]) * _SECONDS[parts[2]] if parts else math.inf
    return duration_s if math.isfinite(duration_s) else None


def _plain(value: Any) -> Any:
    """Return ``value`` in the types of the command line: text for paths, Python's numbers, tuples for sequences.

    A set becomes a sorted tuple, and a dictionary a tuple of texts ``NAME=VALUE``. Numbers and arrays of NumPy and
    tensors, which have the method ``tolist``, become numbers and tuples. Other values are returned unchanged.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if isinstance(value, Mapping):  # NAME=VALUE, as of --model-option
        items = cast("Mapping[str, Any]", value).items()
        options = ((name, item.tolist() if hasattr(item, "tolist") else item) for name, item in items)
        return tuple(f"{name}={item if _is_plain_text(item) else repr(item)}" for name, item in options)
    if isinstance(value, Set):
        return tuple(sorted(map(_plain, cast("Set[Any]", value)), key=str))
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(map(_plain, cast("Sequence[Any]", value)))
    return value


def _as_text(value: object, plain: object, hint: Any, *, numbers_as_text: bool) -> object:
    """Return a Python ``value`` in the form of the command line: a text, or a tuple of texts.

    If it has no such form there, return ``plain`` unchanged, which :func:`_plain` made of it.
    """
    # The annotation has the forms of the values in one text, such as "N|auto|MIN..MAX".
    forms = "|".join(form for form in getattr(hint, "__metadata__", ()) if isinstance(form, str)).split("|")
    pair = next((match[1] for form in forms if (match := _PAIR.fullmatch(form))), None)
    items = cast("tuple[object, ...]", plain) if isinstance(plain, tuple) else (plain,)
    takes_several = matches((), hint)

    # A dictionary becomes JSON, or METRIC=X if it has one entry; two values become a pair such as MIN..MAX.
    if isinstance(value, Mapping):
        if "JSON" in forms:
            entries = cast("Mapping[object, object]", value).items()
            # What is no value of JSON becomes text, which the check of the option refuses with a sentence.
            return json.dumps({str(_plain(key)): _plain(item) for key, item in entries}, default=str)
        return items[0] if len(items) == 1 and pair == "=" and matches(items[0], hint) else cast(object, plain)
    if len(items) == 2 and pair is not None and not takes_several:
        return pair.join(map(str, items))

    # Numbers among several texts: a price, a tag, a column. A number for a name or a path is a mistake.
    if takes_several and numbers_as_text and all(type(item) in (int, float, str) for item in items):
        return tuple(map(str, items))
    return cast(object, plain)


def _is_plain_text(value: object) -> bool:
    """Return True if ``value`` is a text that Python would not read as another value, such as 1 or None."""
    if not isinstance(value, str):
        return False
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return True
    return False


def _wrong_type(name: str, value: object, hint: Any) -> UsageError:
    """Return the error for a ``value`` that is not of the type ``hint``; its sentence says which values are allowed."""
    # A function must be named, so that the workers can import it; options hold plain values only.
    kinds = list(_alternatives(hint))
    if callable(value) and str in kinds:
        return UsageError(f"{flag(name)} is a function or a class; name it, as in file.py:function.")

    # Name the allowed values: by the form in the annotation, else by the types, and the words of Literals.
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    forms = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
    names = [_NAMES[kind] for kind in kinds if kind in _NAMES]
    allowed = " or ".join(forms or [*names, *([", ".join(words)] if words else [])])
    similar = did_you_mean(value.lower(), words) if isinstance(value, str) else ""
    text = " ".join(repr(value).split())[:_MAX_SHOWN]
    shown = f"of type {type(value).__name__}" if "://" in text else text  # a URL may contain credentials
    return UsageError(f"{flag(name)} is {shown}{similar}; give {allowed}.")


def _alternatives(hint: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows, without limits; for a tuple, the types of its first item."""
    if get_origin(hint) in (Annotated, tuple):
        yield from _alternatives(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _alternatives(part)
    else:
        yield hint


@cache
def hints_of(options: type) -> dict[str, Any]:
    """Return the annotation of each option, with its limits and marks. Cached, as evaluating all takes milliseconds."""
    return get_type_hints(options, include_extras=True)


@cache
def _bounds(options: type) -> dict[str, list[Bound]]:
    """Return the bounds of each option. The bounds of a tuple hold for each of its numbers."""
    return {name: list(dict.fromkeys(_bounds_in(hint))) for name, hint in hints_of(options).items()}


def _bounds_in(hint: Any) -> Iterator[Bound]:
    """Yield every bound in an annotation, also in nested ones."""
    for interval in getattr(hint, "__metadata__", ()):
        for key, (holds, words) in _COMPARISONS.items():
            if (limit := getattr(interval, key, None)) is not None:
                yield holds, words, limit
    for part in get_args(hint):
        yield from _bounds_in(part)
