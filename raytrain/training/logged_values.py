"""Converts the values that a loop gives to ``run.log`` to a numerator and a denominator for each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from raytrain.errors import UsageError
from raytrain.training.prepared_metrics import is_metric, joined_values

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
            fractions[name] = _detached(pair[0]), _detached(pair[1])
            continue

        # Other values are means, which are weighted by the number of images: a single one, or those of an object of
        # torchmetrics. The latter are over all workers' images already, so each worker's counts the same.
        if is_metric(value):
            means, weight = joined_values(value, world_size), 1
        else:
            means, weight = {name: value}, num_used
        for member, measured in means.items():
            prefix = member or name  # a single metric of torchmetrics has no name of its own
            if _is_number(measured):
                fractions[prefix] = _detached(measured) * weight, weight
            elif isinstance(measured, Tensor) and measured.ndim == 1 and len(measured) <= _MOST_NUMBERS:
                suffixes = classes if len(measured) == len(classes) else range(len(measured))
                for suffix, number in zip(suffixes, _detached(measured), strict=True):
                    fractions[f"{prefix} {suffix}"] = number * weight, weight
            else:
                shape = f" of the shape {tuple(measured.shape)}" if isinstance(measured, Tensor) else ""
                raise UsageError(
                    f"run.log({prefix}=...) got a {type(measured).__name__}{shape}; give one number, the mean over "
                    f"this worker's images of the batch, (numerator, denominator), a vector of at most {_MOST_NUMBERS} "
                    "numbers, or an object of torchmetrics."
                )
    return fractions


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
