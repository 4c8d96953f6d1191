"""What the process that keeps a run's documents does: about twice a second, and when the run ends."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from raytrain.backends.prepare import PreparedRun
from raytrain.backends.train_request import TrainRequest
from raytrain.config import ResolvedConfig
from raytrain.errors import RaytrainError, StorageError
from raytrain.monitor.events import Event
from raytrain.runs.background import Background
from raytrain.runs.history import History
from raytrain.runs.monitor import RunMonitor
from raytrain.runs.outcome import Outcome, StopReason, TrainResult
from raytrain.runs.recorder import RunRecorder
from raytrain.runs.snapshot import START, RowCursor, Snapshot, Status, View
from raytrain.runs.trackers.tracking import Tracking
from raytrain.storage.base import Store

LOOK_EVERY_S = 0.5


class Monitor(Protocol):
    """A :class:`RunMonitor`, of this process or of another one."""

    def snapshot(self, since: RowCursor) -> Snapshot:
        """How the run stands, with the rows that a viewer at ``since`` lacks."""
        ...

    def event(self, event: Event) -> None:
        """Note something worth a line."""
        ...

    def finish(self, status: Status, result: TrainResult) -> None:
        """End the run: nothing is recorded after this."""
        ...


class RunWatcher:
    """Shows a run, feeds its trackers, keeps its documents, and writes how it ended.

    Args:
        monitor: knows how the run stands.
        recorder: writes the run's documents.
        tracking: the run's trackers.
        view: called with every snapshot.
    """

    def __init__(self, monitor: Monitor, recorder: RunRecorder, tracking: Tracking, view: View | None) -> None:
        self._monitor = monitor
        self._recorder = recorder
        self._tracking = tracking
        self._view = view
        self._seen = START
        self._documents = Background(self._keep_documents)  # storage may hang, and a stop must not wait for it
        self._concluded = False
        self.begun = False

    def begin(self, config: ResolvedConfig, store: Store, *, restarting: bool = False) -> None:
        """Make the run known. A stop request is kept only if this process is ``restarting`` the run."""
        self._recorder.begin(config, restarting=restarting)
        self.begun = True
        self._tracking.begin(config, store, self._monitor.event)

    def look(self) -> Snapshot:
        """Show how the run stands, and queue what is new for the trackers."""
        snapshot = self._monitor.snapshot(self._seen)
        self._seen = snapshot.cursor
        self._tracking.update(snapshot)
        if self._view is not None:
            self._view(snapshot)
        return snapshot

    def keep(self, snapshot: Snapshot) -> StopReason | None:
        """Write the status in the background, once the run has begun; return a stop request that lay in storage.

        Raises OwnerChanged if another process has taken over the run.
        """
        return self._documents(snapshot) if self.begun else None

    def conclude(self, outcome: Outcome, num_workers: int) -> TrainResult:
        """Write the summary and the rest of the history, and finalize the trackers.

        Raises StorageError if storage is out of reach and the run did not fail.
        """
        self._concluded = True
        self._documents.close()
        result = self._recorder.result(outcome, self._monitor.snapshot(self._seen), num_workers)
        self._monitor.finish(outcome.status, result)
        last = self.look()
        with suppress(*([StorageError] if outcome.error else [])):  # why the run failed matters more; it may be storage
            self._recorder.conclude(result, last)
        self._tracking.finish(result)
        self._recorder.log_events(self.look())  # what trackers said at the end
        return result

    def abandon(self, status: str) -> None:
        """Write ``status`` if the run has begun and has no result; the trackers end as those of a failed run."""
        self._tracking.abort()
        self._documents.close()
        if self.begun and not self._concluded:
            with suppress(RaytrainError):  # the reason why the run ends matters more
                self._recorder.write_status(status, fail_fast=True)

    def _keep_documents(self, snapshot: Snapshot) -> StopReason | None:
        self._recorder.heartbeat(snapshot)
        return self._recorder.stop_request()


def watch_here(prepared: PreparedRun, config: ResolvedConfig, request: TrainRequest) -> tuple[RunMonitor, RunWatcher]:
    """A monitor of the run in this process, and its watcher."""
    plan = prepared.data.plan(config)
    monitor = RunMonitor(
        prepared.name,
        plan.num_steps,
        plan.steps_per_epoch,
        History(prepared.store),
        skip_limit=prepared.skip_limit(),
        started_at=request.started_at,
    )
    recorder = RunRecorder(prepared.store, plan.num_steps, prepared.first_step, request.started_at)
    return monitor, RunWatcher(monitor, recorder, Tracking(request.trackers), request.view)
