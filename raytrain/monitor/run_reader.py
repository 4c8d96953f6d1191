"""Reads a run's documents repeatedly, for views in other processes than the run's.

A run that trains in another process is known only by its documents. From them a :class:`RunReader` makes the same
:class:`Snapshot` as a :class:`RunMonitor` in the run's own process, so that every view can show both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar, cast, get_args

from raytrain.errors import StorageError
from raytrain.monitor.events import TimedEvent, parse_event
from raytrain.monitor.snapshot import START, RowCursor, Snapshot, Status, View, time_left_s
from raytrain.monitor.stop_request import read_stop_request
from raytrain.runs.documents import CONFIG, EVENTS, METRICS, SKIPPED, SUMMARY, parse_lines, read_json
from raytrain.runs.line_file import BLOCK_BYTES, StoredLines
from raytrain.runs.machine_history import read_machines
from raytrain.runs.metric_row import MetricRow, steps_per_epoch
from raytrain.runs.outcome import result_of
from raytrain.runs.status import read_status
from raytrain.runs.stored_rows import RowParser, rows_of_kind
from raytrain.storage.store import Store

T = TypeVar("T")

_READ_EVERY_S = 1.0
_NUM_ROWS_TIMED = 50  # the time left is extrapolated from this many of the latest rows
_END_BYTES = 1000  # read again to recognise that a document was replaced


class RunReader:
    """Makes snapshots of a run from its documents, wherever it trains.

    Each call of :meth:`snapshot` reads and parses only new metrics, so that it may be called every second. The rows are
    not kept. The documents may be damaged, or somebody else's: values that cannot be used are left out.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self._rows = _GrowingLines(store, METRICS, RowParser())
        self._events = _GrowingLines(store, EVENTS, partial(parse_lines, parse_event))
        # Skipped images are only counted, so that their lines need not be parsed into records.
        self._skipped = _GrowingLines(store, SKIPPED, partial(parse_lines, bool))
        self._steps: deque[MetricRow] = deque(maxlen=_NUM_ROWS_TIMED)  # the latest rows of steps
        self._evaluation: MetricRow | None = None  # the latest one
        self._steps_per_epoch = 1  # as far as the rows show it
        self._exists = False

    def exists(self) -> bool:
        """Return True once there is such a run. Raise StorageError if storage is out of reach before that."""
        self._exists = self._exists or self.store.exists(CONFIG)
        return self._exists

    @property
    def behind(self) -> bool:
        """True if the latest snapshot had only a part of a long history, so that more rows can be read at once."""
        return self._rows.behind

    def snapshot(self, since: RowCursor = START) -> Snapshot:
        """Return the state of the run, with the rows after the cursor ``since``, or a part of them: see :attr:`behind`.

        If the history was replaced, or ``since`` is not the cursor of the last snapshot, the rows begin again with
        index 0. Raise StorageError if storage is out of reach.
        """
        # Read the status first: if it says that the run is over, the rows read after it are complete.
        status = read_status(self.store)
        first_row, rows = self._read_rows(since)
        self._events.read_all()
        self._skipped.read_all()

        # The documents are written one after the other, so take the latest values among them.
        latest_step = next(reversed(self._steps), None)
        latest_rows = [row for row in (latest_step, self._evaluation) if row is not None]
        step = max([status.step, *(row.step for row in latest_rows)])
        times_s = [*(row.elapsed_s for row in latest_rows), *(at_s for at_s, _ in self._events.parsed)]
        elapsed_s = max([status.elapsed_s, *times_s])

        result = None if status.active else result_of(read_json(self.store, SUMMARY))
        return Snapshot(
            name=self.name,
            status=cast(Status, status.status if status.status in get_args(Status) else "interrupted"),
            step=step,
            num_steps=max(1, status.num_steps, step),
            steps_per_epoch=max(self._steps_per_epoch, status.min_steps_per_epoch),
            num_workers=status.num_workers,
            elapsed_s=elapsed_s,
            time_left_s=time_left_s(self._steps, status.num_steps, step) if status.active else None,
            attempt=self._rows.version,
            first_row=first_row,
            rows=rows,
            num_rows=self._rows.num_parsed,
            latest=latest_step,
            evaluation=self._evaluation,
            num_skipped=len(self._skipped.parsed),
            num_retries=result.num_retries if result else 0,
            num_decoded_on_cpu=result.num_decoded_on_cpu if result else 0,
            stop_request=read_stop_request(self.store) if status.active else None,
            events=tuple(TimedEvent(number, *event) for number, event in enumerate(self._events.parsed)),
            result=result,
            machines=read_machines(self.store) if status.active else (),
            dollars=status.dollars,
            gpu_kwh=status.gpu_kwh,
        )

    def _read_rows(self, since: RowCursor) -> tuple[int, Sequence[MetricRow]]:
        """Read the next rows for a viewer at ``since``. Return the index of the first one, and the rows."""
        # Begin with the first row again, unless the viewer continues where the last read stopped.
        if since != (self._rows.version, self._rows.num_parsed):
            self._rows.restart()
        self._rows.parsed = []
        self._rows.read()
        rows, first_row = self._rows.parsed, self._rows.num_parsed - len(self._rows.parsed)

        # Keep only the last few rows of steps, and the last evaluation. The last few evaluations also say how many
        # steps an epoch has.
        if first_row == 0:
            self._steps.clear()
            self._evaluation = None
        evaluations = rows_of_kind(rows, "evaluation")[-_NUM_ROWS_TIMED:]
        self._steps.extend(rows_of_kind(rows, "step")[-_NUM_ROWS_TIMED:])
        self._evaluation = next(reversed(evaluations), self._evaluation)
        self._steps_per_epoch = max(self._steps_per_epoch, steps_per_epoch([*evaluations, *self._steps]))
        return first_row, rows


def follow_run(reader: RunReader, view: View, pause: Callable[[float], None] = time.sleep) -> None:
    """Show a run of another process to ``view`` about once a second, and return when it is over.

    While storage is out of reach, try again. ``pause`` waits for some seconds.
    """
    cursor = START
    while True:
        # Read a long history in pieces without a pause between them.
        with suppress(StorageError):
            snapshot = reader.snapshot(cursor)
            cursor = snapshot.cursor
            view(snapshot)
            if reader.behind:
                continue
            if snapshot.over:
                return
        pause(_READ_EVERY_S)


class _GrowingLines(Generic[T]):
    """Reads a document of JSON lines in pieces, while lines are added to it.

    Attributes:
        parsed: the results of ``parse`` for the lines so far, unless the caller has removed some.
        num_parsed: the number of these results, including those that were removed.
        behind: the last piece did not reach the end of the document, so that more can be read at once.
        version: 1, and 1 more whenever the document was replaced by another one, as when a run resumes. A replaced
            document is recognised by reading the last bytes of the previous piece again.
    """

    def __init__(self, store: Store, path: str, parse: Callable[[list[bytes]], Sequence[T]]) -> None:
        self.version = 1
        self._store = store
        self._path = path
        self._parse = parse
        self.restart()

    def restart(self) -> None:
        """Forget everything but the version, so that the document is read from its beginning."""
        self._lines = StoredLines(self._store, self._path)
        self.parsed: Sequence[T] = []
        self.num_parsed = 0
        self.behind = False
        self._num_bytes = 0  # that were parsed
        self._end = b""  # the last ones of these bytes

    def read(self) -> None:
        """Read and parse new lines, up to ``BLOCK_BYTES`` bytes. Raise StorageError if storage is out of reach."""
        # If the bytes before the new ones have changed, the document was replaced: begin again.
        data = self._read_piece()
        if not data.startswith(self._end):
            self.restart()
            self.version += 1
            data = self._read_piece()

        # Parse only whole lines, because the last one may still be growing.
        new = data[len(self._end) :]
        whole = new[: new.rfind(b"\n") + 1]
        parsed = self._parse(whole.splitlines())
        self.parsed = [*self.parsed, *parsed] if self.parsed else parsed
        self.num_parsed += len(parsed)
        self.behind = len(new) == BLOCK_BYTES and bool(whole)
        self._num_bytes += len(whole)
        self._end = (self._end + whole)[-_END_BYTES:]

    def read_all(self) -> None:
        """Read and parse all new lines."""
        self.read()
        while self.behind:
            self.read()

    def _read_piece(self) -> bytes:
        """Read the next piece of the document, and before it again the bytes that were parsed last, ``_end``.

        If the document was replaced, the result begins with other bytes. It is empty if there is no document.
        """
        start = self._num_bytes - len(self._end)
        try:
            return self._lines.get_range(start, len(self._end) + BLOCK_BYTES)
        except FileNotFoundError:
            return b""
