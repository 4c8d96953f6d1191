"""Metrics over the steps of a run, down-sampled to what a screen can show: minimum, mean and maximum of each bucket."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytrain.runs.metric_row import MetricRow

MAX_BUCKETS = 1500
"""Most buckets of a curve: a screen has about as many columns of pixels."""
_MAX_POINTS = 2**18
"""Most points of a curve in memory, an even number. Of more rows, several become one point, with mean and extremes."""
_MAX_NAMES = 64
"""Most metrics that are shown: a history of a stranger may name millions."""
_FIELDS = ("elapsed_s", "learning_rate", "images_per_s", "data_wait_fraction")
_DIGITS = 8  # more than are shown, so that nothing is rounded twice

Floats = NDArray[np.float64]


class Curves:
    """All metrics of the rows of one kind. Their steps increase.

    Each point stands for the same number of rows: one at first, then a power of two. Rows wait until they make a point.

    Buckets begin at multiples of ``width`` steps, a power of two that doubles when they become too many. What a viewer
    has seen stays valid as long as ``generation`` does: then only buckets from the last one on change.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._clear()

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Forget all rows: the run resumes from an earlier step, or is another one."""
        self.generation += 1
        self._clear()

    def extend(self, rows: Iterable[MetricRow]) -> None:
        """Add rows. One whose step does not follow the last one's is left out."""
        for row in rows:
            if row.step > self._last_step:
                self._last_step = row.step
                self._waiting.append(row)
                if len(self._waiting) == self._rows_per_point:
                    self._add_point(self._waiting)
                    self._waiting.clear()
            if len(self._steps) >= _MAX_POINTS:
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
        self.width = 1
        self._last_step = -1
        self._rows_per_point = 1
        self._waiting: list[MetricRow] = []
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        # As long as a point is one row, its value is its own minimum and maximum.
        self._lows: dict[str, array[float]] = {}
        self._highs: dict[str, array[float]] = {}

    def _add_point(self, rows: Sequence[MetricRow]) -> None:
        """Add a point for ``rows``; its step is that of the last one."""
        measured = [{name: getattr(row, name) for name in _FIELDS} | dict(row.metrics) for row in rows]
        for name in {name for values in measured for name in values} - self._columns.keys():
            if len(self._columns) < _MAX_NAMES:
                for columns in self._curves():
                    columns[name] = array("d", [math.nan]) * len(self._steps)
        self._steps.append(rows[-1].step)
        for name, column in self._columns.items():
            values = [values.get(name) for values in measured]
            if len(rows) == 1:
                column.append(math.nan if values[0] is None else values[0])
            else:
                known = [value for value in values if value is not None and math.isfinite(value)] or [math.nan]
                column.append(sum(known) / len(known))
                self._lows[name].append(min(known))
                self._highs[name].append(max(known))

    def _curves(self) -> Sequence[dict[str, array[float]]]:
        """The means, and the minima and maxima if they are kept."""
        return (self._columns,) if self._rows_per_point == 1 else (self._columns, self._lows, self._highs)

    def _merge_pairs(self) -> None:
        """Make one point of every two."""
        for name, column in self._columns.items():
            values, low, high = (part.reshape(-1, 2) for part in self._values(name, 0, len(column)))
            self._columns[name] = array("d", _mean_of_pairs(values))
            self._lows[name] = array("d", np.fmin.reduce(low, axis=1))
            self._highs[name] = array("d", np.fmax.reduce(high, axis=1))
        self._steps = self._steps[1::2]
        self._rows_per_point *= 2
        self.generation += 1

    def _values(self, name: str, first: int, end: int) -> tuple[Floats, Floats, Floats]:
        """The values of a metric, and the minimum and maximum that each of them stands for."""
        values = np.array(self._columns[name][first:end])
        if self._rows_per_point > 1:
            return values, np.array(self._lows[name][first:end]), np.array(self._highs[name][first:end])
        known = np.where(np.isfinite(values), values, np.nan)
        return values, known, known

    def _buckets(self, first: int, end: int, width: int) -> dict[str, Any]:
        steps = np.array(self._steps[first:end], np.int64)
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
        ends = np.append(starts[1:], len(steps)) - 1
        several = len(starts) < len(steps) or self._rows_per_point > 1
        return {
            "width": width,
            "step": steps[ends[: len(starts)]].tolist(),
            "metrics": {name: _summarize(*self._values(name, first, end), starts, several) for name in self._columns},
        }


def _summarize(
    values: Floats, low: Floats, high: Floats, starts: NDArray[np.int64], several: bool
) -> dict[str, list[float | None]]:
    """Mean, minimum and maximum of ``values`` from each of ``starts`` up to the next."""
    if not several:
        return {"mean": _plain(values)}
    known = np.isfinite(values)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0), starts) / np.add.reduceat(known.astype(float), starts)
    return {
        "mean": _plain(mean),
        "low": _plain(np.fmin.reduceat(low, starts)),
        "high": _plain(np.fmax.reduceat(high, starts)),
    }


def _mean_of_pairs(values: Floats) -> Floats:
    """The means of (N, 2) values, of those that are finite."""
    known = np.isfinite(values)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return np.where(known, values, 0).sum(axis=1) / known.sum(axis=1)


def _plain(values: Floats) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]
