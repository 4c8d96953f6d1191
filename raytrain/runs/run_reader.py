"""A run as its documents in storage tell it, read again and again by whoever watches it from elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_args, get_type_hints

from raytrain.errors import StorageError
from raytrain.runs.documents import read_json
from raytrain.runs.json_lines import parse_object, plain
from raytrain.runs.layout import CONFIG, EVENTS, METRICS, SKIPPED, SUMMARY
from raytrain.runs.metric_row import MetricRow, steps_per_epoch
from raytrain.runs.outcome import TrainResult
from raytrain.runs.snapshot import START, Event, RowCursor, Snapshot, Status, View
from raytrain.runs.status import RunStatus, read_status
from raytrain.runs.stop_request import read_stop_request
from raytrain.runs.stored_values import matches

if TYPE_CHECKING:
    from raytrain.storage.base import Store

T = TypeVar("T")

_READ_EVERY_S = 1.0
_NUM_ROWS_TIMED = 50
"""Latest rows from whose pace the time left is extrapolated."""


class RunReader:
    """Reads a run, wherever it trains, as :class:`Snapshot`: what a :class:`RunMonitor` gives in the run's own process.

    Of the metrics only what is new is parsed, so that :meth:`snapshot` may be called every second. Its documents may be
    damaged, or somebody else's: what cannot be used is left out.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self._rows = _GrowingLines(store, METRICS, lambda number, document: MetricRow.from_json(document))
        self._events = _GrowingLines(store, EVENTS, Event.from_json)
        self._skipped = _GrowingLines(store, SKIPPED, lambda number, document: number)
        self._steps_per_epoch = 1
        self._exists = False

    def exists(self) -> bool:
        """Whether there is such a run already."""
        self._exists = self._exists or self.store.exists(CONFIG)
        return self._exists

    def snapshot(self, since: RowCursor = START) -> Snapshot:
        """How the run stands, with the rows that a viewer at ``since`` lacks. Raises StorageError."""
        status = read_status(self.store)  # before the rows: a run that is over has all of them
        for lines in (self._rows, self._events, self._skipped):
            lines.read()
        rows, first_row = self._rows.parsed, since.row if since.attempt == self._rows.generation else 0
        steps = [row for row in rows[-_NUM_ROWS_TIMED:] if row.kind == "step"]
        step = max([status.step, *(row.step for row in rows[-1:])])
        result = None if status.active else _result(self.store)
        return Snapshot(
            name=self.name,
            status=cast(Status, status.status if status.status in get_args(Status) else "interrupted"),
            step=step,
            num_steps=max(1, status.num_steps, step),
            steps_per_epoch=self._count_steps_per_epoch(status, rows[first_row:]),
            num_workers=status.num_workers,
            elapsed_s=max([0.0, *(row.elapsed_s for row in rows[-1:]), *(event.at_s for event in self._events.parsed)]),
            time_left_s=_time_left_s(steps, status.num_steps) if status.active else None,
            attempt=self._rows.generation,
            first_row=first_row,
            rows=tuple(rows[first_row:]),
            latest=next(reversed(steps), None),
            evaluation=next((row for row in reversed(rows) if row.kind == "evaluation"), None),
            num_skipped=len(self._skipped.parsed),
            num_retries=result.num_retries if result else 0,
            stop_request=read_stop_request(self.store) if status.active else None,
            events=tuple(self._events.parsed),
            result=result,
        )

    def _count_steps_per_epoch(self, status: RunStatus, new: Sequence[MetricRow]) -> int:
        by_status = math.ceil(status.num_steps / status.num_epochs) if status.num_epochs else 1
        self._steps_per_epoch = max(self._steps_per_epoch, by_status, steps_per_epoch(new))
        return self._steps_per_epoch


def follow_run(reader: RunReader, view: View, pause: Callable[[float], None] = time.sleep) -> None:
    """Show a run of another process to ``view`` until it is over; storage that is out of reach may be back later."""
    cursor = START
    while True:
        with suppress(StorageError):
            snapshot = reader.snapshot(cursor)
            cursor = snapshot.cursor
            view(snapshot)
            if snapshot.over:
                return
        pause(_READ_EVERY_S)


class _GrowingLines(Generic[T]):
    """A document of JSON lines that mostly grows: ``parsed`` is what ``parse`` makes of each line and its number.

    ``generation`` counts how often the document was replaced by another one, as by a run that resumes.
    """

    def __init__(self, store: Store, path: str, parse: Callable[[int, dict[str, Any]], T]) -> None:
        self.parsed: list[T] = []
        self.generation = 1
        self._store = store
        self._path = path
        self._parse = parse
        self._num_bytes = 0
        self._end = b""  # of what was parsed

    def read(self) -> None:
        """Parse what is new."""
        try:
            data = self._store.get(self._path)
        except FileNotFoundError:
            data = b""
        if not data.startswith(self._end, self._num_bytes - len(self._end)) or len(data) < self._num_bytes:
            self.parsed, self._num_bytes = [], 0
            self.generation += 1
        whole = data[self._num_bytes : data.rfind(b"\n") + 1]  # the last line may still be growing
        for line in whole.splitlines():
            with suppress(KeyError, TypeError, ValueError):
                self.parsed.append(self._parse(len(self.parsed), plain(parse_object(line))))
        self._num_bytes += len(whole)
        self._end = data[max(0, self._num_bytes - 1000) : self._num_bytes]


def _result(store: Store) -> TrainResult | None:
    """The summary of a run that is over; None if it has none, or a damaged one."""
    hints = get_type_hints(TrainResult)
    document = read_json(store, SUMMARY)
    with suppress(TypeError):
        return TrainResult(**{name: value for name, value in document.items() if matches(value, hints.get(name))})
    return None


def _time_left_s(rows: Sequence[MetricRow], num_steps: int) -> float | None:
    """Extrapolated from the pace of ``rows``; None if they are too few."""
    if len(rows) < 2 or rows[-1].step <= rows[0].step:
        return None
    seconds_per_step = (rows[-1].elapsed_s - rows[0].elapsed_s) / (rows[-1].step - rows[0].step)
    return max(0.0, (num_steps - rows[-1].step) * seconds_per_step)
