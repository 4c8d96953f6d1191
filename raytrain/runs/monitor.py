"""The one place that knows how a run stands: it takes metrics and stop requests in, and gives snapshots out."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from raytrain.runs.bad_images import BadImageLimit
from raytrain.runs.history import History, Row

Status = Literal["starting", "running", "finished", "stopped", "failed"]

_NUM_EVENTS = 50


class RowCursor(NamedTuple):
    """How far a viewer has read: the ``row`` that it wants next, of the rows as they stand in ``attempt``."""

    attempt: int = 0
    row: int = 0


START = RowCursor()


class Event(NamedTuple):
    """Something worth a line: its running number from 0, seconds of training when it happened, and what."""

    number: int
    at_s: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """How a run stands at one moment.

    ``rows`` are the metrics from index ``first_row`` on: a viewer that kept the earlier ones puts them in with
    ``kept[snapshot.first_row:] = snapshot.rows`` and asks with ``snapshot.cursor`` the next time.
    """

    name: str
    status: Status
    step: int
    num_steps: int
    steps_per_epoch: int
    num_workers: int
    elapsed_s: float
    time_left_s: float | None
    attempt: int
    first_row: int
    rows: tuple[Row, ...]
    latest: Row | None
    evaluation: Row | None
    num_skipped: int
    num_retries: int
    stop_reason: str | None
    events: tuple[Event, ...]
    summary: dict[str, Any] | None

    @property
    def cursor(self) -> RowCursor:
        """What to ask the next snapshot with to get the rows after these."""
        return RowCursor(self.attempt, self.first_row + len(self.rows))

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, counted from 1."""
        return epoch_of(self.step, self.steps_per_epoch)

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole run; the last one may be cut short."""
        return epoch_of(self.num_steps, self.steps_per_epoch)

    @property
    def over(self) -> bool:
        """Whether the run has ended, one way or another."""
        return self.status in ("finished", "stopped", "failed")


def epoch_of(step: int, steps_per_epoch: int) -> int:
    """The epoch, counted from 1, that the ``step``-th step of a run (counted from 1) belongs to."""
    return max(1, math.ceil(step / steps_per_epoch))


class RunMonitor:
    """Gathers the metrics of a run, keeps its history, answers snapshots and carries the stop request.

    A plain class, safe to call from several threads; nothing here waits for storage or for the training.

    Args:
        run_name: the run's name, for the views.
        num_steps: steps of the whole run, those before a resume included.
        steps_per_epoch: steps of one epoch.
        history: where rows go; on a resume it holds the earlier rows already.
        clock: seconds that only go forward.
        bad_images: how many images may be skipped; by default any number.
    """

    def __init__(
        self,
        run_name: str,
        num_steps: int,
        steps_per_epoch: int,
        history: History,
        clock: Callable[[], float] = time.monotonic,
        bad_images: BadImageLimit | None = None,
    ) -> None:
        self._name = run_name
        self._num_steps = num_steps
        self._steps_per_epoch = steps_per_epoch
        self._history = history
        self._clock = clock
        self._bad_images = bad_images
        self._lock = threading.RLock()
        self._stop_requested = threading.Event()
        self._stop_reason: str | None = None
        self._too_many_bad: str | None = None
        self._num_retries = 0
        self._status: Status = "starting"
        self._summary: dict[str, Any] | None = None
        self._events: deque[Event] = deque(maxlen=_NUM_EVENTS)
        self._num_events = 0
        self._told: str | None = None
        self._attempt = 0
        self._num_workers = 0
        self._elapsed_before_s = 0.0
        self._begun = clock()
        self._ended_s: float | None = None
        self._first_timed: tuple[float, int] | None = None
        self._last_timed: tuple[float, int] | None = None
        self._begin(step=0)

    def started(self, num_workers: int, step: int) -> None:
        """A worker group begins (or begins again) after ``step`` completed steps: metrics of later steps are dropped."""
        with self._lock:
            self._attempt += 1
            self._num_workers = num_workers
            self._history.rewind(step)
            self._begin(step)
            self._status = "running"
            workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
            self.event(f"training on {workers}" + (f", going on after step {step:,}" if step else ""))

    def record(self, row: Row) -> None:
        """Take one row of metrics: ``kind`` is ``step`` or ``evaluation``; ``elapsed_s`` is stamped where it is missing.

        Both have step and epoch; the views show loss, accuracy, learning_rate, images_per_s and data_wait_fraction
        where a row has them, and the history keeps whatever else it has.
        """
        with self._lock:
            row = {"elapsed_s": round(self._elapsed_s(), 3), **row}
            self._history.record(row)
            self._step = max(self._step, row["step"])
            if row["kind"] == "evaluation":
                self._evaluation = row
                measured = ", ".join(f"{name} {row[name]:.4f}" for name in ("accuracy", "loss") if name in row)
                self.event(f"evaluated after epoch {epoch_of(row['step'], self._steps_per_epoch)}: {measured}")
            else:
                self._latest = row
                self._last_timed = self._clock(), row["step"]
                self._first_timed = self._first_timed or self._last_timed

    def skipped(self, entries: Iterable[Row]) -> None:
        """Note images that could not be used: ``key`` and ``reason`` each; an image counts once, however often it is met.

        Where they are too many, the run is asked to stop, and :attr:`failure` says why.
        """
        with self._lock:
            first = not self._history.skipped_rows
            new = self._history.skipped(entries)
            if first and new:
                self.event(f"skipped {new[0]['key']}: {new[0]['reason']} (the others are listed in skipped.jsonl)")
            if self._bad_images and self._too_many_bad is None:
                self._too_many_bad = self._bad_images.passed(self._history.skipped_rows)
                if self._too_many_bad:
                    self.request_stop(self._too_many_bad)

    def repeated(self, num_requests: int) -> None:
        """Note requests for images that had failed in passing and were repeated."""
        with self._lock:
            if not self._num_retries:
                self.event("some requests for images fail in passing; they are repeated")
            self._num_retries += num_requests

    def event(self, text: str) -> None:
        """Note something that a viewer should read: a checkpoint written, a worker failed."""
        with self._lock:
            self._events.append(Event(self._num_events, self._elapsed_s(), text))
            self._num_events += 1

    def flush(self) -> None:
        """Return when all that was recorded is in storage; raises what storage raises."""
        self._history.flush()

    def request_stop(self, reason: str) -> None:
        """Ask the run to stop with a checkpoint; the first reason stands, and a run that is over stays as it is."""
        with self._lock:
            if self._stop_reason is None and self._ended_s is None:
                self._stop_reason = reason
                self.event(f"stop requested: {reason}")
                self._stop_requested.set()

    @property
    def stop_reason(self) -> str | None:
        """Why the run was asked to stop; None while nobody has."""
        return self._stop_reason

    @property
    def failure(self) -> str | None:
        """Why the run cannot go on, although its workers could; None where it can."""
        return self._too_many_bad

    def wait_for_stop(self, timeout_s: float) -> str | None:
        """Wait until somebody asks for a stop, at most ``timeout_s`` seconds; gives :attr:`stop_reason`."""
        self._stop_requested.wait(timeout_s)
        return self._stop_reason

    def finish(self, status: Status, summary: dict[str, Any]) -> None:
        """Close the books: nothing is recorded after this, and the history is in storage (or an event says why not)."""
        with self._lock:
            self._status, self._summary = status, summary
            self._ended_s = self._elapsed_s()
        try:
            self._history.close()
        except Exception as error:  # the run's outcome stands whatever storage says
            self.event(f"the history could not be written: {error}")

    def snapshot(self, since: RowCursor = START) -> Snapshot:
        """How the run stands, with the rows that a viewer at ``since`` lacks: all of them, where a failure undid some."""
        with self._lock:
            self._tell_of_storage()
            first_row = since.row if since.attempt == self._attempt else 0
            return Snapshot(
                name=self._name,
                status=self._status,
                step=self._step,
                num_steps=self._num_steps,
                steps_per_epoch=self._steps_per_epoch,
                num_workers=self._num_workers,
                elapsed_s=self._elapsed_s(),
                time_left_s=self._time_left_s(),
                attempt=self._attempt,
                first_row=first_row,
                rows=tuple(self._history.rows[first_row:]),
                latest=self._latest,
                evaluation=self._evaluation,
                num_skipped=len(self._history.skipped_rows),
                num_retries=self._num_retries,
                stop_reason=self._stop_reason,
                events=tuple(self._events),
                summary=self._summary,
            )

    def _tell_of_storage(self) -> None:
        error = self._history.error
        if error != self._told:
            self.event(f"the history waits for storage: {error}" if error else "the history is in storage again")
            self._told = error

    def _begin(self, step: int) -> None:
        """Take up the state after ``step`` from the history; the clock never goes back."""
        rows = self._history.rows
        self._step = step
        self._latest = next((row for row in reversed(rows) if row["kind"] == "step"), None)
        self._evaluation = next((row for row in reversed(rows) if row["kind"] == "evaluation"), None)
        self._elapsed_before_s = max(self._elapsed_s(), *(row["elapsed_s"] for row in rows[-1:]), 0.0)
        self._begun = self._clock()
        self._first_timed = self._last_timed = None

    def _elapsed_s(self) -> float:
        if self._ended_s is not None:
            return self._ended_s
        return self._elapsed_before_s + self._clock() - self._begun

    def _time_left_s(self) -> float | None:
        """From the pace between this attempt's first row and its last, with all that lay between them."""
        if self._first_timed is None or self._last_timed is None or self._ended_s is not None:
            return None
        (since, first_step), (until, last_step) = self._first_timed, self._last_timed
        if last_step <= first_step:
            return None
        end = until + (self._num_steps - last_step) * (until - since) / (last_step - first_step)
        return max(0.0, end - self._clock())
