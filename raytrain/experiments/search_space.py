"""The search space of a sweep: parses ``--vary``, and lists or draws the points that are tried."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from raytrain.config import TrainConfig
from raytrain.config.data import DataOptions
from raytrain.config.machines import MachineOptions
from raytrain.config.options import RunOptions
from raytrain.config.values import matches
from raytrain.errors import UsageError, did_you_mean, option_name

Value = float | int | bool | str
Point = dict[str, Value]  # A value for each varied field of :class:`TrainConfig`

_SAME_FOR_ALL = {  # the options that decide what is read, where it is stored, and how trials are scheduled
    *(each.name for options in (DataOptions, MachineOptions, RunOptions) for each in dataclasses.fields(options)),
    *("channels", "resize", "crop_fraction", "resizer", "random_resized_crop", "cache_side", "transforms"),
    *("keep_checkpoints", "evaluate_every", "checkpoint_every", "max_failures"),
} - {"sampling", "seed"}
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
_DRAWS_PER_POINT = 1000


@dataclass(frozen=True)
class Range:
    """Any number from ``low`` to ``high``. ``log``: uniform in the logarithm. ``whole``: whole numbers only."""

    low: float
    high: float
    log: bool
    whole: bool

    def draw(self, generator: random.Random) -> Value:
        """A random number of the range, rounded to four digits, so that it is easy to read and to type."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        drawn = math.exp(generator.uniform(math.log(low), math.log(high))) if self.log else generator.uniform(low, high)
        rounded = round(drawn) if self.whole else float(f"{drawn:.4g}")
        clipped = min(max(rounded, self.low), self.high)
        return int(clipped) if self.whole else clipped


Domain = tuple[Value, ...] | Range
"""One of a few values, or a number of a range."""
Space = dict[str, Domain]


def parse(words: Sequence[str]) -> Space:
    """The space of ``words`` such as ``learning-rate=0.01,0.1``; raises UsageError if an option or value is wrong."""
    space: Space = {}
    for word in words:
        flag, _, values = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name in space:
            raise UsageError(f"--vary names {flag} twice; give all of its values at once, with commas.")
        space[name] = _domain(name, flag, values)
    return space


def points(space: Space, trials: int | None, seed: int) -> list[Point]:
    """The points to try: every combination of values, or ``trials`` different points drawn with ``seed``."""
    if trials is None:
        return _grid(space)
    if trials < 1:
        raise UsageError(f"--trials is {trials}; it must be at least 1.")
    generator = random.Random(seed)
    drawn: dict[tuple[Value, ...], Point] = {}
    for _ in range(_DRAWS_PER_POINT * trials):
        point = {name: _draw(domain, generator) for name, domain in space.items()}
        drawn.setdefault(tuple(point.values()), point)
        if len(drawn) == trials:
            return list(drawn.values())
    raise UsageError(
        f"--trials is {trials}, and --vary describes {len(drawn)} different points only; ask for at most {len(drawn)}."
    )


def _draw(domain: Domain, generator: random.Random) -> Value:
    return domain.draw(generator) if isinstance(domain, Range) else generator.choice(domain)


def are_points(value: object) -> bool:
    """Whether a stored value is a list of points: each gives some options that may vary a value of the right type."""
    kinds = _varied_kinds()
    return matches(value, list[dict[str, Any]]) and all(
        name in kinds and matches(each, kinds[name])
        for point in cast(list[dict[str, object]], value)
        for name, each in point.items()
    )


def _grid(space: Space) -> list[Point]:
    values: list[tuple[Value, ...]] = []
    for name, domain in space.items():
        if isinstance(domain, Range):
            raise UsageError(
                f"--vary {option_name(name)} is a range, from which values are drawn; say how many with --trials."
            )
        values.append(domain)
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*values)]


def _domain(name: str, flag: str, values: str) -> Domain:
    kind = _kind(name, flag)
    if not values:
        raise UsageError(
            f"--vary {flag} has no values; write {flag}=VALUE,VALUE or, for numbers, {flag}=LOW..HIGH or "
            f"{flag}=log:LOW..HIGH."
        )
    if kind in (int, float) and ".." in values:
        return _range(flag, values, kind)
    return tuple(_value(flag, text, kind) for text in values.split(","))


def _kind(name: str, flag: str) -> Any:
    """The type of a field's values, or the Literal that lists them."""
    kinds = _varied_kinds()
    varied = [option_name(each) for each in kinds]
    if name in kinds:
        return kinds[name]
    if name in (field.name for field in dataclasses.fields(TrainConfig)):
        problem = f"{flag} is the same for all trials of a sweep"
    else:
        problem = f"there is no option {flag!r}{did_you_mean(option_name(name), varied)}"
    raise UsageError(f"--vary: {problem}; those that may vary are {', '.join(varied)}.")


def _varied_kinds() -> dict[str, Any]:
    """The options that may vary, each with the type of its values, or the Literal that lists them."""
    hints = get_type_hints(TrainConfig)
    kinds = {field.name: _single(hints[field.name]) for field in dataclasses.fields(TrainConfig)}
    return {name: kind for name, kind in kinds.items() if kind is not None and name not in _SAME_FOR_ALL}


def _single(annotation: Any) -> Any:
    """The one type, besides None and texts such as 32/worker, that ``annotation`` allows; None if it allows several."""
    if annotation in _KINDS or get_origin(annotation) is Literal:
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None) and get_origin(kind) is not Literal]
    kinds = [kind for kind in kinds if kind is not str] or kinds
    return kinds[0] if len(kinds) == 1 and kinds[0] in _KINDS else None


def _range(flag: str, text: str, kind: type) -> Range:
    log = text.startswith("log:")
    low, _, high = text.removeprefix("log:").partition("..")
    found = Range(float(_value(flag, low, kind)), float(_value(flag, high, kind)), log, kind is int)
    if found.low >= found.high:
        raise UsageError(f"--vary {flag}={text}: a range goes from a number to a larger one.")
    if log and found.low <= 0:
        raise UsageError(f"--vary {flag}={text}: a logarithmic range starts above 0.")
    return found


def _value(flag: str, text: str, kind: Any) -> Value:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise UsageError(f"--vary {flag}: {text!r} is none of {', '.join(get_args(kind))}.")
        return text
    try:
        value = _WORDS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        value = None
    if value is None or text == "" or (kind is float and not math.isfinite(value)):
        raise UsageError(f"--vary {flag}: {text!r} is not {_KINDS[kind]}.")
    return value
