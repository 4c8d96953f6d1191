"""Rows of the metrics history, from the totals of the steps."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable

from raytrain.data.batch_plan import GlobalBatch
from raytrain.runs.metric_row import MetricRow
from raytrain.training.step_reduce import StepContribution, StepReduce, StepTotals

_MEAN_OF = {"correct": "accuracy"}


class StepMetrics:
    """Averages the steps between two rows. The sums that a loop logs in a step arrive with the totals of the next step.

    Args:
        reduce: gives the totals.
        record: gets each row.
        world_size: number of workers.
        samples_seen: used images of the run before its next step.
    """

    def __init__(
        self, reduce: StepReduce, record: Callable[[MetricRow], None], world_size: int, samples_seen: int
    ) -> None:
        self.samples_seen = samples_seen
        self._reduce = reduce
        self._record = record
        self._world_size = world_size
        self._closed_row: MetricRow | None = None
        self._reset()
        self._since = time.perf_counter()

    def read(self) -> StepTotals:
        """Read and add the totals of a step, and record the row that ended with the step before, if one did."""
        totals = self._reduce.totals()
        for name, value in totals.logged_before.items():
            self._logged[name] += value
        self._record_closed_row()
        self._num_used += totals.num_used
        self._wait_s += totals.wait_s
        self.samples_seen += totals.num_used
        return totals

    def flush(self, contribution: StepContribution) -> StepTotals:
        """Reduce what was logged in the last step without another step, which would bring it otherwise."""
        self._reduce.start(contribution)
        return self.read()

    def close_row(self, batch: GlobalBatch, learning_rate: float) -> None:
        """End the row with the step of ``batch``. All of the row is known now, except what was logged in that step."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        self._since = now
        self._closed_row = MetricRow(
            kind="step",
            step=batch.step + 1,
            epoch=batch.epoch + 1,
            samples_seen=self.samples_seen,
            learning_rate=learning_rate,
            images_per_s=round(self._num_used / seconds, 1),
            data_wait_fraction=round(min(self._wait_s / self._world_size / seconds, 1.0), 4),
        )

    def exclude(self, seconds: float) -> None:
        """Don't count the ``seconds`` of an evaluation as training time."""
        self._since += seconds

    def _record_closed_row(self) -> None:
        if self._closed_row is None:
            return
        num_used = max(self._num_used, 1)
        means = {_MEAN_OF.get(name, name): value / num_used for name, value in self._logged.items()}
        self._record(dataclasses.replace(self._closed_row, metrics=means))
        self._closed_row = None
        self._reset()

    def _reset(self) -> None:
        self._num_used = 0
        self._wait_s = 0.0
        self._logged: defaultdict[str, float] = defaultdict(float)
