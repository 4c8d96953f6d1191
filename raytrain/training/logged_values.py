"""Values that a loop gives to ``run.log``, as a numerator and a denominator for each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from raytrain.errors import UsageError
from raytrain.training.prepared_metrics import is_metric, joined_values

_MOST_NUMBERS = 200  # of a vector: each is a metric of its own
Fraction = tuple[Tensor | float, Tensor | float]
"""A numerator and a denominator of this worker: a metric is the sum of the first over that of the second."""


def logged_fractions(
    values: Mapping[str, Any], num_used: int, classes: Sequence[str], world_size: int
) -> dict[str, Fraction]:
    """Return the fraction of each metric in ``values``, which a loop logs of ``num_used`` images of this worker.

    ``classes`` name the numbers of a vector that has one for each of them. Raises UsageError for a value that is none
    of those that ``Run.log`` takes.

    Example::

        logged_fractions({"loss": 0.5}, num_used=8, classes=[], world_size=1)  # {"loss": (4.0, 8)}
    """
    fractions: dict[str, Fraction] = {}
    for name, value in values.items():
        # What is no mean over the images comes as its two sums.
        if isinstance(value, tuple):
            pair: tuple[Any, ...] = value
            if len(pair) != 2 or not all(map(_is_number, pair)):
                raise UsageError(
                    f"run.log({name}=...) got a tuple of {len(pair)}; give (numerator, denominator), two numbers of "
                    "this worker's images, or one number, the mean over them."
                )
            fractions[name] = _detached(pair[0]), _detached(pair[1])
            continue

        # A mean is weighted by its images. The value of a metric object is that of all workers' images already.
        has_all_images = is_metric(value)
        weight = 1 if has_all_images else num_used
        for member, measured in (joined_values(value, world_size) if has_all_images else {name: value}).items():
            prefix = member or name
            if _is_number(measured):
                fractions[prefix] = _detached(measured) * weight, weight
            elif isinstance(measured, Tensor) and measured.ndim == 1 and len(measured) <= _MOST_NUMBERS:
                suffixes = classes if len(measured) == len(classes) else range(len(measured))
                for suffix, number in zip(suffixes, measured.detach(), strict=True):
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
    if isinstance(value, Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _detached(value: Any) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else float(value)
