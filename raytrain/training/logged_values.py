"""What a loop gives to ``run.log``, as a numerator and a denominator for each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from raytrain.errors import UsageError
from raytrain.training.prepared_metrics import is_metric, joined_values

_MOST_NUMBERS = 200  # of a vector: each is a metric of its own
Pair = tuple[Tensor | float, Tensor | float]


class LoggedValues:
    """Names the metrics of a loop. ``classes`` name the numbers of a vector that has one for each of them."""

    def __init__(self, classes: Sequence[str], world_size: int) -> None:
        self._classes, self._world_size = classes, world_size

    def pairs(self, values: Mapping[str, Any], num_used: int) -> dict[str, Pair]:
        """Return the numerator and the denominator of each metric; ``num_used`` images are this worker's.

        Raises UsageError for a value that is none of those that ``Run.log`` takes.
        """
        pairs: dict[str, Pair] = {}
        for name, value in values.items():
            if isinstance(value, tuple):
                pairs[name] = self._quotient(name, value)
            elif is_metric(value):
                for member, measured in joined_values(value, self._world_size).items():
                    pairs.update({each: (number, 1.0) for each, number in self._numbers(member or name, measured)})
            else:
                pairs.update({each: (number * num_used, num_used) for each, number in self._numbers(name, value)})
        return pairs

    def _quotient(self, name: str, value: tuple[Any, ...]) -> Pair:
        if len(value) != 2 or not all(map(_is_number, value)):
            raise UsageError(
                f"run.log({name}=...) got a tuple of {len(value)}; give (numerator, denominator), two numbers of this "
                "worker's images, or one number, the mean over them."
            )
        return tuple(each.detach() if isinstance(each, Tensor) else float(each) for each in value)  # pyright: ignore

    def _numbers(self, name: str, value: Any) -> list[tuple[str, Tensor | float]]:
        """Return each number with the name of its metric."""
        if _is_number(value):
            return [(name, value.detach() if isinstance(value, Tensor) else float(value))]
        if isinstance(value, Tensor) and value.ndim == 1 and len(value) <= _MOST_NUMBERS:
            named = self._classes if len(value) == len(self._classes) else range(len(value))
            return [(f"{name} {each}", number) for each, number in zip(named, value.detach(), strict=True)]
        shape = f" of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise UsageError(
            f"run.log({name}=...) got a {type(value).__name__}{shape}; give one number, the mean over this worker's "
            f"images of the batch, (numerator, denominator), a vector of at most {_MOST_NUMBERS} numbers, or an object "
            "of torchmetrics."
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)
