"""Feed of a page's viewers: the whole run at first, then what is new, with curves as fine as a screen can show."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raytrain.display.event_text import event_text, shown_summary, stop_text
from raytrain.monitor.events import TimedEvent
from raytrain.monitor.snapshot import START, RowCursor, Snapshot
from raytrain.runs.documents import plain
from raytrain.runs.metric_row import Kind, MetricRow
from raytrain.runs.stored_rows import StoredRows, rows_of_kind

_NUM_EVENTS = 500  # latest events that are shown
_NUM_MACHINES = 64  # most workers whose machines are shown
_MAX_ENCODED = 8  # most messages that are kept for viewers who have read equally far
_KINDS: tuple[Kind, ...] = ("step", "evaluation")


class FeedCursor(NamedTuple):
    """How far a viewer has read a run: the version of its state, and generation and points of its curves."""

    version: int = 0
    event: int = 0
    curves: tuple[tuple[int, int], ...] = ((-1, 0),) * len(_KINDS)


class RunFeed:
    """Takes snapshots from one thread, and answers viewers, who keep a cursor: nothing is queued for slow ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = START
        """What to ask for the next snapshot with."""
        self._lock = threading.Lock()
        self._curves = {kind: Curves(kind) for kind in _KINDS}
        self._events: dict[int, TimedEvent] = {}
        self._state: dict[str, Any] | None = None
        self._version = 0
        self._encoded: dict[FeedCursor, bytes] = {}  # by the cursors of the viewers that asked since the last change

    def update(self, snapshot: Snapshot) -> None:
        """Take ``snapshot``, which continues the one before (see :class:`Snapshot`)."""
        with self._lock:
            if snapshot.first_row == 0 and self.rows != START:
                for curves in self._curves.values():
                    curves.clear()
            for curves in self._curves.values():
                curves.extend(snapshot.rows)
            self.rows: RowCursor = snapshot.cursor
            self._events |= {event.number: event for event in snapshot.events}
            for number in sorted(self._events)[:-_NUM_EVENTS]:
                del self._events[number]
            state = _state(snapshot)
            if state != self._state or snapshot.rows:
                self._change_to(state)

    def report(self, problem: str) -> None:
        """Show a problem until the next snapshot."""
        with self._lock:
            if self._state is not None and self._state.get("problem") != problem:
                self._change_to({**self._state, "problem": problem})

    def _change_to(self, state: dict[str, Any]) -> None:
        self._state = state
        self._version += 1
        self._encoded.clear()

    def since(self, cursor: FeedCursor) -> tuple[bytes | None, FeedCursor]:
        """What a viewer at ``cursor`` lacks as JSON, None if it lacks nothing, and its next cursor."""
        with self._lock:
            if self._state is None or cursor.version == self._version:
                return None, cursor
            if cursor not in self._encoded:
                if len(self._encoded) >= _MAX_ENCODED:
                    self._encoded.clear()
                self._encoded[cursor] = json.dumps(self._message(cursor), allow_nan=False).encode()
            return self._encoded[cursor], self._cursor()

    def between(self, first_step: int, last_step: int) -> dict[str, Any]:
        """The curves of a part of the run, as finely as a screen can show them."""
        with self._lock:
            return {kind: curves.between(first_step, last_step) for kind, curves in self._curves.items()}

    def _message(self, cursor: FeedCursor) -> dict[str, Any]:
        seen = zip(self._curves.items(), cursor.curves, strict=True)
        changes = {kind: _change(curves, *known) for (kind, curves), known in seen}
        events = [_event(timed) for number, timed in sorted(self._events.items()) if number >= cursor.event]
        return {"run": self.name, "state": self._state, "events": events, "curves": changes}

    def _cursor(self) -> FeedCursor:
        known = tuple((curves.generation, len(curves)) for curves in self._curves.values())
        return FeedCursor(self._version, max(self._events, default=-1) + 1, known)


def _change(curves: Curves, generation: int, row: int) -> dict[str, Any]:
    """Buckets of a curve: those from a step on that replace what the viewer has, or all (``reset``)."""
    reset = generation != curves.generation
    return {"reset": reset, **curves.since(0 if reset else row)}


def _event(timed: TimedEvent) -> dict[str, Any]:
    """An event as the page gets it, which decides by its kind, and shows its text."""
    number, at_s, event = timed
    return {"number": number, "at_s": at_s, "kind": event.kind, "fields": event.fields(), "text": event_text(event)}


def _state(snapshot: Snapshot) -> dict[str, Any]:
    """Everything of a snapshot that is small."""
    omitted = ("rows", "events", "first_row", "attempt", "result", "latest", "evaluation", "stop_request", "machines")
    fields = (field.name for field in dataclasses.fields(snapshot) if field.name not in omitted)
    state = {
        **{name: getattr(snapshot, name) for name in fields},
        "epoch": snapshot.epoch,
        "num_epochs": snapshot.num_epochs,
        "over": snapshot.over,
        "machines": [dataclasses.asdict(use) for use in snapshot.machines[:_NUM_MACHINES]],
        "latest": snapshot.latest and snapshot.latest.to_json(),
        "evaluation": snapshot.evaluation and snapshot.evaluation.to_json(),
        "stop_reason": snapshot.stop_request and stop_text(snapshot.stop_request),
        "result": snapshot.result and shown_summary(snapshot.result.summary()),
    }
    return plain(state)


MAX_BUCKETS = 1500  # most buckets of a curve: a screen has about as many columns of pixels
_MAX_POINTS = 2**18
"""Most points of a curve in memory, an even number. Of more rows, several become one point, with mean and extremes."""
_MAX_NAMES = 64  # most metrics that are shown: a history of a stranger may name millions
_FIELDS = ("elapsed_s", "learning_rate", "images_per_s", "data_wait_fraction")
_DIGITS = 8  # more than are shown, so that nothing is rounded twice

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


class Curves:
    """All metrics of the rows of one ``kind``. Their steps increase.

    Each point stands for the same number of rows: one at first, then a power of two. Rows wait until they make a point.

    Buckets begin at multiples of ``width`` steps, a power of two that doubles when they become too many. What a viewer
    has seen stays valid as long as ``generation`` does: then only buckets from the last one on change.
    """

    def __init__(self, kind: Kind) -> None:
        self.generation = -1
        self._kind: Kind = kind
        self.clear()

    def __len__(self) -> int:
        return self._num_points

    def clear(self) -> None:
        """Forget all rows: the run resumes from an earlier step, or is another one."""
        self.generation += 1
        self.width = 1
        self._rows_per_point = 1
        self._num_points = 0
        self._steps = array("q")  # the last one of each point, and those of the rows that wait
        self._columns: dict[str, tuple[array[float], ...]] = {}  # mean, minimum and maximum of each of them

    def extend(self, rows: Sequence[MetricRow]) -> None:
        """Add rows. Those of another kind are left out, and those whose step does not follow the last one's."""
        steps, values = self._columns_of(rows_of_kind(rows, self._kind))
        last_step = self._steps[-1] if self._steps else -1
        increases = steps > np.maximum.accumulate(np.append(last_step, steps))[:-1]
        self._steps.frombytes(steps[increases].tobytes())
        unknown = np.full(len(steps), math.nan)
        for name, column in self._columns.items():
            added = values.get(name, unknown)[increases].tobytes()
            for part in column:
                part.frombytes(added)
        self._make_points()
        while len(self) and self._steps[len(self) - 1] // self.width - self._steps[0] // self.width >= MAX_BUCKETS:
            self.width *= 2
            self.generation += 1

    def since(self, row: int) -> dict[str, Any]:
        """The buckets that rows from index ``row`` on belong to; see :meth:`between`."""
        if row >= len(self):
            return self._buckets(len(self), len(self), self.width)
        first = bisect_left(self._steps, self._steps[row] // self.width * self.width)
        return self._buckets(first, len(self), self.width)

    def between(self, first_step: int, last_step: int) -> dict[str, Any]:
        """Finer buckets of a part of the run, for a viewer who looks closer.

        Returns ``step``, the last step of each bucket, and ``metrics`` by name: ``mean``, and ``low`` and ``high`` if a
        bucket holds more than one row. A value that is unknown or not finite is None.
        """
        first = bisect_left(self._steps, first_step, hi=len(self))
        end = bisect_right(self._steps, last_step, hi=len(self))
        width = 2 ** max(0, math.ceil(math.log2(max(1, last_step - first_step) / MAX_BUCKETS)))
        return self._buckets(first, end, width)

    def _columns_of(self, rows: Sequence[MetricRow]) -> tuple[Steps, dict[str, Floats]]:
        """The steps of rows, and the values of each metric that is shown; NaN if one is unknown."""
        if isinstance(rows, StoredRows):
            self._show([*_FIELDS, *rows.names])
            known = [name for name in self._columns if name in (*_FIELDS, *rows.names)]
            return rows.values("step").astype(np.int64), {name: rows.values(name) for name in known}
        self._show(chain(_FIELDS, chain.from_iterable(row.metrics for row in rows)))
        values = {name: np.array([row.value(name) for row in rows], np.float64) for name in self._columns}
        return np.array([row.step for row in rows], np.int64), values

    def _show(self, names: Iterable[str]) -> None:
        """Keep a curve for each of ``names`` that is new, as long as they are not too many."""
        for name in names:
            if name not in self._columns and len(self._columns) < _MAX_NAMES:
                self._columns[name] = tuple(array("d", [math.nan]) * len(self._steps) for _ in range(3))

    def _make_points(self) -> None:
        """Make points of the rows that wait, apart from the last ones if they are too few for a point."""
        while count := min((len(self._steps) - len(self)) // self._rows_per_point, _MAX_POINTS - len(self)):
            self._merge(len(self), count, self._rows_per_point)
            self._num_points += count
            if len(self) >= _MAX_POINTS:
                self._num_points //= 2
                self._rows_per_point *= 2
                self._merge(0, len(self), 2)
                self.generation += 1

    def _merge(self, first: int, count: int, size: int) -> None:
        """Make ``count`` points of what is there from index ``first`` on, each of ``size`` rows or points."""
        end = first + count * size
        self._steps[first:end] = self._steps[first + size - 1 : end : size]
        for column in self._columns.values():
            merged = _merged(*(np.array(part[first:end]).reshape(-1, size) for part in column))
            for part, values in zip(column, merged, strict=True):
                part[first:end] = array("d", values.tobytes())

    def _buckets(self, first: int, end: int, width: int) -> dict[str, Any]:
        steps = np.array(self._steps[first:end], np.int64)
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
        ends = np.append(starts[1:], len(steps)) - 1
        several = len(starts) < len(steps) or self._rows_per_point > 1
        return {
            "width": width,
            "step": steps[ends[: len(starts)]].tolist(),
            "metrics": {
                name: _summarize(*(np.array(part[first:end]) for part in column), starts=starts, several=several)
                for name, column in self._columns.items()
            },
        }


def _summarize(
    values: Floats, low: Floats, high: Floats, *, starts: NDArray[np.int64], several: bool
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


def _merged(means: Floats, lows: Floats, highs: Floats) -> tuple[Floats, Floats, Floats]:
    """Of rows of (num_points, num_rows) values: the means of those that are finite, their minima and maxima."""
    known = np.isfinite(means)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean = np.where(known, means, 0).sum(axis=1) / known.sum(axis=1)
    low, high = (np.where(np.isfinite(values), values, np.nan) for values in (lows, highs))
    return mean, np.fmin.reduce(low, axis=1), np.fmax.reduce(high, axis=1)


def _plain(values: Floats) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]
