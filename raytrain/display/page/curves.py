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
_MAX_ROWS = 2**18
"""Most rows of a curve in memory: of more, two that follow each other become one, with their mean and extremes."""
_MAX_NAMES = 64
"""Most metrics that are shown: a history of a stranger may name millions."""
_FIELDS = ("elapsed_s", "learning_rate", "images_per_s", "data_wait_fraction")
_DIGITS = 6

Floats = NDArray[np.float64]


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
            if len(self._steps) > _MAX_ROWS:
                self._merge_pairs()
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
        self._weights = array("d")  # how many rows of the history each is
        self._columns: dict[str, array[float]] = {}
        # Of the first ones, which are several rows each. Of the others, a value is its own minimum and maximum.
        self._lows: dict[str, Floats] = {}
        self._highs: dict[str, Floats] = {}

    def _merge_pairs(self) -> None:
        """Make one row of every two. The last row of all stays out of it if their number is odd."""
        num_rows = len(self._steps) // 2 * 2
        weights = np.array(self._weights)[:num_rows].reshape(-1, 2)
        for name, column in self._columns.items():
            values, low, high = (part.reshape(-1, 2) for part in self._values(name, 0, num_rows))
            self._lows[name], self._highs[name] = np.fmin.reduce(low, axis=1), np.fmax.reduce(high, axis=1)
            column[:num_rows] = array("d", _mean_of_pairs(values, weights))
        self._weights[:num_rows] = array("d", weights.sum(axis=1))
        self._steps[:num_rows] = self._steps[1:num_rows:2]
        self.generation += 1

    def _values(self, name: str, first: int, end: int) -> tuple[Floats, Floats, Floats]:
        """The values of a metric, and the minimum and maximum that each of them stands for."""
        values = np.array(self._columns[name][first:end])
        low, high = (np.where(np.isfinite(values), values, np.nan) for _ in range(2))
        for part, merged in ((low, self._lows), (high, self._highs)):
            known = merged.get(name, values[:0])[first:end]
            part[: len(known)] = known
        return values, low, high

    def _add(self, row: MetricRow) -> None:
        values = {name: getattr(row, name) for name in _FIELDS} | dict(row.metrics)
        for name in values.keys() - self._columns.keys():
            if len(self._columns) < _MAX_NAMES:
                self._columns[name] = array("d", [math.nan]) * len(self._steps)
        self._steps.append(row.step)
        self._weights.append(1)
        for name, column in self._columns.items():
            value = values.get(name)
            column.append(math.nan if value is None else value)

    def _buckets(self, first: int, end: int, width: int) -> dict[str, Any]:
        steps = np.array(self._steps[first:end], np.int64)
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
        ends = np.append(starts[1:], len(steps)) - 1
        weights = np.array(self._weights[first:end])
        several = len(starts) < len(steps) or any(weights > 1)
        return {
            "width": width,
            "step": steps[ends[: len(starts)]].tolist(),
            "metrics": {
                name: _summarize(*self._values(name, first, end), weights, starts, several) for name in self._columns
            },
        }


def _summarize(
    values: Floats, low: Floats, high: Floats, weights: Floats, starts: NDArray[np.int64], several: bool
) -> dict[str, list[float | None]]:
    """Mean, minimum and maximum of ``values`` from each of ``starts`` up to the next."""
    if not several:
        return {"mean": _plain(values)}
    known = np.isfinite(values)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        total = np.add.reduceat(np.where(known, values * weights, 0), starts)
        mean = total / np.add.reduceat(np.where(known, weights, 0), starts)
    return {
        "mean": _plain(mean),
        "low": _plain(np.fmin.reduceat(low, starts)),
        "high": _plain(np.fmax.reduceat(high, starts)),
    }


def _mean_of_pairs(values: Floats, weights: Floats) -> Floats:
    """The means of (N, 2) values, of those that are finite."""
    known = np.isfinite(values)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return np.where(known, values * weights, 0).sum(axis=1) / np.where(known, weights, 0).sum(axis=1)


def _plain(values: Floats) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]
