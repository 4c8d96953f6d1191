"""The monitor of a run: metrics and stop requests come in, snapshots go out.

Workers report to it through the coordinator, and it hands each row to the :class:`History`, which writes it in a thread
of its own. Viewers ask for a :class:`Snapshot` about twice a second. The monitor itself calls nobody.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from raytrain.monitor import events
from raytrain.monitor.events import Event, TimedEvent
from raytrain.monitor.snapshot import START, RowCursor, Snapshot, Status, epoch_of, time_left_s
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow, SkipLimit, SkippedImage, SuspiciousLabel
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import DIVERGED_HINT, StopReason, TrainResult

_NUM_EVENTS = 50
_NUM_DIVERGED_ROWS = 3  # a run ends after this many rows of steps in succession whose loss is not finite
_SHOWN_WITHIN_S = 5.0  # a debugger opens after this time even if a view hangs


class RunMonitor:
    """Collects the metrics of a run, keeps its history, answers with snapshots, and passes on the stop request.

    Methods may be called from several threads. None waits for storage or for the training, except :meth:`flush`,
    :meth:`finish`, and the first call that needs a history which exists already.

    Args:
        skip_limit: how many images may be skipped; any number by default.
        started_at: when the user started the run, by ``clock``; now by default.
        elapsed_before_s: the time on the clock of the run when its last attempt, of another process, ended.

    Attributes:
        stop_request: why the run should stop; None if nobody has asked for that.
        failure: why the run has to fail although its workers could continue; None if it need not.
    """

    def __init__(
        self,
        run_name: str,
        num_steps: int,
        steps_per_epoch: int,
        history: History,
        clock: Callable[[], float] = time.monotonic,
        skip_limit: SkipLimit | None = None,
        started_at: float | None = None,
        elapsed_before_s: float = 0.0,
    ) -> None:
        self._name = run_name
        self._num_steps = num_steps
        self._steps_per_epoch = steps_per_epoch
        self._history = history
        self._clock = clock
        self._skip_limit = skip_limit
        self._lock = threading.RLock()

        # Why the run should end, and how it has ended.
        self.stop_request: StopReason | None = None
        self.failure: str | None = None
        self._stop_requested = threading.Event()
        self._status: Status = "starting"
        self._result: TrainResult | None = None

        # What has happened in all attempts.
        self._events: deque[TimedEvent] = deque(maxlen=_NUM_EVENTS)
        self._num_events = 0
        self._num_retries = 0
        self._num_decoded_on_cpu = 0
        self._reported_error: str | None = None

        # A debugger of the loop shares the terminal with a view, which must learn of it first and stop drawing.
        self._in_debugger = False
        self._num_snapshots = 0
        self._snapshot_taken = threading.Condition(self._lock)

        # The state of the present attempt.
        self._attempt = 0
        self._num_workers = 0
        self._machines: dict[int, MachineUse] = {}  # by the ranks of the workers
        self._step = 0
        self._first: MetricRow | None = None  # row of steps of this attempt
        self._latest: MetricRow | None = None  # row of steps, perhaps of an earlier attempt
        self._evaluation: MetricRow | None = None  # the latest
        self._num_diverged = 0  # rows in succession whose loss is not finite
        self._suspicious: tuple[SuspiciousLabel, ...] = ()

        # The clock of the run: it stands still between the attempts of a run that is resumed.
        self._elapsed_before_s = elapsed_before_s
        self._started_at = clock() if started_at is None else started_at
        self._startup_s: float | None = None
        self._ended_s: float | None = None

    def note_start(self, num_workers: int, step: int, measures_again: bool = False) -> None:
        """Begin an attempt with ``num_workers`` workers after ``step`` completed steps, and drop later rows.

        If the attempt ``measures_again`` after this step, the evaluation of it is dropped, too: an earlier attempt was
        killed before its next checkpoint. The clock of the run, which stood still since the last attempt of another
        process, goes on.
        """
        with self._lock:
            self._attempt += 1
            self._num_workers = num_workers
            self._machines.clear()

            # The clock of the rows continues where it stood. In the first attempt of this process, existing rows are
            # from another process, so the time of the start-up is added to theirs, which may be later than the status
            # that a killed process has left. Later, the monitor has counted all of the time itself.
            elapsed_s = self._elapsed_s()
            rows = self._history.sample.rows
            rows_s = rows[-1].elapsed_s if rows else 0.0
            if self._startup_s is None:
                self._startup_s = elapsed_s - self._elapsed_before_s
                self._elapsed_before_s = max(rows_s, self._elapsed_before_s) + self._startup_s
            else:
                self._elapsed_before_s = max(rows_s, elapsed_s)
            self._started_at = self._clock()

            # Go back to the state after ``step``.
            self._history.rewind(step, measures_again=measures_again)
            rows = self._history.sample.rows
            self._step = step
            self._first = None
            self._latest = next((row for row in reversed(rows) if row.kind == "step"), None)
            self._evaluation = next((row for row in reversed(rows) if row.kind == "evaluation"), None)
            self._num_diverged = 0

            self._status = "running"
            self.note_event(events.TrainingStarted(num_workers, step))

    def record(self, row: MetricRow) -> None:
        """Add a row of metrics with the seconds of training so far, and check its loss.

        A row of the validation or test images becomes an event. If the loss of a few rows of steps in succession is not
        finite, the run fails, and is asked to stop.
        """
        with self._lock:
            # Keep the row, and make an event of an evaluation.
            row = dataclasses.replace(row, elapsed_s=round(self._elapsed_s(), 3))
            self._history.record(row)
            self._step = max(self._step, row.step)
            if row.kind == "evaluation":
                self._evaluation = row
                self.note_event(events.Evaluated(epoch_of(row.step, self._steps_per_epoch), row.accuracy, row.loss))
                return
            if row.kind == "test":
                self.note_event(events.Tested(row.accuracy, row.loss))
                return
            self._latest = row
            self._first = self._first or row

            # Report a loss that is not finite at once, and end the run if it remains so for a few rows.
            if row.loss is None or math.isfinite(row.loss):
                self._num_diverged = 0
                return
            self._num_diverged += 1
            if self._num_diverged == 1:
                self.note_event(events.LossNotFinite(str(row.loss), row.step))
            elif self._num_diverged == _NUM_DIVERGED_ROWS and self.failure is None:
                which_row = f"the {_NUM_DIVERGED_ROWS}rd row of metrics without a finite one"
                self.failure = f"the loss is {row.loss} at step {row.step:,}, {which_row}; {DIVERGED_HINT}"
                self.request_stop(StopReason("diverged", self.failure))

    def note_machine_use(self, use: MachineUse) -> None:
        """Replace what is known of a worker's use of its machine."""
        with self._lock:
            self._machines[use.rank] = use
            self._step = max(self._step, use.step or 0)

    def replace_suspicious_labels(self, labels: Sequence[SuspiciousLabel]) -> None:
        """Replace the list of training images whose labels look wrong."""
        with self._lock:
            self._suspicious = tuple(labels)

    def note_skipped(self, images: Sequence[SkippedImage]) -> None:
        """Add images that could not be used to the list, each once. If they are too many, the run fails and stops."""
        with self._lock:
            # Only the first such image is an event; skipped.jsonl lists all.
            is_first = not self._history.skipped_images
            new = self._history.skip(images)
            if is_first and new:
                self.note_event(events.ImageSkipped(new[0].key, new[0].reason))

            # Too many of them mean that the data set is damaged: end the run with a checkpoint.
            if self._skip_limit and self.failure is None:
                self.failure = self._skip_limit.exceeded(self._history.skipped_images)
                if self.failure:
                    self.request_stop(StopReason("too_many_bad_images", self.failure))

    def skipped_images(self) -> list[SkippedImage]:
        """Return the list of images that could not be used so far."""
        with self._lock:
            return self._history.skipped_images

    def note_retries(self, num_requests: int) -> None:
        """Count requests for images that failed and were retried."""
        with self._lock:
            if not self._num_retries:
                self.note_event(events.RequestsRetried())
            self._num_retries += num_requests

    def note_decoded_on_cpu(self, num_images: int, reason: str) -> None:
        """Count images decoded on CPUs because a GPU cannot decode their kind, ``reason``, such as "PNG"."""
        with self._lock:
            if not self._num_decoded_on_cpu:
                self.note_event(events.DecodedOnCpu(reason))
            self._num_decoded_on_cpu += num_images

    def note_event(self, event: Event) -> None:
        """Add an event, without secrets, to the history and to the next snapshots."""
        with self._lock:
            timed = TimedEvent(self._num_events, self._elapsed_s(), event.redacted())
            self._events.append(timed)
            self._num_events += 1
            self._history.record_event(timed.to_json())

    def note_debugger(self, is_open: bool) -> None:
        """Record that the loop waits in a debugger, or continues.

        If it waits, return when the view of this process has shown that, or after some seconds if it hangs.
        """
        with self._lock:
            self._in_debugger = is_open
            # The view has shown the next snapshot by the time that it asks for the one after it.
            num_when_shown = self._num_snapshots + 2
            if is_open:
                self._snapshot_taken.wait_for(lambda: self._num_snapshots >= num_when_shown, _SHOWN_WITHIN_S)

    def flush(self) -> None:
        """Wait until everything recorded so far is in storage. Raise StorageError if it cannot be written."""
        self._history.flush()

    def request_stop(self, request: StopReason) -> None:
        """Ask the run to stop with a checkpoint. Only the first request counts; a run that is over ignores it."""
        with self._lock:
            if self.stop_request is None and self._ended_s is None:
                self.stop_request = request
                self.note_event(events.StopRequested(request))
                self._stop_requested.set()

    def wait_for_stop_request(self, timeout_s: float) -> StopReason | None:
        """Wait at most ``timeout_s`` seconds for a stop request; return :attr:`stop_request`."""
        self._stop_requested.wait(timeout_s)
        return self.stop_request

    def finish(self, status: Status, result: TrainResult | None = None) -> None:
        """End the run, and write the rest of the history. If that fails, the next snapshot has an event about it.

        The caller must not record anything afterwards.
        """
        with self._lock:
            self._status, self._result = status, result
            self._step = result.steps if result is not None else self._step  # the last steps may have no row
            self._ended_s = self._elapsed_s()
        try:
            self._history.close()
        except Exception as error:  # the outcome of the run is valid whatever storage says
            self.note_event(events.DocumentLost("the history", str(error)))

    def snapshot(self, since: RowCursor = START) -> Snapshot:
        """Return the state of the run, with the rows after the cursor ``since``.

        If an attempt has begun since then, which may have undone some rows, or if some of the rows are no longer kept,
        the snapshot has all rows that are kept, and begins with index 0.
        """
        with self._lock:
            self._num_snapshots += 1
            self._snapshot_taken.notify_all()
            # The history is written in another thread; its problems with storage become events here.
            for problem in self._history.take_problems():
                self.note_event(events.HistoryDamaged(problem))
            error = self._history.error
            if error != self._reported_error:
                self.note_event(events.StorageWaits(error) if error else events.StorageBack())
                self._reported_error = error

            # Estimate the time left from the first and the last row of this attempt, so that evaluations and
            # checkpoints count.
            elapsed_s, left_s = self._elapsed_s(), None
            if self._first is not None and self._latest is not None and self._ended_s is None:
                left_s = time_left_s([self._first, self._latest], self._num_steps, self._step, elapsed_s)

            first_row, rows = self._history.sample.since(since.row if since.attempt == self._attempt else 0)
            return Snapshot(
                name=self._name,
                status=self._status,
                step=self._step,
                num_steps=self._num_steps,
                steps_per_epoch=self._steps_per_epoch,
                num_workers=self._num_workers,
                elapsed_s=elapsed_s,
                startup_s=self._startup_s,
                time_left_s=left_s,
                attempt=self._attempt,
                first_row=first_row,
                rows=tuple(rows),
                num_rows=self._history.sample.num_rows,
                latest=self._latest,
                evaluation=self._evaluation,
                num_skipped=len(self._history.skipped_images),
                num_retries=self._num_retries,
                num_decoded_on_cpu=self._num_decoded_on_cpu,
                stop_request=self.stop_request,
                events=tuple(self._events),
                result=self._result,
                machines=tuple(use for _, use in sorted(self._machines.items())),
                in_debugger=self._in_debugger,
                suspicious=self._suspicious,
            )

    def _elapsed_s(self) -> float:
        """Return the seconds on the clock of the run: of all attempts together, as long as it has not ended."""
        if self._ended_s is not None:
            return self._ended_s
        return self._elapsed_before_s + self._clock() - self._started_at
