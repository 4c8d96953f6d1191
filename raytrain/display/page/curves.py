"""Metrics over the steps of a run, down-sampled to what a screen can show: minimum, mean and maximum of each bucket."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytrain.runs.metric_row import MetricRow

MAX_BUCKETS = 1500
"""Most buckets of a curve: a screen has about as many columns of pixels."""
_MAX_NAMES = 64
"""Most metrics that are shown: a history of a stranger may name millions."""
_FIELDS = ("elapsed_s", "learning_rate", "images_per_s", "data_wait_fraction")
_DIGITS = 6


class Curves:
    """All metrics of the rows of one kind. Their steps increase.

    Buckets begin at multiples of ``width`` steps, a power of two that doubles when they become too many. What a viewer
    has seen stays valid as long as ``generation`` does: then only buckets from the last one on change.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.width = 1
        self._clear()

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Forget all rows: the run resumes from an earlier step, or is another one."""
        self.generation += 1
        self.width = 1
        self._clear()

    def extend(self, rows: Iterable[MetricRow]) -> None:
        """Add rows. One whose step does not follow the last one's is left out."""
        for row in rows:
            if not self._steps or row.step > self._steps[-1]:
                self._add(row)
        while self._steps and self._steps[-1] // self.width - self._steps[0] // self.width >= MAX_BUCKETS:
            self.width *= 2
            self.generation += 1

    def since(self, row: int) -> dict[str, Any]:
        """The buckets that rows from index ``row`` on belong to; see :meth:`between`."""
        if row >= len(self._steps):
            return self._buckets(len(self._steps), len(self._steps), self.width)
        first = bisect_left(self._steps, self._steps[row] // self.width * self.width)
        return self._buckets(first, len(self._steps), self.width)

    def between(self, first_step: int, last_step: int) -> dict[str, Any]:
        """Finer buckets of a part of the run, for a viewer who looks closer.

        Returns ``step``, the last step of each bucket, and ``metrics`` by name: ``mean``, and ``low`` and ``high`` if a
        bucket holds more than one row. A value that is unknown or not finite is None.
        """
        first, end = bisect_left(self._steps, first_step), bisect_right(self._steps, last_step)
        width = 2 ** max(0, math.ceil(math.log2(max(1, last_step - first_step) / MAX_BUCKETS)))
        return self._buckets(first, end, width)

    def _clear(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def _add(self, row: MetricRow) -> None:
        values = {name: getattr(row, name) for name in _FIELDS} | dict(row.metrics)
        for name in values.keys() - self._columns.keys():
            if len(self._columns) < _MAX_NAMES:
                self._columns[name] = array("d", [math.nan]) * len(self._steps)
        self._steps.append(row.step)
        for name, column in self._columns.items():
            value = values.get(name)
            column.append(math.nan if value is None else value)

    def _buckets(self, first: int, end: int, width: int) -> dict[str, Any]:
        steps = np.array(self._steps[first:end], np.int64)
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
        ends = np.append(starts[1:], len(steps)) - 1
        several = len(starts) < len(steps)
        return {
            "width": width,
            "step": steps[ends[: len(starts)]].tolist(),
            "metrics": {
                name: _summarize(np.array(column[first:end]), starts, several) for name, column in self._columns.items()
            },
        }


def _summarize(values: NDArray[np.float64], starts: NDArray[np.int64], several: bool) -> dict[str, list[float | None]]:
    """Mean, minimum and maximum of ``values`` from each of ``starts`` up to the next."""
    if not several:
        return {"mean": _plain(values)}
    known = np.isfinite(values)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0), starts) / np.add.reduceat(known, starts, dtype=np.int64)
    low = np.fmin.reduceat(np.where(known, values, np.nan), starts)
    high = np.fmax.reduceat(np.where(known, values, np.nan), starts)
    return {"mean": _plain(mean), "low": _plain(low), "high": _plain(high)}


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]
