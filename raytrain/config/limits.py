"""Limits of numbers in options, and durations as text, such as 90s or 2h."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, cast, get_args, get_type_hints

from annotated_types import Interval

from raytrain.errors import UsageError, flag

PositiveInt = Annotated[int, Interval(ge=1)]
NonNegativeInt = Annotated[int, Interval(ge=0)]
PositiveFloat = Annotated[float, Interval(gt=0)]
NonNegativeFloat = Annotated[float, Interval(ge=0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]

Bound = tuple[Callable[[float, float], bool], str, float]
"""A comparison that the first number of two must pass, the words for it, and the second number."""

_COMPARISONS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def check_limits(config: object) -> None:
    """Raise UsageError if a number in ``config`` is outside the limits in the annotations of its class."""
    for name, bounds in _bounds(type(config)).items():
        value = getattr(config, name)
        parts = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
        numbers = [part for part in parts if isinstance(part, (int, float))]
        if not all(holds(number, limit) for number in numbers for holds, _, limit in bounds):
            allowed = " and ".join(f"{words} {limit}" for _, words, limit in bounds)
            what = "each number" if isinstance(value, tuple) else "it"
            raise UsageError(f"{flag(name)} is {value}; {what} must be {allowed}.")


def seconds(text: str) -> float | None:
    """The seconds in a time such as 90s, 10m, 2h or 1d; None if ``text`` is something else."""
    found = re.fullmatch(r"(\d*\.?\d+)([smhd])", text)
    return float(found[1]) * _SECONDS[found[2]] if found and math.isfinite(float(found[1])) else None


@cache
def _bounds(options: type) -> dict[str, list[Bound]]:
    """The bounds of each option; those of a tuple hold for each of its numbers."""
    hints = get_type_hints(options, include_extras=True)
    return {name: list(dict.fromkeys(_bounds_in(hint))) for name, hint in hints.items()}


def _bounds_in(hint: Any) -> Iterator[Bound]:
    """Every bound that an annotation has, also those deep in it."""
    for interval in getattr(hint, "__metadata__", ()):
        for key, (holds, words) in _COMPARISONS.items():
            if (limit := getattr(interval, key, None)) is not None:
                yield holds, words, limit
    for part in get_args(hint):
        yield from _bounds_in(part)
