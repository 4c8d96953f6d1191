"""Converts the values that a loop gives to ``run.log`` to a numerator and a denominator for each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from raytrain.errors import UsageError
from raytrain.training.prepared_metrics import is_metric, joined_values

_MOST_NUMBERS = 200  # of a vector: each is a metric of its own
Fraction = tuple[Tensor | float, Tensor | float]
"""This worker's numerator and denominator: a metric is the sum of all workers' numerators over that of denominators."""


def logged_fractions(
    values: Mapping[str, Any], num_used: int, classes: Sequence[str], world_size: int
) -> dict[str, Fraction]:
    """Return the fraction of each metric in ``values``, which a loop logs for ``num_used`` images of this worker.

    The numbers of a vector are named after ``classes`` if it has one for each class. Raises UsageError for a value that
    ``Run.log`` does not take.

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

        # A mean is weighted by the number of images. A metric object's value is over all workers' images already.
        has_all_images = is_metric(value)
        weight = 1 if has_all_images else num_used
        for member, measured in (joined_values(value, world_size) if has_all_images else {name: value}).items():
            prefix = member or name
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
    """Return ``value`` as a number or a tensor, of at least 32 bits, as its product with a number of images needs."""
    if not isinstance(value, Tensor):
        return float(value)
    return value.detach() if value.element_size() >= 4 else value.detach().float()
