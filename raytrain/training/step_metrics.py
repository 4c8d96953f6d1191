"""Rows of the metrics history from the sums of the steps."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from raytrain.data.batch_plan import GlobalBatch
from raytrain.training.step_reduce import StepTotals

_MEAN_OF = {"correct": "accuracy"}


class StepMetrics:
    """Gathers the steps between two rows; what was logged in a step comes with the sums of the step after it."""

    def __init__(self, world_size: int, samples_seen: int) -> None:
        self.samples_seen = samples_seen
        self._world_size = world_size
        self._due: dict[str, Any] | None = None
        self._reset()
        self._since = time.perf_counter()

    def step(self, sums: StepTotals) -> dict[str, Any] | None:
        """Take the sums of a step; the row that the step before completed, where it was a logged one."""
        for name, value in sums.previous.items():
            self._logged[name] += value
        row = self._complete()
        self._used += sums.used
        self._wait_s += sums.wait_s
        self.samples_seen += int(sums.used)
        return row

    def close_row(self, batch: GlobalBatch, learning_rate: float) -> None:
        """End the row with the step of ``batch``, of which all but what was logged is known now."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        self._since = now
        self._due = {
            "kind": "step",
            "step": batch.step + 1,
            "epoch": batch.epoch + 1,
            "samples_seen": self.samples_seen,
            "learning_rate": learning_rate,
            "images_per_s": round(self._used / seconds, 1),
            "data_wait_fraction": round(min(self._wait_s / self._world_size / seconds, 1.0), 4),
        }

    def pause(self, seconds: float) -> None:
        """Leave ``seconds`` of evaluation out of the pace."""
        self._since += seconds

    def _complete(self) -> dict[str, Any] | None:
        if self._due is None:
            return None
        used = max(self._used, 1.0)
        means = {_MEAN_OF.get(name, name): value / used for name, value in self._logged.items()}
        row = {**self._due, **means}
        self._due = None
        self._reset()
        return row

    def _reset(self) -> None:
        self._used = self._wait_s = 0.0
        self._logged: defaultdict[str, float] = defaultdict(float)
