"""Early stopping: when a run has trained enough, by its evaluations, its losses and the clock."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping
from dataclasses import replace

from raytrain.config import TrainConfig
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import Progress, StopReason
from raytrain.training.evaluation_metrics import is_lower_better

_EXPLODED = 4
"""A loss of so many times the first one ends a search for a learning rate."""


class EarlyStop:
    """Decides by evaluations (``--until``, ``--patience``), losses and the clock (``--max-time``) when to stop.

    ``reason`` is None until then. All workers decide alike about evaluations and losses, which they all know; worker 0
    asks for the time.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.reason: StopReason | None = None
        self._config = config
        self._started_at = time.monotonic()
        self._first_loss: float | None = None

    def evaluated(self, progress: Progress, measured: Mapping[str, float]) -> Progress:
        """Return ``progress`` with the score of an evaluation, after which the run may stop.

        Raises UsageError if the evaluation lacks a metric that an option is about.
        """
        config = self._config
        config.check_metrics(
            measured,
            "return it from the loop's evaluation, or name another metric (--best decides what --patience counts by)",
        )

        # --until: a value that a metric is to reach, a loss or an error from above.
        if config.target is not None:
            name, value = config.target
            reached = operator.le if is_lower_better(name, config) else operator.ge
            if reached(measured.get(name, float("nan")), value):
                self.reason = StopReason("target", config.until, metric=name, value=measured[name])

        # The score is the metric that counts, a loss or an error with a minus, so that the largest is the best.
        value = measured.get(config.best_metric, math.nan)
        score = None if math.isnan(value) else -value if is_lower_better(config.best_metric, config) else value
        progress = replace(progress, score=score)
        if config.best_metric not in measured:
            return progress

        # --patience: evaluations in a row that are not better than the best one.
        best = progress.best_score
        if score is not None and (best is None or score > best):
            return replace(progress, best_score=score, best_value=value, num_worse=0)
        num_worse = progress.num_worse + 1
        if config.patience is not None and num_worse >= config.patience:
            value, count = progress.best_value, config.patience
            self.reason = StopReason("patience", metric=config.best_metric, value=value, count=count)
        return replace(progress, num_worse=num_worse)

    def trained(self, row: MetricRow) -> None:
        """Stop a search for a learning rate as soon as the loss in a ``row`` of training explodes."""
        if not self._config.is_range_test or row.loss is None:
            return
        self._first_loss = self._first_loss or row.loss
        if not row.loss <= _EXPLODED * self._first_loss:  # also if it is NaN
            detail = f"the loss is {row.loss:.3g}, over {_EXPLODED} times that of the first step"
            self.reason = self.reason or StopReason("diverged", detail)

    def time_is_up(self) -> bool:
        """Return whether ``--max-time`` is over. It counts from the start of this attempt."""
        limit_s = self._config.max_time_s
        if limit_s is None or time.monotonic() - self._started_at < limit_s:
            return False
        self.reason = self.reason or StopReason("time", self._config.max_time)
        return True
