"""When a run has trained enough: it got good enough, no longer gets better, or its time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.runs.outcome import Progress, StopReason


class EarlyStop:
    """Looks at each evaluation for ``--until`` and ``--patience``, and at the clock for ``--max-time``.

    ``reason`` says why the run should stop; None as long as it should not.
    """

    def __init__(self, config: TrainConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason: StopReason | None = None
        self._config = config
        self._clock = clock
        self._started_at = clock()

    def evaluated(self, progress: Progress, measured: Mapping[str, float]) -> Progress:
        """Take note of an evaluation. The progress, which checkpoints hold, counts those that are not the best.

        Raises UsageError if the evaluation lacks the metric that ``--best`` names.
        """
        config = self._config
        if config.target is not None:
            name, value = config.target
            if _is_reached(name, measured.get(name, float("nan")), value):
                self.reason = StopReason("target", config.until, metric=name, value=measured[name])
        if config.best is not None and config.best not in measured:
            raise UsageError(
                f"--best is {config.best}, and evaluations measure {', '.join(measured)}; name one of these."
            )
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

    def time_is_up(self) -> bool:
        """Whether ``--max-time`` is over. It counts from the start of this attempt."""
        limit_s = self._config.max_time_s
        if limit_s is None or self._clock() - self._started_at < limit_s:
            return False
        self.reason = self.reason or StopReason("time", self._config.max_time)
        return True


def _is_reached(name: str, measured: float, wanted: float) -> bool:
    return measured <= wanted if _is_loss(name) else measured >= wanted


def _score(name: str, measured: Mapping[str, float]) -> float | None:
    """The metric called ``name``, a loss with a minus, so that the largest is the best; None if it is NaN."""
    value = measured[name]
    if math.isnan(value):
        return None
    return -value if _is_loss(name) else value


def _is_loss(name: str) -> bool:
    return "loss" in name
