"""Converts the values that a loop gives to ``run.log`` to a numerator and a denominator for each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from raytrain.errors import UsageError
from raytrain.training.metrics.prepared_metrics import is_metric, joined_values

_MOST_NUMBERS = 200  # of a vector: each is a metric of its own
Fraction = tuple[Tensor | float, Tensor | float]
"""This worker's numerator and denominator.

A metric is the sum of all workers' numerators, divided by the sum of their denominators.
"""


def logged_fractions(
    values: Mapping[str, Any], num_used: int, classes: Sequence[str], world_size: int
) -> dict[str, Fraction]:
    """Return the fraction of each metric in ``values``, which a loop logs for ``num_used`` images of this worker.

    The numbers of a vector are named after ``classes`` if it has one for each class, otherwise by their positions.
    Every worker calls this, because objects of ``torchmetrics`` are joined over the workers. Raises UsageError for a
    value that ``Run.log`` does not take.

    Example::

        logged_fractions({"loss": 0.5}, num_used=8, classes=[], world_size=1)  # {"loss": (4.0, 8)}
    """
    fractions: dict[str, Fraction] = {}
    for name, value in values.items():
        # A value that is not a mean over the images is given as two sums.
        if isinstance(value, tuple):
            pair: tuple[Any, ...] = value
            if len(pair) != 2 or not all(map(_is_number, pair)):
                raise UsageError(
                    f"run.log({name}=...) got a tuple of {len(pair)}; give (numerator, denominator), two numbers of "
                    "this worker's images, or one number, the mean over them."
                )
            fractions_of_value: dict[str, Fraction] = {name: (_detached(pair[0]), _detached(pair[1]))}
        # A metric object's value is over all workers' images already. Any other mean is weighted by the images.
        elif is_metric(value):
            members = joined_values(value, world_size)
            named = [_named_numbers(member or name, measured, classes) for member, measured in members.items()]
            fractions_of_value = {key: (number, 1) for numbers in named for key, number in numbers.items()}
        else:
            numbers = _named_numbers(name, value, classes)
            fractions_of_value = {key: (number * num_used, num_used) for key, number in numbers.items()}

        if taken := fractions.keys() & fractions_of_value.keys():
            raise UsageError(
                f"run.log got {min(taken)} twice, the second time in {name}=...; give each another name, those of a "
                'collection by its prefix, as in MetricCollection(..., prefix="train ").'
            )
        fractions |= fractions_of_value
    return fractions


def _named_numbers(name: str, value: Any, classes: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of ``value``, which is logged as ``name``, by the names of their metrics."""
    if _is_number(value):
        return {name: _detached(value)}
    if isinstance(value, Tensor) and value.ndim == 1 and len(value) <= _MOST_NUMBERS:
        suffixes = classes if len(value) == len(classes) else range(len(value))
        return {f"{name} {suffix}": number for suffix, number in zip(suffixes, _detached(value), strict=True)}
    if isinstance(value, Mapping):  # of a wrapper such as ClasswiseWrapper
        parts: Mapping[Any, Any] = value
        named = [_named_numbers(f"{name} {key}", part, classes) for key, part in parts.items()]
        return {key: number for numbers in named for key, number in numbers.items()}
    shape = f" of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise UsageError(
        f"run.log({name}=...) got a {type(value).__name__}{shape}; give one number, the mean over this worker's "
        f"images of the batch, (numerator, denominator), a vector of at most {_MOST_NUMBERS} numbers, or an object of "
        "torchmetrics."
    )


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a number or a tensor with a single one."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _detached(value: Any) -> Any:
    """Return ``value`` as a number, or a tensor without a graph.

    The tensor has at least 32 bits, because its product with a number of images may not fit into fewer.
    """
    if not isinstance(value, Tensor):
        return float(value)
    return value.detach() if value.element_size() >= 4 else value.detach().float()
