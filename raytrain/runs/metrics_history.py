"""Metrics, events and skipped images of a run as JSON lines, written in the background, and read again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict
from functools import cached_property
from typing import Any, Generic, TypeVar

from raytrain.runs.documents import EVENTS, METRICS, SKIPPED, Report, ignore, parse_lines
from raytrain.runs.line_file import LineFile, StoredLines
from raytrain.runs.metric_row import MetricRow, SkippedImage
from raytrain.storage.store import Store

T = TypeVar("T")

SAMPLE_SIZE = 2**15  # rows
RETRY_S = 2.0  # after which the rows are written again if storage has refused them


class History:
    """Writes rows to storage as they are recorded, and keeps a :class:`Sample` of the metrics in memory.

    Recording never waits for storage and never fails because of it: a thread writes and retries, and :meth:`close`
    writes the rest. An existing history is read when it is first needed, and continued. That may wait for storage, and
    raise StorageError. Only one thread at a time may record or read; any thread may :meth:`flush`.

    Attributes:
        error: why storage does not accept the rows at present; None if it does.
    """

    def __init__(self, store: Store) -> None:
        self.error: str | None = None
        self._store = store
        self._problems: list[str] = []
        # One document for each kind of row, and one thread that writes all of them.
        self._metrics = LineFile(store, METRICS, MetricRow.from_json, MetricRow.to_json)
        self._skipped = LineFile(store, SKIPPED, SkippedImage.from_json, asdict)
        self._events = LineFile[dict[str, Any]](store, EVENTS, dict, dict)
        self._files = self._metrics, self._skipped, self._events
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._writer = threading.Thread(target=self._write_as_it_comes, name="history", daemon=True)
        self._writer.start()

    @cached_property
    def skipped_images(self) -> list[SkippedImage]:
        """The images skipped so far, each once."""
        return read_skipped(self._store, self._problems.append)

    @cached_property
    def sample(self) -> Sample[MetricRow]:
        """The metrics so far, in the order of recording; of a long history, the latest and a part of the others."""
        sample = sample_of_rows()
        sample.extend(read_metrics(self._store, self._problems.append))
        return sample

    def take_problems(self) -> list[str]:
        """Return the problems with reading the existing history that no earlier call has returned."""
        return [self._problems.pop(0) for _ in self._problems.copy()]

    def record(self, row: MetricRow) -> None:
        """Add a row of metrics; one of the test images replaces that of the same step.

        A run that was killed before its end, after it had measured them, measures them again when it resumes.
        """
        if row.kind == "test" and any(earlier.kind == "test" for earlier in self.sample.rows):
            self._cut(lambda earlier: (earlier.kind, earlier.step) != ("test", row.step))
        self.sample.extend([row])
        self._metrics.extend([row])
        self._changed.set()

    def record_event(self, event: dict[str, Any]) -> None:
        """Add an event to events.jsonl."""
        self._events.extend([event])
        self._changed.set()

    def skip(self, images: Iterable[SkippedImage]) -> list[SkippedImage]:
        """List images that could not be used in skipped.jsonl, each once; return those that it did not list before."""
        keys = self._skipped_keys
        new = list({image.key: image for image in images if image.key not in keys}.values())
        keys.update(image.key for image in new)
        self.skipped_images.extend(new)
        self._skipped.extend(new)
        self._changed.set()
        return new

    def rewind(self, step: int, *, measures_again: bool = False) -> None:
        """Drop the metrics after ``step``: a run that resumes from that step's checkpoint records them again.

        With ``measures_again``, drop what was measured after this step, too.
        """

        def is_kept(row: MetricRow) -> bool:
            return row.step < step or (row.step == step and (row.kind == "step" or not measures_again))

        self._cut(is_kept)
        self._changed.set()

    def _cut(self, is_kept: Callable[[MetricRow], bool]) -> None:
        """Drop the metrics that are not kept, which must be the last ones."""
        self.sample.keep(is_kept)
        self._metrics.cut(is_kept)

    def flush(self) -> None:
        """Write the rows that storage does not have yet; raise StorageError if that fails."""
        for file in self._files:
            file.write()
        self.error = None

    def close(self) -> None:
        """End the thread and write the rest; raise StorageError if that fails. May be called twice."""
        self._closed.set()
        self._changed.set()
        self._writer.join()
        self.flush()

    @cached_property
    def _skipped_keys(self) -> set[str]:
        return {image.key for image in self.skipped_images}

    def _write_as_it_comes(self) -> None:
        """Run in a thread: write new rows until the history is closed, and try again after an error."""
        while not self._closed.is_set():
            self._changed.wait()
            self._changed.clear()
            try:
                self.flush()
                pause_s = max(file.pause_s() for file in self._files)
            except Exception as error:  # whatever storage raises: the rows are kept and written later
                self.error = str(error) or type(error).__name__
                self._changed.set()
                pause_s = RETRY_S
            self._closed.wait(pause_s)


class Sample(Generic[T]):
    """All rows of a short history; of a long one at least the ``size`` newest, and every n-th of each kind before.

    ``kind`` returns the kind of a row. For each kind, n is a power of two, the smallest with which at most ``size``
    older rows of the kind are kept. So a history of any length takes bounded memory, and adding rows takes constant
    time on average.
    """

    def __init__(self, kind: Callable[[T], Hashable], size: int = SAMPLE_SIZE) -> None:
        self.num_rows = 0
        """Number of rows of the history, including those that are not kept."""
        self._kind = kind
        self._size = size
        self._older: list[tuple[T, Hashable, int]] = []  # each with its kind, and its number among the rows of the kind
        self._num_older = Counter[Hashable]()  # by kind, including those that are not kept
        self._newest: list[T] = []

    @property
    def rows(self) -> list[T]:
        """The rows that are kept, in their order."""
        return [*(row for row, _, _ in self._older), *self._newest]

    def since(self, row: int) -> tuple[int, list[T]]:
        """Return the rows that a viewer with the first ``row`` rows lacks, and before them the index of the first one.

        If some of these rows are no longer kept, return 0 and all of :attr:`rows`.
        """
        first_of_newest = self.num_rows - len(self._newest)
        return (row, self._newest[row - first_of_newest :]) if row >= first_of_newest else (0, self.rows)

    def extend(self, rows: Iterable[T]) -> None:
        """Add rows."""
        num_before = len(self._newest)
        self._newest.extend(rows)
        self.num_rows += len(self._newest) - num_before
        # Thin only when there are twice as many rows as are kept, so that each row is moved once.
        if len(self._newest) > 2 * self._size:
            self._thin(self._newest[: -self._size])
            del self._newest[: -self._size]

    def follow(self, first_row: int, rows: Iterable[T]) -> None:
        """Add rows of another sample, as its :meth:`since` returns them; they replace all rows here from row 0 on."""
        if first_row == 0:
            self.keep(lambda row: False)
        self.extend(rows)

    def keep(self, is_kept: Callable[[T], bool]) -> None:
        """Drop the rows for which ``is_kept`` is False. Those that stay count as the whole history from now on."""
        self._newest = [row for row in self._newest if is_kept(row)]
        self._older = [older for older in self._older if is_kept(older[0])]
        self._num_older = Counter({kind: number + 1 for _, kind, number in self._older})
        self.num_rows = len(self.rows)

    def _thin(self, more: Iterable[T]) -> None:
        """Add ``more`` rows to the older ones, and keep every n-th of each kind."""
        for row in more:
            kind = self._kind(row)
            self._older.append((row, kind, self._num_older[kind]))
            self._num_older[kind] += 1
        # The smallest power of two that is at least num / size.
        every = {kind: 2 ** ((num - 1) // self._size).bit_length() for kind, num in self._num_older.items()}
        self._older = [(row, kind, number) for row, kind, number in self._older if number % every[kind] == 0]


def sample_of_rows(size: int | None = None) -> Sample[MetricRow]:
    """Return an empty sample of metrics, in which rows of steps and of evaluations are thinned separately."""
    return Sample(lambda row: row.kind, size or SAMPLE_SIZE)


def read_metrics(store: Store, report: Report = ignore) -> list[MetricRow]:
    """Return the metrics of a run, or a :class:`Sample` of many; ``report`` gets a sentence about damaged lines.

    Empty if there is no history. Raises StorageError if storage is out of reach.

    Example: ``[row.loss for row in read_metrics(run_store("./runs", "digits")) if row.kind == "step"]``
    """
    # Thin the lines before they are parsed, because parsing takes most of the time. Those of evaluations and of the
    # test images, which are few, are recognised by their text, and thinned separately.
    lines = Sample[bytes](lambda line: b'"evaluation"' in line or b'"test"' in line)
    for block in StoredLines(store, METRICS).blocks():
        lines.extend(block.splitlines())
    return _parse_undamaged(lines.rows, METRICS, MetricRow.from_json, report)


def read_evaluations(store: Store, step: int) -> tuple[MetricRow | None, MetricRow | None]:
    """Return the last rows, of a stored run, of an evaluation after ``step`` steps and of its test images, if any.

    The test images are measured at a run's end, with its best checkpoint. If it has trained on since, that may be
    another checkpoint now, and there is no row of the test images.

    Example: ``read_evaluations(run_store("./runs", "first"), 300)[0].metrics["top5"]``
    """
    rows = [row for row in read_metrics(store) if row.kind != "step"]
    of_step = [row for row in rows if row.kind == "evaluation" and row.step == step]
    test = rows[-1] if rows and rows[-1].kind == "test" else None
    return (of_step[-1] if of_step else None), test


def read_skipped(store: Store, report: Report = ignore) -> list[SkippedImage]:
    """Return the images that a run skipped; ``report`` gets a sentence about damaged lines.

    Empty if it skipped none. Raises StorageError if storage is out of reach.
    """
    lines = [line for block in StoredLines(store, SKIPPED).blocks() for line in block.splitlines()]
    return _parse_undamaged(lines, SKIPPED, SkippedImage.from_json, report)


def _parse_undamaged(lines: list[bytes], path: str, parse: Callable[[dict[str, Any]], T], report: Report) -> list[T]:
    """Return the results of ``parse`` for the undamaged lines of ``path``; ``report`` gets the number of the others."""
    parsed = parse_lines(parse, lines)
    if num_damaged := len(lines) - len(parsed):
        report(f"{num_damaged:,} of {len(lines):,} lines of {path} cannot be read")
    return parsed
