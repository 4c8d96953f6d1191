"""The metric of ``--best``, by which runs and trials are compared."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

from raytrain.config import TrainConfig
from raytrain.errors import RaytrainError
from raytrain.training.metrics.evaluation_metrics import is_lower_better


class BestMetric(NamedTuple):
    """The metric of ``--best``, by which runs are compared: its name, and whether a smaller value is the better one.

    Example: ``BestMetric("loss", is_lower_better=True).score(0.5) == -0.5``
    """

    name: str = "accuracy"
    is_lower_better: bool = False

    def score(self, value: float) -> float:
        """Return a number that is larger for a better ``value``; NaN has the lowest, -inf."""
        if math.isnan(value):
            return -math.inf
        return -value if self.is_lower_better else value


ACCURACY = BestMetric()


def best_metric_of(config: TrainConfig | None) -> BestMetric:
    """Return the metric of ``--best`` of a run; the accuracy if its options cannot be read, so ``config`` is None.

    If the metric's class cannot be imported, such as one of torchmetrics on a machine without it, larger is better.

    Example: ``best_metric_of(record.config).score(0.5)``
    """
    if config is None:
        return ACCURACY
    is_lower = False
    with suppress(RaytrainError, ImportError):
        is_lower = is_lower_better(config.best_metric, config)
    return BestMetric(config.best_metric, is_lower)
