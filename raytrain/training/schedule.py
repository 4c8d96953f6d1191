"""When a checkpoint is due, and when a run has trained enough."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping
from dataclasses import replace

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import DIVERGED_HINT, Progress, StopReason

_EXPLODED = 4
"""A loss of so many times the first one ends a search for a learning rate."""


class EarlyStop:
    """Looks at each evaluation for ``--until`` and ``--patience``, at the clock for ``--max-time``: see ``reason``."""

    def __init__(self, config: TrainConfig) -> None:
        self.reason: StopReason | None = None
        self._config = config
        self._started_at = time.monotonic()
        self._first_loss: float | None = None

    def evaluated(self, progress: Progress, measured: Mapping[str, float]) -> Progress:
        """Take note of an evaluation; raises UsageError if it lacks a metric that an option is about."""
        config = self._config
        self._check_measured(measured)
        if config.target is not None:
            name, value = config.target
            reached = operator.le if _is_loss(name) else operator.ge
            if reached(measured.get(name, float("nan")), value):
                self.reason = StopReason("target", config.until, metric=name, value=measured[name])
        if config.best_metric not in measured:
            return replace(progress, score=None)
        score = _score(config.best_metric, measured)
        progress = replace(progress, score=score)
        best = progress.best_score
        if score is not None and (best is None or score > best):
            return replace(progress, best_score=score, num_worse=0)
        num_worse = progress.num_worse + 1
        if config.patience is not None and num_worse >= config.patience:
            value = None if best is None else abs(best)
            self.reason = StopReason("patience", metric=config.best_metric, value=value, count=config.patience)
        return replace(progress, num_worse=num_worse)

    def _check_measured(self, measured: Mapping[str, float]) -> None:
        config = self._config
        needed = {
            "--best": config.best,
            "--until": config.target and config.target[0],
            "--patience": config.patience and config.best_metric,
        }
        for option, name in needed.items():
            if name and name not in measured:
                raise UsageError(
                    f"{option} needs {name}, and evaluations measure {', '.join(measured) or 'nothing'}; return it "
                    "from the loop's evaluation, or name another metric (--best decides what --patience counts by)."
                )

    def trained(self, row: MetricRow) -> None:
        """Take note of a row of training: a learning rate that rises need not rise further once the loss explodes."""
        if not self._config.is_range_test or row.loss is None:
            return
        self._first_loss = self._first_loss or row.loss
        if not row.loss <= _EXPLODED * self._first_loss:  # also if it is NaN
            detail = f"the loss is {row.loss:.3g}, over {_EXPLODED} times that of the first step"
            self.reason = self.reason or StopReason("diverged", detail)

    def time_is_up(self) -> bool:
        """Whether ``--max-time`` is over. It counts from the start of this attempt."""
        limit_s = self._config.max_time_s
        if limit_s is None or time.monotonic() - self._started_at < limit_s:
            return False
        self.reason = self.reason or StopReason("time", self._config.max_time)
        return True


def _score(name: str, measured: Mapping[str, float]) -> float | None:
    """The metric called ``name``, a loss with a minus, so that the largest is the best; None if it is NaN."""
    value = measured[name]
    if math.isnan(value):
        return None
    return -value if _is_loss(name) else value


def _is_loss(name: str) -> bool:
    return "loss" in name


class CheckpointSchedule:
    """Knows the step of the newest checkpoint, ``saved_step`` or None, and whether the next one is due."""

    def __init__(self, config: TrainConfig, steps_per_epoch: int, saved_step: int | None) -> None:
        self.saved_step = saved_step
        self._diverged: tuple[int, str] | None = None  # the step of a checkpoint that was due later, and why it is not
        every = config.checkpoint_intervals
        self._every_steps = (every.steps, every.epochs * steps_per_epoch)
        self._every_s = every.seconds
        self._saved_at = time.monotonic()

    def due_at(self, step: int) -> bool:
        """Whether the options ask for a checkpoint after ``step`` completed steps."""
        return any(every > 0 and step % every == 0 for every in self._every_steps)

    def due_by_time(self) -> bool:
        """Whether the last checkpoint, or the start of the run, is too many seconds ago."""
        return 0 < self._every_s <= time.monotonic() - self._saved_at

    def attempted(self, step: int, not_finite: str | None = None) -> None:
        """A checkpoint after ``step`` completed steps is being written, unless the weight ``not_finite`` is not."""
        if not_finite is None:
            self.saved_step, self._diverged = step, None
        else:
            self._diverged = step, not_finite
        self._saved_at = time.monotonic()

    def due_at_end(self, step: int) -> bool:
        """Whether a run that ends after ``step`` completed steps still needs its last checkpoint."""
        return step not in (self.saved_step or 0, self._diverged and self._diverged[0])

    @property
    def divergence(self) -> str | None:
        """Why the last checkpoint that was due was not written; None if it was."""
        if self._diverged is None:
            return None
        step, name = self._diverged
        return f"the weight {name} is not finite after step {step:,}; {DIVERGED_HINT}"
