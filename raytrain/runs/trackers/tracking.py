"""All trackers of a run: fed with the snapshots that the driver sees, each in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raytrain.config import TrainConfig
from raytrain.monitor.events import Event
from raytrain.runs.outcome import TrainResult
from raytrain.runs.snapshot import Snapshot
from raytrain.runs.trackers.measurements import hyperparams
from raytrain.runs.trackers.tracker_thread import End, NamedTracker, TrackerThread

if TYPE_CHECKING:
    from raytrain.storage.base import Store

_END_WITHIN_S = 30.0
_ABORT_WITHIN_S = 5.0


class Tracking:
    """Sends a run to its trackers. No call waits for one of them, apart from a bounded time at the end."""

    def __init__(self, trackers: Sequence[NamedTracker], end_within_s: float = _END_WITHIN_S) -> None:
        self._trackers = trackers
        self._end_within_s = end_within_s
        self._threads: list[TrackerThread] = []
        self._ended = False

    def begin(self, config: TrainConfig, store: Store, report: Callable[[Event], None]) -> None:
        """Open the trackers of the run in ``store``; ``report`` gets an event about each that fails."""
        params = hyperparams(config)
        self._threads = [TrackerThread(tracker, config.name or "", store, params, report) for tracker in self._trackers]

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
