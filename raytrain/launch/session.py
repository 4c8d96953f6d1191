"""A run from its first document to its last, whoever trains it: the one loop that shows it, keeps it and ends it."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import suppress
from typing import Protocol

from raytrain.config import ResolvedConfig
from raytrain.errors import CoordinatorLost, RaytrainError, StorageError
from raytrain.launch.coordinator import Coordinator, Ending
from raytrain.launch.prepare import PreparedRun
from raytrain.monitor.recorder import RunRecorder, progress_of
from raytrain.monitor.snapshot import START, Snapshot
from raytrain.runs.background import Background
from raytrain.runs.checkpoint_files import newest_checkpoint
from raytrain.runs.outcome import Outcome, StopReason, TrainResult, failure_sentence, successful
from raytrain.runs.redact import printable, redact
from raytrain.trackers.tracking import Tracking

_logger = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5
_ABORTED_WITHIN_S = 5.0
_STATUS_AFTER: dict[object, str] = {
    KeyboardInterrupt: "interrupted",
    CoordinatorLost: "starting",  # the driver starts the run again, or marks it as failed
}


class Launch(Protocol):
    """The workers of a run and what they need: on a Ray cluster, or on this machine without Ray."""

    config: ResolvedConfig
    num_workers: int

    def start(self) -> Coordinator:
        """Start the workers, and what they read and report to.

        The coordinator may be in another process: then what is returned in its place asks it, and raises
        :class:`CoordinatorLost` if it has died.
        """
        ...

    def look(self, snapshot: Snapshot) -> None:
        """Do what is to be done about twice a second."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until the processes of the workers have ended; returns whether they have."""
        ...

    def failure(self) -> str | None:
        """Why they ended, if they have ended without saying so themselves."""

    def end_workers(self) -> None:
        """See the workers to their end: nothing more of them may reach the run's documents."""

    def close(self, *, finished: bool) -> None:
        """Leave nothing of the run behind; unless it is ``finished``, its workers may still train."""


class RunSession:
    """A run that trains while the session is open: its views, its trackers, its documents, and its end."""

    def __init__(self, prepared: PreparedRun, launch: Launch) -> None:
        self._prepared = prepared
        self._launch = launch
        self._plan = prepared.data.plan(launch.config)
        self._recorder = RunRecorder(prepared.store, self._plan.num_steps, prepared.first_step, prepared.started_at)
        self._tracking = Tracking(prepared.trackers)
        self._documents = Background(self._keep)  # storage may hang, and a stop must not wait for it
        self._seen = START
        self._has_begun = False
        self._ends_early = False  # by a stop request before the workers train
        self._is_concluded = False
        self._is_over = False

    def __enter__(self) -> RunSession:
        self._monitor = self._launch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None:
            self._abandon(_STATUS_AFTER.get(kind, "failed"))
        self._launch.close(finished=self._is_over)
        del self._launch  # otherwise what it holds in a cluster stays until Python looks for cycles of references

    def watch(self) -> TrainResult:
        """See the run to its end: show it, pass on stop requests, keep its documents.

        A stop that comes before the workers train ends the run at once. Raises TrainingFailed if it ends early, and
        :class:`CoordinatorLost` if that is because its coordinator died.
        """
        signals = self._prepared.signals
        ending = self._monitor.ending()
        if self._prepared.restarting and (stored := self._recorder.stop_request()) is not None:
            signals.request_stop(stored)
            self._monitor.request_stop(stored)  # what is left of the run may take less than a second
        while not ending.has_come and not self._launch.wait(LOOK_EVERY_S):
            snapshot = self._look()
            stored = self._documents(snapshot) if ending.is_checked else None
            if (request := snapshot.stop_request or stored) is not None:
                signals.request_stop(request)
            if signals.stop_request is not None and snapshot.stop_request is None:
                self._monitor.request_stop(signals.stop_request)
                self._ends_early = self._monitor.snapshot(START).status == "starting"  # now, not a moment ago
                if self._ends_early:
                    break
            self._launch.look(snapshot)
            ending = self._monitor.ending()
        return self._end()

    def _end(self) -> TrainResult:
        self._launch.end_workers()
        ending = self._monitor.ending()
        if ending.error is not None:
            _logger.debug("a worker failed: %s", printable(redact(ending.trace)))
            if not ending.is_checked:
                raise ending.error
        outcome = self._outcome(ending, self._monitor.snapshot(START))
        self._prepared.copy_log()
        result = successful(self._conclude(outcome))
        self._is_over = ending.has_come
        return result

    def _outcome(self, ending: Ending, snapshot: Snapshot) -> Outcome:
        """What the workers said, or why they could not say anything."""
        reason = ending.reason
        if reason is None and ending.outcome is not None:
            return ending.outcome
        progress = progress_of(snapshot, self._prepared.first_step)
        if reason is None and self._ends_early:
            return Outcome(status="stopped", progress=progress)
        reason = reason or ending.lost or self._launch.failure() or "the workers exited without an error message"
        prepared = self._prepared
        sentence = failure_sentence(prepared.config, reason, prepared.loop, has_checkpoint=self._has_checkpoint())
        if ending.outcome is not None:
            return dataclasses.replace(ending.outcome, status="failed", error=sentence)
        return Outcome(status="failed", progress=progress, error=sentence, accumulate=ending.accumulate)

    def _has_checkpoint(self) -> bool:
        """Whether there is one to resume from; storage that does not answer may have one."""
        with suppress(StorageError):
            return newest_checkpoint(self._prepared.store.fail_fast()) is not None
        return True

    def _look(self) -> Snapshot:
        """Show how the run stands, and queue what is new for the trackers."""
        snapshot = self._monitor.snapshot(self._seen)
        self._seen = snapshot.cursor
        self._tracking.update(snapshot)
        if self._prepared.view is not None:
            self._prepared.view(snapshot)
        return snapshot

    def _keep(self, snapshot: Snapshot) -> StopReason | None:
        """Write the documents that are due, in the background; returns a stop request that lay in storage."""
        self._begin()
        self._recorder.heartbeat(snapshot)
        return self._recorder.stop_request()

    def _begin(self) -> None:
        """Make the run known, once. A stop request is kept only if this process starts the run again."""
        if not self._has_begun:
            prepared = self._prepared
            prepared.data.write(prepared.store)
            self._recorder.begin(self._launch.config, restarting=prepared.restarting)
            self._tracking.begin(self._launch.config, prepared.store, self._monitor.event)
            self._has_begun = True

    def _conclude(self, outcome: Outcome) -> TrainResult:
        """Write the summary and the rest of the history, and finalize trackers; StorageError unless the run failed."""
        self._is_concluded = True
        self._documents.close()
        unheard = suppress(*([StorageError] if outcome.error else []))  # why it failed matters more; it may be storage
        with unheard:
            self._begin()
        result = self._recorder.result(outcome, self._monitor.snapshot(self._seen), self._launch.num_workers)
        self._monitor.finish(outcome.status, result)
        last = self._look()
        with unheard:
            self._recorder.conclude(result, last)
        self._tracking.finish(result)
        self._recorder.log_events(self._look())  # what trackers said at the end
        return result

    def _abandon(self, status: str) -> None:
        """Write ``status`` if the run has begun and has no result; the trackers end as those of a failed run."""
        self._tracking.abort()
        if self._documents.close(_ABORTED_WITHIN_S) and self._has_begun and not self._is_concluded:
            with suppress(RaytrainError):  # the reason why the run ends matters more
                self._recorder.write_status(status, fail_fast=True)
