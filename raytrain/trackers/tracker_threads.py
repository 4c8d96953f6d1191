"""All trackers of a run, each with a thread, a queue of rows, and a position that is stored.

A tracker may be slow, hang or fail, without effect on the run or the other trackers. So each has a thread, which opens
it, sends it rows, images of evaluations and the last checkpoint, and ends it.

A document in the run's folder has the position of each tracker. It is written before rows are sent, so that a process
which is killed and starts again sends no row twice. Trackers cannot be asked for their position: one of the user's,
such as a logger of Lightning, has only the three methods of :class:`raytrain.trackers.tracker.Tracker`.
"""

from __future__ import annotations

import dataclasses
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from raytrain.config import TrainConfig
from raytrain.errors import RaytrainError
from raytrain.monitor.events import Event, TrackerFailed, TrackerOpened
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.background_and_throttle import Throttle
from raytrain.runs.documents import TRACKERS, known_fields, read_json, run_store, write_json
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import StopReason, TrainResult
from raytrain.runs.redact import redact
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.trackers.tracker import TrackedRun, TrackedSweep, Tracker, TrackerStatus, hyperparams, row_metrics

GATHER_S = 2.0  # seconds between two groups of rows, because a tracker may need a request for each group
_MAX_GATHER_S = 30.0
_STOP_EVERY_S = 10.0  # between two polls of a tracker for a stop
_CPU_FRACTION = 0.01
"""Part of a core that a tracker may take. A tracker that takes more gets fewer and larger groups."""
_MAX_GROUP = 10_000  # rows
_HANGS_AFTER_S = 60.0
_MAX_REASON = 300  # characters of an error message
_END_WITHIN_S = 30.0
_ABORT_WITHIN_S = 5.0
_FIELD_OF_KIND = {"step": "step", "evaluation": "evaluation_step", "test": "test_step"}  # of a Position


class Tracking:
    """Sends a run to its trackers. No call waits for a tracker, except for a limited time at the end.

    ``end_within_s`` is this time for all trackers together, after a run that has a result.
    """

    def __init__(self, trackers: Sequence[NamedTracker], end_within_s: float = _END_WITHIN_S) -> None:
        self._trackers = trackers
        self._end_within_s = end_within_s
        self._lock = threading.Lock()  # begin and update may be called by different threads
        self._threads: list[TrackerThread] | None = None  # None until begin
        self._rows_before_begin: list[Sequence[MetricRow]] = []
        self._has_ended = False

    def begin(
        self,
        config: TrainConfig,
        store: Store,
        report: Callable[[Event], None],
        ask_to_stop: Callable[[StopReason], object] = lambda reason: None,
        sweep: str | None = None,
    ) -> None:
        """Open the trackers of the run in ``store``, and queue the rows that have arrived before this call.

        ``report`` gets an event about each tracker that opens or fails, ``ask_to_stop`` a stop that somebody has
        requested in a tracker. ``sweep`` is the name of the sweep that the run is a trial of. After :meth:`abort`, no
        tracker is opened.
        """
        tracked_sweep = TrackedSweep(sweep, run_store(config.storage, sweep)) if sweep else None
        run, params = TrackedRun(config.name or "", store, sweep=tracked_sweep), hyperparams(config)
        with self._lock:
            if self._has_ended:
                return
            # Each thread opens its tracker first, so the rows wait in its queue.
            self._threads = [
                TrackerThread(tracker, run, params, report, ask_to_stop=ask_to_stop) for tracker in self._trackers
            ]
            for thread in self._threads:
                for rows in self._rows_before_begin:
                    thread.send(rows)
            self._rows_before_begin.clear()

    def update(self, snapshot: Snapshot) -> None:
        """Queue the new rows in a snapshot, and report trackers that hang."""
        with self._lock:
            # The run may train before its first documents are written, after which begin is called.
            if self._threads is None:
                if snapshot.rows and self._trackers:
                    self._rows_before_begin.append(snapshot.rows)
                return
            for thread in self._threads:
                if snapshot.rows:
                    thread.send(snapshot.rows)
                thread.check_alive()

    def finish(self, result: TrainResult) -> None:
        """Send the remaining rows and the last checkpoint, and finalize the trackers; wait for them a limited time."""
        # The result has the path of the checkpoint with the run's folder before it.
        network = result.checkpoint and result.checkpoint.removeprefix(result.run_dir).lstrip("/")
        end = End("failed") if result.status == "failed" else End("success", network)
        self._end(end, self._end_within_s)

    def abort(self) -> None:
        """End the trackers of a run that ended without a result; do nothing after :meth:`finish`."""
        self._end(End("failed"), _ABORT_WITHIN_S)

    def _end(self, end: End, within_s: float) -> None:
        """End all trackers, the first time that this is called, and wait ``within_s`` seconds for all together."""
        with self._lock:
            threads = [] if self._has_ended else self._threads or []
            self._has_ended = True
        for thread in threads:
            thread.end(end)
        deadline = time.monotonic() + within_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


@dataclass(frozen=True)
class NamedTracker:
    """The name of a tracker, and the function that opens it in the tracker's thread, because that may take long."""

    name: str
    make: Callable[[TrackedRun], Tracker]


class End(NamedTuple):
    """End of a run: the status for trackers, and the path of the last checkpoint in the run's storage."""

    status: TrackerStatus
    network: str | None = None


@dataclass(frozen=True)
class Position:
    """Position of a tracker: its ``id`` of the run, and the last rows, images and checkpoint that were sent to it.

    ``step``, ``evaluation_step`` and ``test_step`` are the steps of the last row of each kind, and ``picture_step`` is
    that of the evaluation whose images were sent; ``network`` is the path of the checkpoint in the run's storage.
    """

    id: str | None = None
    step: int = 0
    evaluation_step: int = -1
    test_step: int = -1
    picture_step: int = -1
    network: str | None = None

    def precedes(self, row: MetricRow) -> bool:
        """Return True if ``row`` has not been sent yet."""
        step: int = getattr(self, _FIELD_OF_KIND[row.kind])
        return row.step > step

    def after(self, row: MetricRow) -> Position:
        """Return the position once ``row`` has been sent."""
        return dataclasses.replace(self, **{_FIELD_OF_KIND[row.kind]: row.step})


class TrackerThread:
    """Opens a tracker and sends it new rows until the end, in a thread that starts at once.

    ``params`` are the options that the tracker gets. ``report`` gets an event if it opens or fails. ``ask_to_stop`` is
    called if somebody has requested a stop in the tracker. By ``clock``, in seconds, a tracker that hangs is found.
    """

    def __init__(
        self,
        tracker: NamedTracker,
        run: TrackedRun,
        params: Mapping[str, str | int | float],
        report: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        ask_to_stop: Callable[[StopReason], object] = lambda reason: None,
    ) -> None:
        self._ask_to_stop = ask_to_stop
        self._throttle = Throttle()
        self.name, self._make = tracker.name, tracker.make
        self.num_rows = 0
        """Number of rows taken from the queue so far, including those that the tracker had already."""
        self._run = run
        self._document = f"{TRACKERS}{re.sub(r'[^A-Za-z0-9_.-]', '_', self.name)}.json"
        self._params = params
        self._report = report
        self._clock = clock
        self._rows: queue.SimpleQueue[Iterable[MetricRow]] = queue.SimpleQueue()
        self._position = Position()
        self._end: End | None = None
        self._end_is_known = threading.Event()
        self._busy_since: float | None = clock()  # None while it waits for rows
        self._has_failed = False
        self._gets_no_rows = False  # True once the tracker has raised an exception; one that hangs may go on
        self._thread = threading.Thread(target=self._feed, daemon=True, name=f"tracker {self.name}")
        self._thread.start()

    def send(self, rows: Iterable[MetricRow]) -> None:
        """Add rows to the queue. Rows that the tracker has already are left out later."""
        if self._thread.is_alive() and not self._gets_no_rows:
            self._rows.put(rows)

    def end(self, end: End) -> None:
        """Have the thread send the rows that are left, and finalize the tracker; return at once."""
        self._end = end
        self._end_is_known.set()

    def join(self, timeout_s: float | None) -> None:
        """Wait for the end of the thread, without a limit if ``timeout_s`` is None.

        A tracker that takes longer is reported and left behind. One that has failed is given less time: its server may
        be out of reach.
        """
        if self._gets_no_rows and timeout_s is not None:
            timeout_s = min(timeout_s, _ABORT_WITHIN_S)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"has not finished within {timeout_s:.0f} s")

    def check_alive(self) -> None:
        """Report the tracker if it hangs."""
        since = self._busy_since
        if since is not None and self._clock() - since > _HANGS_AFTER_S:
            self._fail(f"has not answered for {_HANGS_AFTER_S:.0f} s")

    def _feed(self) -> None:
        """Run in the thread: open the tracker, send it all rows, and end it."""
        tracker: Tracker | None = None
        try:
            # Continue at the position of an earlier attempt, and store the tracker's ID of the run.
            self._position = Position(**known_fields(Position, read_json(self._run.store, self._document)))
            tracker = self._make(dataclasses.replace(self._run, id=self._position.id))
            run_id = getattr(tracker, "run_id", None)
            if isinstance(run_id, str) and run_id != self._position.id:
                self._move(dataclasses.replace(self._position, id=run_id))
            if isinstance(place := getattr(tracker, "place", None), str):
                self._report(TrackerOpened(self.name, place).redacted())
            tracker.log_hyperparams(dict(self._params))

            # Send the rows in groups until the end is known. A worker writes the images of an evaluation after its row,
            # so they are sent with the next group.
            pause_s, last_evaluation = GATHER_S, self._position.evaluation_step
            while self._end is None:
                self._busy_since = None
                self._end_is_known.wait(pause_s)
                self._busy_since, cpu_before_s = self._clock(), time.thread_time()
                if last_evaluation < self._position.evaluation_step:
                    last_evaluation = self._position.evaluation_step
                    self._send_pictures(tracker)
                self._send_rows(tracker)
                self._poll_for_stop(tracker)
                pause_s = gather_s(time.thread_time() - cpu_before_s)

            # Send what has arrived since the last group, and finish.
            self._send_rows(tracker)
            self._send_pictures(tracker)
            if self._end.network is not None and hasattr(tracker, "log_network"):
                self._send_network(tracker, self._end.network)
            ending, tracker = tracker, None
            ending.finalize(self._end.status)
        except BaseException as error:  # also SystemExit, of a tracker that gives up
            self._gets_no_rows = True
            # Redact before the text is cut, because a part of a secret would not be recognised. Keep both ends: advice
            # is often at the end of an error message.
            reason = redact(" ".join(str(error).split())) or type(error).__name__
            if len(reason) > _MAX_REASON:
                reason = f"{reason[: _MAX_REASON // 2]} … {reason[-_MAX_REASON // 2 :]}"
            self._fail(f"failed ({reason})")
            self._finalize_at_end(tracker)

    def _finalize_at_end(self, tracker: Tracker | None) -> None:
        """Wait for the end of the run, and finalize a tracker that has failed: it would show the run as running.

        ``tracker`` is None if it could not be opened, or has failed in its ``finalize``.
        """
        if tracker is None:
            return
        self._busy_since = None
        self._end_is_known.wait()
        assert self._end is not None
        with suppress(BaseException):  # its first error has been reported
            tracker.finalize(self._end.status)

    def _poll_for_stop(self, tracker: Any) -> None:
        """Ask the run to stop if somebody has requested that in the tracker, if the tracker supports it."""
        if hasattr(tracker, "stop_requested") and self._throttle.due("stop", _STOP_EVERY_S):
            with suppress(Exception):  # it may be out of reach for a while
                if tracker.stop_requested():
                    self._ask_to_stop(StopReason("tracker", self.name))

    def _send_rows(self, tracker: Tracker) -> None:
        """Send the new rows in the queue, in groups.

        The position after a group is stored before the group is sent, so that no row is repeated after a kill. If the
        tracker fails, the position goes back to the last row that it has surely taken: that of the last call of
        ``log_metrics`` that succeeded or, if the tracker has ``save``, the last row before a ``save`` that succeeded.
        """
        save: Callable[[], Any] | None = getattr(tracker, "save", None)
        new_rows = self._take_new_rows()
        while group := list(islice(new_rows, _MAX_GROUP)):
            sent, (_, position_after_group) = self._position, group[-1]
            self._move(position_after_group)
            try:
                for row, position in group:
                    tracker.log_metrics(row_metrics(row), row.step)
                    sent = position if save is None else sent
                if save is not None:
                    save()
            except BaseException:
                self._move_back(sent)
                raise

    def _take_new_rows(self) -> Iterator[tuple[MetricRow, Position]]:
        """Yield the rows in the queue that the tracker lacks, each with the tracker's position after it.

        After a failure of workers, a run repeats steps whose rows the tracker has already.
        """
        position = self._position
        with suppress(queue.Empty):
            while True:
                for row in self._rows.get_nowait():
                    self.num_rows += 1
                    if position.precedes(row):
                        position = position.after(row)
                        yield row, position

    def _send_pictures(self, tracker: Any) -> None:
        """Send the images of the last evaluation, if the tracker takes images and lacks these.

        As for rows, the position is stored before, and goes back if the tracker fails.
        """
        if not hasattr(tracker, "log_image"):
            return
        from raytrain.trackers.pictures import read_pictures

        before = self._position
        step, groups = read_pictures(self._run.store, after=before.picture_step)
        if not groups:
            return
        self._move(dataclasses.replace(before, picture_step=step))
        try:
            for group in groups:
                tracker.log_image(group.key, group.images, step, caption=group.captions)
        except BaseException:
            self._move_back(before)
            raise

    def _send_network(self, tracker: Any, checkpoint: str) -> None:
        """Send a checkpoint as a file of this machine, unless the tracker has it already.

        Unlike for rows, the position is stored after sending: after a kill, a checkpoint may be sent once more.
        """
        if checkpoint == self._position.network:
            return
        store = self._run.store
        if store.cloud is None:
            tracker.log_network(f"{store.url}/{checkpoint}")
        else:
            with TemporaryFolder() as folder:
                file = folder / checkpoint.rpartition("/")[2]
                file.write_bytes(store.get(checkpoint))
                tracker.log_network(str(file))
        self._move(dataclasses.replace(self._position, network=checkpoint))

    def _move(self, position: Position) -> None:
        """Set and store the position of the tracker."""
        self._position = position
        write_json(self._run.store, self._document, dataclasses.asdict(position))

    def _move_back(self, position: Position) -> None:
        """Go back to an earlier position after the tracker has failed, and store it if possible."""
        with suppress(RaytrainError):  # why sending failed matters more
            self._move(position)

    def _fail(self, reason: str) -> None:
        """Report that the tracker has failed, but only its first error."""
        if not self._has_failed:
            self._has_failed = True
            self._report(TrackerFailed(self.name, reason, self._run.name).redacted())


def gather_s(cpu_s: float) -> float:
    """Return for how many seconds to gather rows, after a group that took ``cpu_s`` seconds of a core.

    The longer the group took, the longer, so that the tracker takes at most a hundredth of the core, within limits.

    Example: ``gather_s(0.1) == 10.0``
    """
    return min(max(GATHER_S, cpu_s / _CPU_FRACTION), _MAX_GATHER_S)
