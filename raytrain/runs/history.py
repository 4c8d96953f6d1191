"""A run's metrics, events and skipped images as JSON lines in storage, written without holding up the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from raytrain.runs.json_lines import Report, encode_lines, ignore, read_lines
from raytrain.runs.layout import EVENTS, METRICS, SKIPPED
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.skipped_images import SkippedImage
from raytrain.runs.snapshot import Event

if TYPE_CHECKING:
    from raytrain.storage.base import Store

T = TypeVar("T")

_RETRY_S = 2.0
_REWRITE_MIN_S = 2.0
_REWRITE_S_PER_BYTE = (
    1e-5  # an object cannot grow: rewriting it takes at most 100 kB/s of the uplink, however long it is
)


class History:
    """Rows that reach storage as they come: a file grows line by line, an object is rewritten, less often as it grows.

    Recording never waits for storage and never fails because of it: a thread writes and retries (``error`` says what
    is wrong), and :meth:`close` writes what is left. A history that exists is read when it is first needed, and
    continued. Safe to use from several threads.
    """

    def __init__(self, store: Store) -> None:
        self.error: str | None = None
        self._problems: list[str] = []
        self._metrics = _JsonLines(store, METRICS, MetricRow.from_json, MetricRow.to_json, self._problems.append)
        self._skipped = _JsonLines(store, SKIPPED, SkippedImage.from_json, asdict, self._problems.append)
        self._events = _JsonLines(store, EVENTS, partial(Event.from_json, 0), Event.to_json, self._problems.append)
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._writer = threading.Thread(target=self._write_as_it_comes, name="history", daemon=True)
        self._writer.start()

    @property
    def rows(self) -> list[MetricRow]:
        """The metrics so far, in the order of recording."""
        return self._metrics.rows

    @property
    def skipped_images(self) -> list[SkippedImage]:
        """The skipped images so far, each once."""
        return self._skipped.rows

    def take_problems(self) -> list[str]:
        """What could not be read of the history that existed, each said once."""
        return [self._problems.pop(0) for _ in self._problems.copy()]

    def record(self, row: MetricRow) -> None:
        """Add a row of metrics."""
        self._metrics.extend([row])
        self._changed.set()

    def note(self, event: Event) -> None:
        """Add an event."""
        self._events.extend([event])
        self._changed.set()

    def skip(self, images: Iterable[SkippedImage]) -> list[SkippedImage]:
        """Add the images that are not listed yet; return those."""
        listed = self._skipped_keys
        new = list({image.key: image for image in images if image.key not in listed}.values())
        listed.update(image.key for image in new)
        self._skipped.extend(new)
        self._changed.set()
        return new

    def rewind(self, step: int) -> None:
        """Drop the metrics after ``step``: a run that resumes from that step's checkpoint records them again."""
        self._metrics.keep(lambda row: row.step <= step)
        self._changed.set()

    def flush(self) -> None:
        """Write what storage does not have yet; raises what storage raises."""
        self._metrics.write()
        self._skipped.write()
        self._events.write()
        self.error = None

    def close(self) -> None:
        """Write the rest and end the thread; raises what storage raises. May be called twice."""
        self._closed.set()
        self._changed.set()
        self._writer.join()
        self.flush()

    @cached_property
    def _skipped_keys(self) -> set[str]:
        return {image.key for image in self._skipped.rows}

    def _write_as_it_comes(self) -> None:
        while not self._closed.is_set():
            self._changed.wait()
            self._changed.clear()
            try:
                self.flush()
                pause_s = max(lines.pause_s() for lines in (self._metrics, self._skipped, self._events))
            except Exception as error:  # whatever storage raises: the rows are kept and written later
                self.error = str(error) or type(error).__name__
                self._changed.set()
                pause_s = _RETRY_S
            self._closed.wait(pause_s)


def read_metrics(store: Store, report: Report = ignore) -> list[MetricRow]:
    """The metrics history of a run, as far as it is whole; ``report`` gets a line if it is not."""
    return read_lines(store, METRICS, MetricRow.from_json, report)


def read_skipped(store: Store, report: Report = ignore) -> list[SkippedImage]:
    """The images that a run skipped, as far as the list is whole; ``report`` gets a line if it is not."""
    return read_lines(store, SKIPPED, SkippedImage.from_json, report)


class _JsonLines(Generic[T]):
    """One document of JSON lines: whole in memory, in storage as of the last write."""

    def __init__(
        self,
        store: Store,
        path: str,
        parse: Callable[[dict[str, Any]], T],
        to_json: Callable[[T], dict[str, Any]],
        report: Report,
    ) -> None:
        self._store = store
        self._path = path
        self._from_json = parse
        self._to_json = to_json
        self._report = report
        self._grows = "://" not in store.url  # an object cannot grow
        self._size_bytes = 0
        self._lock = threading.RLock()
        self._writing = threading.Lock()
        self._loaded: list[T] | None = None
        self._num_written = 0
        self._rewrite = False

    @property
    def rows(self) -> list[T]:
        with self._lock:
            if self._loaded is None:
                self._loaded = read_lines(self._store, self._path, self._from_json, self._report)
                self._num_written = len(self._loaded)
                self._rewrite = True  # a process that was killed may have left half a line at the end of the file
            return self._loaded

    def extend(self, rows: list[T]) -> None:
        with self._lock:
            self.rows.extend(rows)

    def keep(self, wanted: Callable[[T], bool]) -> None:
        with self._lock:
            self._loaded = [row for row in self.rows if wanted(row)]
            self._rewrite = True

    def write(self) -> None:
        with self._writing:
            rows, rewrite = self._unwritten()
            if not rows and not (rewrite and self._num_written):
                return
            try:
                self._put(rows) if rewrite else self._append(rows)
            except BaseException:
                self._rewrite = True  # how much of it arrived is not known
                raise

    def _unwritten(self) -> tuple[list[T], bool]:
        with self._lock:
            rows = self.rows
            rewrite = self._rewrite or (not self._grows and len(rows) > self._num_written)
            self._rewrite = False
            return rows[0 if rewrite else self._num_written :], rewrite

    def pause_s(self) -> float:
        """How long to leave storage alone after a write."""
        return 0.0 if self._grows else max(_REWRITE_MIN_S, self._size_bytes * _REWRITE_S_PER_BYTE)

    def _put(self, rows: list[T]) -> None:
        text = self._encode(rows)
        self._store.put(self._path, text)
        self._num_written, self._size_bytes = len(rows), len(text)

    def _append(self, rows: list[T]) -> None:
        self._store.append(self._path, self._encode(rows))
        self._num_written += len(rows)

    def _encode(self, rows: list[T]) -> bytes:
        return encode_lines(self._to_json(row) for row in rows)
