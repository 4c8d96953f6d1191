"""Feed of a page's viewers: first the whole run, then its changes, with curves as fine as a screen can show.

Snapshots come in, and messages go out. A run may have millions of rows, viewers may be slow, and some come late, so
nothing is queued. The feed keeps the run's state once, and each viewer keeps a cursor that says how much it has seen.
Whenever a viewer asks, it gets everything that has changed since its cursor.

Curves are made coarser twice. In memory a curve has a bounded number of points: when there are too many, pairs of
neighbours are merged (:meth:`Curves.extend`). For a screen, points are gathered into buckets, at most as many as a
screen has columns of pixels (:meth:`Curves.since`). Points and buckets have a mean, a minimum and a maximum, so no
extreme value of a row is ever lost.
"""

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
_NOT_COPIED = {
    *("rows", "first_row", "attempt", "events", "suspicious"),  # sent apart from the state, or not at all
    *("result", "latest", "evaluation", "stop_request", "machines"),  # in the state in another form
}
"""Fields of a snapshot that are not copied into the state of a run as they are."""

MAX_BUCKETS = 1500  # most buckets of a curve: a screen has about as many columns of pixels
MAX_POINTS = 2**18
"""Most points of a curve in memory, an even number. With more rows, each point stands for several of them."""
_MAX_NAMES = 64  # most metrics that are shown: a history of a stranger may name millions
_FIELDS = ("elapsed_s", "learning_rate", "images_per_s", "data_wait_fraction")
_DIGITS = 8  # more than are shown, so that nothing is rounded twice

Floats = NDArray[np.float64]


class FeedCursor(NamedTuple):
    """Position of a viewer in a run: what it has seen of the state, the events and the curves.

    A generation of events or curves ends when what a viewer has seen of them is no longer valid.
    """

    version: int = 0  # of the state
    events: tuple[int, int] = (-1, 0)  # generation of the events, and the number of the next one
    curves: tuple[tuple[int, int], ...] = ((-1, 0),) * len(_KINDS)  # generation and number of points, for each kind


class RunFeed:
    """The state, events and curves of the run called ``name``, for viewers, who keep a :class:`FeedCursor` each.

    One thread passes snapshots to it; viewers may ask in any thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cursor = START
        """The position in the run's history from which the next snapshot must have the rows."""
        self._lock = threading.Lock()
        self._curves = {kind: Curves(kind) for kind in _KINDS}
        self._events: dict[int, TimedEvent] = {}
        self._events_generation = 0  # another one if another run has taken the name: its events have the same numbers
        self._state: dict[str, Any] | None = None
        self._version = 0
        self._encoded: dict[FeedCursor, bytes] = {}  # by the cursors of the viewers that asked since the last change

    def update(self, snapshot: Snapshot) -> None:
        """Add a ``snapshot`` to what viewers get.

        It has the rows from :attr:`cursor` on; if its first row is number 0, its rows replace those that came before.
        """
        with self._lock:
            for curves in self._curves.values():
                if snapshot.first_row == 0 and self.cursor != START:
                    curves.clear()
                curves.extend(snapshot.rows)

            # The next snapshot has the rows after these. It may repeat events, which have numbers; if one has another
            # content than the event of its number, it is of another run, which has taken the name.
            self.cursor: RowCursor = snapshot.cursor
            if any(self._events.get(event.number, event) != event for event in snapshot.events):
                self._events.clear()
                self._events_generation += 1
            self._events |= {event.number: event for event in snapshot.events}
            for number in sorted(self._events)[:-_NUM_EVENTS]:
                del self._events[number]

            # All other fields are small: they are the state, which viewers get as a whole.
            fields = (field.name for field in dataclasses.fields(snapshot) if field.name not in _NOT_COPIED)
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
            state = plain(state)
            if state != self._state or snapshot.rows:
                self._change_to(state)

    def report(self, problem: str) -> None:
        """Show a problem until the next snapshot, if there was one already."""
        with self._lock:
            if self._state is not None and self._state.get("problem") != problem:
                self._change_to({**self._state, "problem": problem})

    def _change_to(self, state: dict[str, Any]) -> None:
        """Replace the state, so that every viewer lacks something from now on."""
        self._state = state
        self._version += 1
        self._encoded.clear()

    def since(self, cursor: FeedCursor) -> tuple[bytes | None, FeedCursor]:
        """Return the updates that a viewer at ``cursor`` lacks as JSON, None if it lacks none, and its next cursor."""
        with self._lock:
            if self._state is None or cursor.version == self._version:
                return None, cursor

            # A message is encoded once for all viewers who have read equally far.
            if cursor not in self._encoded:
                if len(self._encoded) >= _MAX_ENCODED:
                    self._encoded.clear()

                # Each curve is sent whole, or from the last bucket that the viewer has, which is replaced.
                changes: dict[str, Any] = {}
                for (kind, curves), (generation, num_seen) in zip(self._curves.items(), cursor.curves, strict=True):
                    reset = generation != curves.generation
                    changes[kind] = {"reset": reset, **curves.since(0 if reset else num_seen)}

                # The page shows an event's text; its code uses the kind and the fields.
                generation, next_event = cursor.events
                events = [
                    {
                        "number": number,
                        "at_s": timed.at_s,
                        "kind": timed.event.kind,
                        "fields": plain(timed.event.fields()),  # a loss may be NaN, which is no JSON
                        "text": event_text(timed.event),
                    }
                    for number, timed in sorted(self._events.items())
                    if number >= next_event or generation != self._events_generation
                ]
                message = {
                    "run": self.name,
                    "state": self._state,
                    "events": events,
                    "events_generation": self._events_generation,
                    "curves": changes,
                }
                self._encoded[cursor] = json.dumps(message, allow_nan=False).encode()

            curves_seen = tuple((curves.generation, len(curves)) for curves in self._curves.values())
            events_seen = self._events_generation, max(self._events, default=-1) + 1
            return self._encoded[cursor], FeedCursor(self._version, events_seen, curves_seen)

    def between(self, first_step: int, last_step: int) -> dict[str, Any]:
        """Return the curves from ``first_step`` to ``last_step``, as finely as a screen can show them, by kind of row.

        Each is what :meth:`Curves.between` returns.
        """
        with self._lock:
            return {kind: curves.between(first_step, last_step) for kind, curves in self._curves.items()}


class Curves:
    """The curves of all metrics in the rows of one ``kind``, over their steps, which increase.

    Each point stands for the same number of rows, a power of two: one at first. Rows wait until they make a point.
    ``len(curves)`` is the number of points.

    Buckets begin at multiples of ``width`` steps, a power of two that doubles when there are too many buckets. As long
    as ``generation`` stays the same, the buckets that a viewer has seen stay valid, but for the last one.
    """

    def __init__(self, kind: Kind) -> None:
        self.generation = -1  # clear() makes it 0
        self._kind: Kind = kind
        self.clear()

    def __len__(self) -> int:
        return self._num_points

    def clear(self) -> None:
        """Forget all rows, because the run has resumed from an earlier step, or another run has taken its name."""
        self.generation += 1
        self.width = 1
        self._rows_per_point = 1
        self._num_points = 0
        self._steps = array("q")  # the last step of each point, followed by the steps of the rows that wait
        # By metric: mean, minimum and maximum at each of these steps.
        self._columns: dict[str, tuple[array[float], ...]] = {}

    def extend(self, rows: Sequence[MetricRow]) -> None:
        """Add rows; rows of another kind are left out, and rows whose step is not after the last one's."""
        # Steps and values as columns, (num_rows,) each; NaN if a row lacks a metric. Stored rows are columns
        # already. The names of a curve may be older than these rows, or too many to be kept.
        rows = rows_of_kind(rows, self._kind)
        if isinstance(rows, StoredRows):
            names = (*_FIELDS, *rows.names)
            self._add_columns(names)
            steps = rows.values("step").astype(np.int64)
            values = {name: rows.values(name) for name in self._columns if name in names}
        else:
            self._add_columns(chain(_FIELDS, chain.from_iterable(row.metrics for row in rows)))
            steps = np.array([row.step for row in rows], np.int64)
            values = {name: np.array([row.value(name) for row in rows], np.float64) for name in self._columns}

        # Rows whose step increases, so is larger than all steps before it, wait behind the points. Mean, minimum and
        # maximum of a row are the value itself.
        last_step = self._steps[-1] if self._steps else -1
        increases = steps > np.maximum.accumulate(np.append(last_step, steps))[:-1]
        self._steps.frombytes(steps[increases].tobytes())
        unknown = np.full(len(steps), math.nan)
        for name, column in self._columns.items():
            added = values.get(name, unknown)[increases].tobytes()
            for statistic in column:
                statistic.frombytes(added)

        # Waiting rows become points, but for the last ones if they are too few for a point. When there are too many
        # points, pairs of points become one, and from then on a point stands for twice as many rows.
        while count := min((len(self._steps) - len(self)) // self._rows_per_point, MAX_POINTS - len(self)):
            self._merge(len(self), count, self._rows_per_point)
            self._num_points += count
            if len(self) >= MAX_POINTS:
                self._num_points //= 2
                self._rows_per_point *= 2
                self._merge(0, len(self), 2)
                self.generation += 1

        # Buckets become wider when they are too many for a screen.
        while len(self) and self._steps[len(self) - 1] // self.width - self._steps[0] // self.width >= MAX_BUCKETS:
            self.width *= 2
            self.generation += 1

    def _add_columns(self, names: Iterable[str]) -> None:
        """Begin a curve for each of ``names`` that is new, until there are too many."""
        for name in names:
            if name not in self._columns and len(self._columns) < _MAX_NAMES:
                self._columns[name] = tuple(array("d", [math.nan]) * len(self._steps) for _ in range(3))

    def _merge(self, first: int, count: int, size: int) -> None:
        """Merge the rows or points from index ``first`` on, ``size`` at a time, into ``count`` points in their place.

        A point has the last step of its rows. Its values are those of its rows that are known and finite.
        """
        end = first + count * size
        self._steps[first:end] = self._steps[first + size - 1 : end : size]
        for column in self._columns.values():
            values = [np.array(statistic[first:end]) for statistic in column]
            for statistic, merged in zip(column, _grouped(values, np.arange(0, count * size, size)), strict=True):
                statistic[first:end] = array("d", merged.tobytes())

    def since(self, num_seen: int) -> dict[str, Any]:
        """Return the buckets of the points after the first ``num_seen``, in the form of :meth:`between`.

        The first bucket may have points that were seen: it replaces the last one that the viewer has.
        """
        if num_seen >= len(self):
            return self._buckets(len(self), len(self), self.width)
        first = bisect_left(self._steps, self._steps[num_seen] // self.width * self.width)
        return self._buckets(first, len(self), self.width)

    def between(self, first_step: int, last_step: int) -> dict[str, Any]:
        """Return finer buckets from ``first_step`` to ``last_step``, for a viewer who zooms in.

        The dict has ``width``, the number of steps in a bucket, ``step``, the last step of each bucket, and
        ``metrics``, by name: ``mean``, and ``low`` and ``high`` if buckets have more than one row. Values that are
        unknown or not finite are None.
        """
        first = bisect_left(self._steps, first_step, hi=len(self))
        end = bisect_right(self._steps, last_step, hi=len(self))
        width = 2 ** max(0, math.ceil(math.log2(max(1, last_step - first_step) / MAX_BUCKETS)))
        return self._buckets(first, end, width)

    def _buckets(self, first: int, end: int, width: int) -> dict[str, Any]:
        """Gather the points from index ``first`` up to, but without, ``end`` into buckets of ``width`` steps.

        Returns the dict that :meth:`between` describes.
        """
        steps = np.array(self._steps[first:end], np.int64)
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1))  # first index of each bucket, (num_buckets,)
        ends = np.append(starts[1:], len(steps)) - 1
        has_several_rows = len(starts) < len(steps) or self._rows_per_point > 1
        metrics: dict[str, dict[str, list[float | None]]] = {}
        for name, column in self._columns.items():
            values = [np.array(statistic[first:end]) for statistic in column]
            if has_several_rows:
                statistics = zip(("mean", "low", "high"), _grouped(values, starts), strict=True)
                metrics[name] = {statistic: _plain_values(grouped) for statistic, grouped in statistics}
            else:
                metrics[name] = {"mean": _plain_values(values[0])}
        return {"width": width, "step": steps[ends[: len(starts)]].tolist(), "metrics": metrics}


def _grouped(values: Sequence[Floats], starts: NDArray[np.intp]) -> tuple[Floats, Floats, Floats]:
    """Return mean, minimum and maximum of each group of points, (num_groups,) each; NaN for one without finite values.

    ``values`` are the means, minima and maxima of the points, (num_points,) each; only finite ones count. ``starts``
    are the first indices of the groups.
    """
    means, lows, highs = (np.where(np.isfinite(statistic), statistic, np.nan) for statistic in values)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.nan_to_num(means), starts) / np.add.reduceat(np.isfinite(means).astype(float), starts)
    return mean, np.fmin.reduceat(lows, starts), np.fmax.reduceat(highs, starts)


def _plain_values(values: Floats) -> list[float | None]:
    """Return ``values`` with as many digits as are shown; None, as JSON has no NaN, for those that are not finite."""
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]
