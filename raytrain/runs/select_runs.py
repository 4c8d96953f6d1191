"""Finds runs in a list: those that match conditions, in the order that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, cast

from raytrain.config import TrainConfig
from raytrain.errors import UsageError, did_you_mean, option_name
from raytrain.runs.records import RunInfo

SortKey = Literal["heartbeat", "name", "recipe", "status", "step", "accuracy"]

_KEYS: dict[SortKey, Callable[[RunInfo], Any]] = {
    "heartbeat": lambda run: run.status.heartbeat_at,
    "name": lambda run: run.name,
    "recipe": lambda run: run.recipe,
    "status": lambda run: run.status.status,
    "step": lambda run: run.status.step,
    "accuracy": lambda run: -1.0 if run.test_accuracy is None else run.test_accuracy,
}
_DESCENDING = ("heartbeat", "step", "accuracy")
_OPTIONS = {option_name(name): name for name in vars(TrainConfig(batch_size=1))}


def select_runs(runs: Sequence[RunInfo], conditions: Sequence[str], sort: SortKey) -> list[RunInfo]:
    """The runs that match all ``conditions``, such as ``status=finished`` or ``learning-rate=0.1``, sorted.

    Raises UsageError if a condition is not understood.
    """
    wanted = [_parse(condition) for condition in conditions]
    found = [run for run in runs if all(_matches(run, name, value) for name, value in wanted)]
    return sorted(found, key=_KEYS[sort], reverse=sort in _DESCENDING)


def _parse(condition: str) -> tuple[str, str]:
    name, equals, value = condition.partition("=")
    if not equals:
        raise UsageError(f"--filter {condition!r} has no =; write status=finished, tag=WORD or learning-rate=0.1.")
    if name != "status" and name not in _OPTIONS:
        hint = did_you_mean(name, ["status", *_OPTIONS])
        raise UsageError(f"--filter {condition!r}: {name!r} is neither status nor an option of a run{hint}.")
    return name, value


def _matches(run: RunInfo, name: str, value: str) -> bool:
    if name == "status":
        return run.status.status == value
    found: object = getattr(run.config, _OPTIONS[name], None)
    parts = cast(tuple[object, ...], found) if isinstance(found, tuple) else (found,)
    return any(_equals(part, value) for part in parts)


def _equals(found: object, value: str) -> bool:
    """Whether an option is ``value`` as it is typed: 0.10 is 0.1, and none is None."""
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        with suppress(ValueError):
            return found == float(value)
    return str(found).lower() == value.lower()
