"""When a run has trained enough: it got good enough, no longer gets better, or its time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from raytrain.config import TrainConfig
from raytrain.runs.outcome import Progress


class EarlyStop:
    """Looks at each evaluation for ``--until`` and ``--patience``, and at the clock for ``--max-time``.

    ``reason`` says why the run should stop; None as long as it should not.
    """

    def __init__(self, config: TrainConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason: str | None = None
        self._config = config
        self._clock = clock
        self._started_at = clock()

    def evaluated(self, progress: Progress, measured: Mapping[str, float]) -> Progress:
        """Take note of an evaluation. The progress, which checkpoints hold, counts those without a better accuracy."""
        config, accuracy = self._config, measured.get("accuracy")
        if config.target is not None:
            name, value = config.target
            if _is_reached(name, measured.get(name, float("nan")), value):
                self.reason = f"--until {config.until}: {name} is {measured[name]:.4f}"
        if accuracy is None:
            return progress
        if progress.best_accuracy is None or accuracy > progress.best_accuracy:
            return replace(progress, best_accuracy=accuracy, num_worse=0)
        progress = replace(progress, num_worse=progress.num_worse + 1)
        if config.patience is not None and progress.num_worse >= config.patience:
            self.reason = f"--patience {config.patience}: the accuracy is not above {progress.best_accuracy:.4f}"
        return progress

    def time_is_up(self) -> bool:
        """Whether ``--max-time`` is over. It counts from the start of this attempt."""
        limit_s = self._config.max_time_s
        if limit_s is None or self._clock() - self._started_at < limit_s:
            return False
        self.reason = self.reason or f"--max-time {self._config.max_time}"
        return True


def _is_reached(name: str, measured: float, wanted: float) -> bool:
    return measured <= wanted if "loss" in name else measured >= wanted
