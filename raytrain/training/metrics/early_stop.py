"""Early stopping: decides when a run has trained enough, by its evaluations, its losses and the clock."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping
from dataclasses import replace

from raytrain.config import TrainConfig
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import Progress, StopReason
from raytrain.training.metrics.evaluation_metrics import is_lower_better

_RISE = 3
"""A search for a learning rate ends when the loss has risen by more than this many times that of the first step."""


class EarlyStop:
    """Decides by evaluations (``--until``, ``--patience``), losses and the clock (``--max-time``) when to stop.

    ``reason`` is None as long as the run should go on. Evaluations and losses, which set it, are the same on all
    workers, so all decide alike. Only worker 0 checks the time, sets ``time_reason``, and asks the others to stop.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.reason: StopReason | None = None
        self.time_reason: StopReason | None = None
        self._config = config
        self._started_at = time.monotonic()
        self._first_loss: float | None = None  # of a search for a learning rate

    def judge_evaluation(self, progress: Progress, measured: Mapping[str, float]) -> Progress:
        """Return ``progress`` after an evaluation, and set ``reason`` if the run should stop after it.

        ``progress`` then has the evaluation's score, the best score so far, and how many evaluations have come since.
        Raises UsageError if the evaluation lacks a metric that an option names.
        """
        config = self._config
        config.check_metrics(
            measured,
            "return it from the loop's evaluation, or name another metric (--best decides what --patience counts by)",
        )

        # --until: the metric has reached the value; losses and errors reach it from above.
        if config.target is not None:
            name, value = config.target
            reaches = operator.le if is_lower_better(name, config) else operator.ge
            if reaches(measured.get(name, math.nan), value):  # NaN reaches nothing
                self.reason = StopReason("target", config.until, metric=name, value=measured[name])

        # The score is the metric of --best, negated for losses and errors, so that the largest score is the best.
        value = measured.get(config.best_metric, math.nan)
        score = None if math.isnan(value) else -value if is_lower_better(config.best_metric, config) else value
        progress = replace(progress, score=score)
        if config.best_metric not in measured:  # an evaluation of the loop's own without it neither counts nor is best
            return progress

        # --patience: count the evaluations in a row that are not better than the best one. NaN is not better.
        best = progress.best_score
        if score is not None and (best is None or score > best):
            return replace(progress, best_score=score, best_value=value, num_worse=0)
        num_worse = progress.num_worse + 1
        if config.patience is not None and num_worse >= config.patience:
            value, count = progress.best_value, config.patience
            self.reason = StopReason("patience", metric=config.best_metric, value=value, count=count)
        return replace(progress, num_worse=num_worse)

    def judge_training(self, row: MetricRow) -> None:
        """Set ``reason`` if the loss in a ``row`` of training explodes, which ends a search for a learning rate.

        Other runs go on.
        """
        if not self._config.is_range_test or row.loss is None:
            return
        first = self._first_loss = self._first_loss or row.loss
        # The loss of a user's loop may be negative, hence abs. Written with "not", so that NaN, which compares as
        # False, also counts as exploded.
        if not row.loss - first <= _RISE * abs(first):
            detail = f"the loss is {row.loss:.3g}, after {first:.3g} in the first step"
            self.reason = self.reason or StopReason("diverged", detail)

    def check_time(self) -> bool:
        """Return whether ``--max-time`` is over, counted from the start of this attempt; if so, set ``time_reason``."""
        limit_s = self._config.max_time_s
        if limit_s is None or time.monotonic() - self._started_at < limit_s:
            return False
        self.time_reason = StopReason("time", self._config.max_time)
        return True
