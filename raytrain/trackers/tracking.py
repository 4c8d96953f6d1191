"""All trackers of a run, each fed from a queue of its own, and how far each has got."""

from __future__ import annotations

import dataclasses
import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from raytrain.config import TrainConfig
from raytrain.errors import RaytrainError
from raytrain.monitor.events import Event, TrackerFailed, TrackerOpened
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.documents import TRACKERS, known_fields, read_json, write_json
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import TrainResult
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.trackers.tracker import TrackedRun, Tracker, TrackerStatus, hyperparams, row_metrics

GATHER_S = 2.0  # seconds between two groups of rows: a tracker may need a request for each group
_MAX_GATHER_S = 30.0
_CPU_FRACTION = 0.01
"""Most of a core that a tracker may take: one that takes longer for a group gets fewer and larger ones."""
_MAX_GROUP = 10_000  # rows
_HANGS_AFTER_S = 60.0
_MAX_REASON = 300  # characters of an error message
_END_WITHIN_S = 30.0
_ABORT_WITHIN_S = 5.0


@dataclass(frozen=True)
class Position:
    """The tracker's own ``id`` of the run, the last steps that it was sent, the last images, and the last network."""

    id: str | None = None
    step: int = 0
    evaluation_step: int = -1
    picture_step: int = -1
    network: str | None = None

    def precedes(self, row: MetricRow) -> bool:
        """Whether ``row`` has not been sent yet."""
        return row.step > (self.step if row.kind == "step" else self.evaluation_step)

    def after(self, row: MetricRow) -> Position:
        """The position once ``row`` has been sent."""
        if row.kind == "step":
            return dataclasses.replace(self, step=row.step)
        return dataclasses.replace(self, evaluation_step=row.step)


@dataclass(frozen=True)
class NamedTracker:
    """A tracker by its name. ``make`` is called in the tracker's thread, because it may take long."""

    name: str
    make: Callable[[TrackedRun], Tracker]


class End(NamedTuple):
    """How a run ended, and the path of its last checkpoint in its storage."""

    status: TrackerStatus
    network: str | None = None


class TrackerThread:
    """Opens a tracker and sends it what is new to it, until the end; ``report`` gets events of how that goes."""

    def __init__(
        self,
        tracker: NamedTracker,
        run: TrackedRun,
        params: Mapping[str, str | int | float],
        report: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._make = tracker.name, tracker.make
        self.failed = False
        self.num_rows = 0
        """Taken from the queue so far, also those that the tracker had already."""
        self._run = run
        self._document = f"{TRACKERS}{re.sub(r'[^A-Za-z0-9_.-]', '_', self.name)}.json"
        self._params = params
        self._report = report
        self._clock = clock
        self._rows: queue.SimpleQueue[Iterable[MetricRow]] = queue.SimpleQueue()
        self._end: End | None = None
        self._ended = threading.Event()
        self._busy_since: float | None = clock()
        self._position = Position()
        self._thread = threading.Thread(target=self._feed, daemon=True, name=f"tracker {self.name}")
        self._thread.start()

    def send(self, rows: Iterable[MetricRow]) -> None:
        """Add rows to the queue; those that the tracker has already are left out."""
        if self._thread.is_alive():
            self._rows.put(rows)

    def end(self, end: End) -> None:
        """Send what is left, and finalize the tracker."""
        self._end = end
        self._ended.set()

    def join(self, timeout_s: float | None) -> None:
        """Wait for the end; a tracker that takes longer is reported, and left behind."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"has not finished within {timeout_s:.0f} s")

    def check_alive(self) -> None:
        """Report a tracker that hangs."""
        since = self._busy_since
        if since is not None and self._clock() - since > _HANGS_AFTER_S:
            self._fail(f"has not answered for {_HANGS_AFTER_S:.0f} s")

    def _feed(self) -> None:
        try:
            tracker = self._open()
            pause_s, seen = GATHER_S, self._position.evaluation_step
            while self._end is None:
                self._busy_since = None
                self._ended.wait(pause_s)
                self._busy_since, worked_s = self._clock(), time.thread_time()
                if seen < self._position.evaluation_step:  # one look later, when a worker has written its images
                    seen = self._position.evaluation_step
                    self._send_pictures(tracker)
                self._send(tracker)
                pause_s = gather_s(time.thread_time() - worked_s)
            self._send(tracker)  # what came between the last look and the end
            self._send_pictures(tracker)
            if self._end.network is not None and hasattr(tracker, "log_network"):
                self._send_network(tracker, self._end.network)
            tracker.finalize(self._end.status)
        except BaseException as error:  # also SystemExit, of a tracker that gives up
            self._fail(f"failed ({_reason(error)})")

    def _open(self) -> Tracker:
        self._position = Position(**known_fields(Position, read_json(self._run.store, self._document)))
        tracker = self._make(dataclasses.replace(self._run, id=self._position.id))
        own_id = getattr(tracker, "run_id", None)
        if isinstance(own_id, str) and own_id != self._position.id:
            self._move(dataclasses.replace(self._position, id=own_id))
        if isinstance(place := getattr(tracker, "place", None), str):
            self._report(TrackerOpened(self.name, place).redacted())
        tracker.log_hyperparams(dict(self._params))
        return tracker

    def _send(self, tracker: Tracker) -> None:
        """Send the rows that are new, in groups."""
        rows, before = self._take_new(), self._position
        while group := list(islice(rows, _MAX_GROUP)):
            self._send_group(tracker, group, before)
            before = self._position

    def _send_group(self, tracker: Tracker, rows: Sequence[MetricRow], before: Position) -> None:
        """Send rows after the position ``before``; the new one is written first, so that a kill repeats nothing."""
        save: Callable[[], Any] | None = getattr(tracker, "save", None)
        with self._moved(self._position, before) as sent:
            for row in rows:
                tracker.log_metrics(row_metrics(row), row.step)
                sent[0] = sent[0] if save else sent[0].after(row)
            if save is not None:
                save()

    def _take_new(self) -> Iterator[MetricRow]:
        """The rows in the queue that the tracker lacks; a failure of workers brings some of them again."""
        with suppress(queue.Empty):
            while True:
                for row in self._rows.get_nowait():
                    self.num_rows += 1
                    if self._position.precedes(row):
                        self._position = self._position.after(row)
                        yield row

    def _send_pictures(self, tracker: Any) -> None:
        """Send the images of the last evaluation if the tracker has a place for them and lacks them."""
        if not hasattr(tracker, "log_image"):
            return
        from raytrain.trackers.pictures import read_pictures

        step, groups = read_pictures(self._run.store, after=self._position.picture_step)
        if not groups:
            return
        with self._moved(dataclasses.replace(self._position, picture_step=step), self._position):
            for group in groups:
                tracker.log_image(group.key, group.images, step, caption=group.captions)

    def _send_network(self, tracker: Any, checkpoint: str) -> None:
        if checkpoint == self._position.network:
            return
        with _as_file(self._run.store, checkpoint) as file:
            tracker.log_network(file)
        self._move(dataclasses.replace(self._position, network=checkpoint))

    @contextmanager
    def _moved(self, position: Position, sent: Position) -> Generator[list[Position]]:
        """Write ``position`` first; if sending fails, how far it came, which the sender puts in place of ``sent``."""
        reached = [sent]
        self._move(position)
        try:
            yield reached
        except BaseException:
            with suppress(RaytrainError):
                self._move(reached[0])
            raise

    def _move(self, position: Position) -> None:
        self._position = position
        write_json(self._run.store, self._document, dataclasses.asdict(position))

    def _fail(self, what: str) -> None:
        """Report what went wrong, the first time."""
        if not self.failed:
            self.failed = True
            self._report(TrackerFailed(self.name, what, self._run.name).redacted())


def gather_s(cpu_s: float) -> float:
    """How long to gather rows after a group that took ``cpu_s`` seconds of a core."""
    return min(max(GATHER_S, cpu_s / _CPU_FRACTION), _MAX_GATHER_S)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"


@contextmanager
def _as_file(store: Store, path: str) -> Generator[str]:
    """An object of ``store`` as a local file."""
    if "://" not in store.url:
        yield f"{store.url}/{path}"
        return
    with TemporaryFolder() as folder:
        file = folder / path.rpartition("/")[2]
        file.write_bytes(store.get(path))
        yield str(file)


class Tracking:
    """Sends a run to its trackers. No call waits for one of them, apart from a bounded time at the end."""

    def __init__(self, trackers: Sequence[NamedTracker], end_within_s: float = _END_WITHIN_S) -> None:
        self._trackers = trackers
        self._end_within_s = end_within_s
        self._threads: list[TrackerThread] = []
        self._ended = False

    def begin(self, config: TrainConfig, store: Store, report: Callable[[Event], None]) -> None:
        """Open the trackers of the run in ``store``; ``report`` gets an event about each that fails."""
        run, params = TrackedRun(config.name or "", store), hyperparams(config)
        self._threads = [TrackerThread(tracker, run, params, report) for tracker in self._trackers]

    def update(self, snapshot: Snapshot) -> None:
        """Queue the rows of a snapshot, and report trackers that hang."""
        for thread in self._threads:
            if snapshot.rows:
                thread.send(snapshot.rows)
            thread.check_alive()

    def finish(self, result: TrainResult) -> None:
        """Send the rest and the last checkpoint, and finalize the trackers; waits a bounded time for all of them."""
        network = result.checkpoint and result.checkpoint.removeprefix(result.run_dir).lstrip("/")
        end = End("failed") if result.status == "failed" else End("success", network)
        self._end(end, self._end_within_s)

    def abort(self) -> None:
        """End the trackers of a run that ended without a result; does nothing after :meth:`finish`."""
        self._end(End("failed"), _ABORT_WITHIN_S)

    def _end(self, end: End, within_s: float) -> None:
        if self._ended:
            return
        self._ended = True
        for thread in self._threads:
            thread.end(end)
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
