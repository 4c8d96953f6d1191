"""The search space of a sweep: parses ``--vary``, and lists or draws the points, one for each trial."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from raytrain.config import TrainConfig
from raytrain.config.optimisation import is_per_worker
from raytrain.config.option_marks import Mark
from raytrain.config.option_values import hints_of, matches
from raytrain.config.options import option_known_as, options_with
from raytrain.errors import UsageError, did_you_mean, option_name

Value = float | int | bool | str | None
Point = dict[str, Value]
"""A value for each option that a sweep varies, by the name of its field in TrainConfig."""

_SWITCH_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_NAME_OF_KIND = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}  # for messages
_DRAWS_PER_POINT = 1000  # after which the space has no further points, as far as can be known


@dataclass(frozen=True)
class Range:
    """Any number from ``low`` to ``high``, both included.

    Numbers are drawn uniformly, with ``log`` in the logarithm; with ``whole``, they are whole numbers.
    """

    low: float
    high: float
    log: bool
    whole: bool

    def draw(self, generator: random.Random) -> float:
        """Return a random number of the range, rounded to four digits, so that it is easy to read and to type."""
        # Rounding gives each whole number an interval of one unit, so the first and the last need half a unit more.
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        drawn = math.exp(generator.uniform(math.log(low), math.log(high))) if self.log else generator.uniform(low, high)
        rounded = round(drawn) if self.whole else float(f"{drawn:.4g}")
        clipped = min(max(rounded, self.low), self.high)
        return int(clipped) if self.whole else clipped


Domain = tuple[Value, ...] | Range
"""One of a few values, or a number of a range."""
Space = dict[str, Domain]


def parse(words: Sequence[str]) -> Space:
    """Return the space of the ``words`` of ``--vary``, each one option with its values, or with a range of numbers.

    A number may be one for each worker if the option takes that, such as ``batch-size=32/worker``, and ``none`` is None
    if the option may be None, as in ``weights=none,DEFAULT``. Raises UsageError if an option may not vary or is named
    twice, or if a value or a range is wrong.

    Example: ``parse(["optimizer=sgd,lion", "learning-rate=log:1e-4..1"])``
    """
    kinds = _sweepable_kinds()
    space: Space = {}
    for word in words:
        flag, _, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name in space:
            raise UsageError(f"--vary names {flag} twice; give all of its values at once, with commas.")
        if name not in kinds and space and "=" not in word:
            before = list(space)[-1]
            raise UsageError(
                f"--vary: {word!r} is no option with values; write all values of one with commas, as in "
                f"{option_name(before)}=VALUE,{word}."
            )
        if name not in kinds:
            meant = option_known_as(name)
            hint = f" (did you mean {meant}?)" if meant in kinds else did_you_mean(name, kinds)
            hint = option_name(hint)
            problem = f"there is no option {flag!r}{hint}"
            if name in (field.name for field in dataclasses.fields(TrainConfig)):
                hint, problem = "", f"{flag} is the same for all trials of a sweep"
            # Some 40 options may vary; if one of them was probably meant, it stands alone.
            sweepable = "" if hint else f"; those that may vary are {', '.join(map(option_name, kinds))}"
            raise UsageError(f"--vary: {problem}{sweepable}.")
        if not text:
            raise UsageError(
                f"--vary {flag} has no values; write {flag}=VALUE,VALUE or, for numbers, {flag}=LOW..HIGH or "
                f"{flag}=log:LOW..HIGH."
            )

        # Anything but a range of numbers is a list of values.
        kind = kinds[name]
        if kind not in (int, float) or ".." not in text:
            space[name] = tuple(_listed_value(flag, name, value.strip(), kind) for value in text.split(","))
            continue

        # A range of numbers, drawn uniformly, or in the logarithm.
        log = text.startswith("log:")
        low, high = (float(_value(flag, end, kind)) for end in text.removeprefix("log:").split("..", 1))
        if low >= high:
            raise UsageError(f"--vary {flag}={text}: a range goes from a number to a larger one.")
        if log and low <= 0:
            raise UsageError(f"--vary {flag}={text}: a logarithmic range starts above 0.")
        space[name] = Range(low, high, log, whole=kind is int)
    return space


def points(space: Space, trials: int | None, seed: int) -> list[Point]:
    """Return the points to try: every combination of values, or ``trials`` different points drawn with ``seed``.

    With one seed, the first points are the same for any number of ``trials``. Raises UsageError if ``trials`` is None
    and an option has a range, if it is below 1, or if the space has fewer points.

    Example: ``points({"epochs": (1, 2)}, None, seed=0) == [{"epochs": 1}, {"epochs": 2}]``
    """
    if trials is None:
        values: list[tuple[Value, ...]] = []
        for name, domain in space.items():
            if isinstance(domain, Range):
                raise UsageError(
                    f"--vary {option_name(name)} is a range, from which values are drawn; say how many with --trials."
                )
            values.append(domain)
        return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*values)]

    check_trials(trials, num_points(space))
    # The values of a list are dealt like cards: a value is drawn again only once all others were drawn. So each value
    # is tried even if there are few trials.
    generator = random.Random(seed)
    cards: dict[str, list[Value]] = {name: [] for name in space}

    def draw(name: str, domain: Domain) -> Value:
        if isinstance(domain, Range):
            return domain.draw(generator)
        cards[name] = cards[name] or generator.sample(domain, len(domain))
        return cards[name].pop()

    # A point that was drawn before is dropped. How many points a range of rounded numbers has is unknown, so draws are
    # limited.
    drawn: dict[tuple[Value, ...], Point] = {}
    for _ in range(_DRAWS_PER_POINT * trials):
        point = {name: draw(name, domain) for name, domain in space.items()}
        drawn.setdefault(tuple(point.values()), point)
        if len(drawn) == trials:
            break
    check_trials(trials, len(drawn))
    return list(drawn.values())


def check_trials(trials: int, most: float) -> None:
    """Raise UsageError unless ``trials`` is at least 1, and at most the number of points that the space has."""
    if trials < 1:
        raise UsageError(f"--trials is {trials}; it must be at least 1.")
    if most < trials:
        raise UsageError(
            f"--trials is {trials}, and --vary describes {most:.0f} different points only; ask for at most {most:.0f}."
        )


def num_points(space: Space) -> float:
    """Return how many different points a space has: ``math.inf`` if it has a range that is not of whole numbers.

    Example: ``num_points({"optimizer": ("sgd", "lion"), "epochs": Range(1, 3, log=False, whole=True)}) == 6``
    """
    num = 1.0
    for domain in space.values():
        if isinstance(domain, Range):
            num *= domain.high - domain.low + 1 if domain.whole else math.inf
        else:
            num *= len(set(domain))
    return num


def outermost_points(space: Space) -> list[Point]:
    """Return few points that together have each value of each list and both ends of each range.

    Options that are allowed at these points are taken to be allowed everywhere in the space, whose points a sampler
    chooses later. Only one option at a time differs from the first point.

    Example: ``outermost_points({"epochs": (1, 2)}) == [{"epochs": 1}, {"epochs": 2}]``
    """
    values = {
        name: tuple(int(end) if domain.whole else end for end in (domain.low, domain.high))
        if isinstance(domain, Range)
        else domain
        for name, domain in space.items()
    }
    first: Point = {name: choices[0] for name, choices in values.items()}
    return [first, *({**first, name: choice} for name, choices in values.items() for choice in choices[1:])]


def are_points(value: object) -> bool:
    """Return True if a stored ``value`` is a list of points: options that may vary, with values of their types.

    Example: ``are_points([{"epochs": 2}]) and not are_points([{"storage": "./runs"}])``
    """
    kinds = _sweepable_kinds()
    return matches(value, list[dict[str, Any]]) and all(
        name in kinds
        and (
            matches(chosen, kinds[name])
            or (is_per_worker(chosen) and _takes_text(name))
            or (chosen is None and _takes_none(name))
        )
        for point in cast(list[dict[str, object]], value)
        for name, chosen in point.items()
    )


def _sweepable_kinds() -> dict[str, Any]:
    """Return the options that may vary, each with the type of its values in ``--vary``, or the Literal that lists them.

    An annotation with several alternatives is reduced to one type: a number, not None, a word, or a text such as
    32/worker. Only a switch that may also be a word, such as ``compile``, keeps its annotation.
    """
    hints = get_type_hints(TrainConfig)
    kinds: dict[str, Any] = {}
    for name in options_with(Mark.SWEEPABLE):
        # An annotation that is a single type or a Literal is its kind already.
        hint = hints[name]
        if hint in _NAME_OF_KIND or get_origin(hint) is Literal:
            kinds[name] = hint
            continue

        # Of the alternatives of a Union, a type comes before words, and any other type before text.
        alternatives = get_args(hint)
        words = [kind for kind in alternatives if get_origin(kind) is Literal]
        types = [kind for kind in alternatives if kind is not type(None) and kind not in words]
        types = [kind for kind in types if kind is not str] or types
        is_switch_with_words = bool in types and types != list(alternatives)
        kinds[name] = hint if is_switch_with_words else [*types, *words][0]
    return kinds


def _takes_text(name: str) -> bool:
    """Return True if the option ``name``, a number, may also be a text such as 32/worker, whose form others check."""
    return str in get_args(get_type_hints(TrainConfig)[name])


def _takes_none(name: str) -> bool:
    """Return True if the option ``name`` may be None."""
    return matches(None, hints_of(TrainConfig)[name])


def _listed_value(flag: str, name: str, text: str, kind: Any) -> Value:
    """Return one of the values in a list, ``text``, of the option ``name``: None, a text, or a value of ``kind``."""
    if text.lower() == "none" and _takes_none(name):  # as on the command line
        return None
    return text if is_per_worker(text) and _takes_text(name) else _value(flag, text, kind)


def _value(flag: str, text: str, kind: Any) -> float | int | bool | str:
    """Return ``text`` as a value of ``kind``, one of :func:`_sweepable_kinds`; raise UsageError if it has none.

    ``flag`` is the option as the user wrote it, for the error.
    """
    if bool in get_args(kind):  # a switch that may also be a word, such as compile
        if text.lower() in _SWITCH_WORDS:
            return _SWITCH_WORDS[text.lower()]
        kind = next(alternative for alternative in get_args(kind) if get_origin(alternative) is Literal)
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise UsageError(f"--vary {flag}: {text!r} is none of {', '.join(get_args(kind))}.")
        return text
    try:
        value = _SWITCH_WORDS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        value = None
    if value is None or text == "" or (kind is float and not math.isfinite(value)):
        ranges = f", or {flag}=LOW..HIGH" if kind in (int, float) else ""
        raise UsageError(f"--vary {flag}: {text!r} is not {_NAME_OF_KIND[kind]}; write {flag}=VALUE,VALUE{ranges}.")
    return value
