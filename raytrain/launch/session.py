"""A run from its first document to its last, whoever trains it: the one loop that shows it, records it and ends it.

A :class:`RunSession` stands between a run's workers and everybody else. A :class:`Launch` starts and ends the workers,
on Ray, or on this machine without it. They report to the run's coordinator, which may be in another process. Every half
second the session

1. takes a snapshot of the coordinator, queues its new rows for the trackers, and calls the caller's view;
2. writes the documents that are due, in a thread of its own, because storage may hang, and a stop must not wait for it;
3. passes on requests to stop, in both directions: signals and requests in storage go to the workers, and those that the
   coordinator has got (``raytrain stop --address``) go to the signals, which the caller may share with other runs;
4. asks the coordinator whether the run has ended.

A run passes through the phases of :class:`RunPhase`. Nothing of it is written to storage until its workers have found
that its network, its weights and its options fit together: an error before that is raised unchanged, as if the run had
never been started. From then on, every end is written: the outcome that the workers reported; a failure that the
monitor found, such as too many bad images or a loss that is not finite; or what is known of workers that died silently.
If the session itself is interrupted, only a status is written. If the coordinator is lost, this status is "starting",
because the driver starts the run again, or marks it as failed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from contextlib import suppress
from enum import Enum, auto
from typing import Protocol

from raytrain.config import ResolvedConfig
from raytrain.errors import CoordinatorLost, NoWholeCheckpoint, RaytrainError, StorageError, format_count
from raytrain.launch.coordinator import Coordinator, Ending
from raytrain.launch.gather_provenance import Gathering
from raytrain.launch.notification import Notification, message_of, notify_target
from raytrain.launch.prepare import PreparedRun
from raytrain.launch.suspicious_pictures import SuspiciousPictures
from raytrain.loader.machine import cores
from raytrain.monitor.cost import CostMeter
from raytrain.monitor.document_writer import DocumentWriter, progress_of
from raytrain.monitor.events import DocumentLost, Note, ProvenanceChanged
from raytrain.monitor.snapshot import START, Snapshot
from raytrain.runs.background_and_throttle import Background
from raytrain.runs.documents import PROVENANCE
from raytrain.runs.logs import STARTUP, print_line
from raytrain.runs.outcome import Outcome, StopReason, TrainResult, failure_sentence, successful
from raytrain.runs.provenance import record_provenance
from raytrain.runs.redact import printable, redact
from raytrain.runs.stored_checkpoints import newest_checkpoint
from raytrain.trackers.tracker_threads import Tracking
from raytrain.training.script_logging import LoggedRecord, write_record

_log = logging.getLogger(__name__)
_POLL_EVERY_S = 0.5
LONG_START_S = 15.0  # after which a session says what the start of the workers waits for
_ABORTED_WITHIN_S = 5.0  # that documents being written may take when the session is interrupted
_STATUS_AFTER: dict[object, str] = {KeyboardInterrupt: "interrupted", CoordinatorLost: "starting"}
"""The status of a run whose session was interrupted by such an exception; after any other, it is "failed"."""


class Launch(Protocol):
    """The interface of what starts and ends the workers of a run; :class:`RunSession` does the rest.

    There are three: on a Ray cluster (:class:`~raytrain.launch.ray.ray_launch.RayLaunch`), on this machine without Ray
    (:class:`~raytrain.launch.local.local_launch.LocalLaunch`), and of workers that something else has started
    (:class:`~raytrain.launch.attached_launch.AttachedLaunch`).
    """

    config: ResolvedConfig
    num_workers: int
    ends_workers: bool
    """True if a stop that comes before the workers train may end them at once."""

    def start(self) -> Coordinator:
        """Start the workers, their feed of images and their coordinator; return the coordinator.

        If the coordinator is in another process, the returned object passes on each call, and raises
        :class:`CoordinatorLost` if that process has died.
        """
        ...

    def poll(self, snapshot: Snapshot) -> None:
        """Handle messages and check the workers; called about twice a second while they train."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the workers to report the end; return whether their processes have ended."""
        ...

    def failure(self) -> str | None:
        """Return why the workers ended, if they could not report it themselves."""

    def end_workers(self) -> None:
        """Bring the workers to their end: afterwards, nothing that they report may reach the run's documents."""

    def close(self, *, finished: bool) -> None:
        """Release everything that belongs to the run; unless it is ``finished``, its workers may still train."""


class RunPhase(Enum):
    """Phase of a session and its run."""

    UNKNOWN = auto()
    """Nothing of the run is in storage."""
    RECORDED = auto()
    """The run's documents are in storage, and are kept up to date."""
    CONCLUDED = auto()
    """The run has a result, but its workers have not reported its end, and may still run."""
    OVER = auto()
    """The run has a result, and its workers have reported its end."""


class RunSession:
    """A run that trains while the session is open: its views, its trackers, its documents, and its end.

    Entering the context starts the workers, and leaving it releases everything that belongs to the run. If it is left
    by an exception, the run's status says so.

    Example:
        >>> with RunSession(prepared, LocalLaunch(prepared, agent)) as session:
        ...     result = session.watch()
    """

    def __init__(self, prepared: PreparedRun, launch: Launch) -> None:
        self._prepared = prepared
        self._launch = launch
        self._plan = prepared.data.plan(launch.config)
        before = prepared.status_before  # whose time and cost a run that resumes goes on with
        self._writer = DocumentWriter(
            prepared.store, self._plan.num_steps, prepared.first_step, prepared.started_at, before
        )
        self._notification = Notification(notify_target(prepared.config) if prepared.notifies else None)
        # After a restart, the status has the dollars so far.
        costs_since = time.monotonic() if prepared.restarting else prepared.started_at
        self._cost = CostMeter(prepared.config.prices, before, costs_since)
        self._max_dollars = prepared.config.max_cost
        self._reported_gpus: set[str] = set()  # types of GPUs whose missing price was reported
        self._tracking = Tracking(prepared.trackers)
        self._recording = Background(self._record)  # storage may hang, and a stop must not wait for it
        self._pictures = SuspiciousPictures(prepared.store, prepared.data)
        self._picturing = Background(self._pictures.update)  # reads images, which takes longer than a stop may wait
        self._cursor = START  # after the rows that the view has got
        self._phase = RunPhase.UNKNOWN
        self._gathering: Gathering | None = Gathering(launch.config, prepared.loop, prepared.first_step)

    def __enter__(self) -> RunSession:
        self._monitor = self._launch.start()
        return self

    def watch(self) -> TrainResult:
        """Show the run, pass on requests to stop, and write its documents, until it ends; return the result.

        A stop that comes before the workers train ends the run at once, if the launch can end them.

        Raises TrainingFailed if the run fails, and :class:`CoordinatorLost` if its coordinator dies. If the workers
        find that the network, its weights and its options do not fit together, their error is raised as it is, and
        nothing of the run is in storage. Raises StorageError if the summary cannot be written.
        """
        signals = self._prepared.signals
        began_at, report_start_after_s = time.monotonic(), LONG_START_S
        ending = self._monitor.ending()
        stopped_before_training = False
        # If this is a restart, a request that the attempt before did not get is passed on now: what is left of the run
        # may take less than a second.
        if self._prepared.restarting and (stored := self._writer.stop_request()) is not None:
            signals.request_stop(stored)
            self._monitor.request_stop(stored)

        while not ending.has_come and not self._launch.wait(_POLL_EVERY_S):
            # Show the run, and write the documents in the background.
            snapshot = self._show()
            stored = self._recording(snapshot) if ending.is_checked else None
            if self._phase is RunPhase.RECORDED:
                self._picturing(snapshot)

            # Pass on requests to stop: from storage, --max-cost and the coordinator to the signals, from these to the
            # coordinator.
            if self._max_dollars is not None and (snapshot.dollars or 0.0) >= self._max_dollars:
                stored = stored or StopReason("cost", f"{self._max_dollars:g}", value=snapshot.dollars)
            if (request := snapshot.stop_request or stored) is not None:
                signals.request_stop(request)
            if signals.stop_request is not None and snapshot.stop_request is None:
                self._monitor.request_stop(signals.stop_request)
                # The workers may have begun to train since the snapshot was taken; then they stop by themselves.
                is_starting = self._monitor.snapshot(START).status == "starting"
                stopped_before_training = is_starting and self._launch.ends_workers
                if stopped_before_training:
                    break

            # Say what a long start waits for: after 15, 30, 60 … seconds.
            waited_s = time.monotonic() - began_at
            if snapshot.status == "starting" and waited_s >= report_start_after_s and self._prepared.group is None:
                report_start_after_s = 2 * waited_s
                _report_long_start(waited_s, loop_runs=ending.loop_runs)

            # Look after the workers, and ask whether the run has ended.
            for gpu in self._cost.gpus_without_price - self._reported_gpus:
                self._monitor.note_event(Note(f"--price has no price for {gpu}, which counts as nothing"))
                self._reported_gpus.add(gpu)
            self._launch.poll(snapshot)
            self._print_lines_of_workers()
            ending = self._monitor.ending()

        # End the workers. From here on, nothing of theirs may reach the run's documents.
        self._launch.end_workers()
        self._print_lines_of_workers()
        ending = self._monitor.ending()
        if ending.error is not None:
            _log.debug("a worker failed: %s", printable(redact(ending.trace)))
            if not ending.is_checked:
                raise ending.error

        # Write how the run ended.
        outcome = self._outcome(ending, stopped_before_training=stopped_before_training)
        self._prepared.copy_log()
        result = successful(self._conclude(outcome))
        if ending.has_come:
            self._phase = RunPhase.OVER
        return result

    def _print_lines_of_workers(self) -> None:
        """Print what workers have printed since the last call, each line with its worker, and its trial in a sweep.

        What they have logged for the files of this process's loggers is written there.
        """
        prepared = self._prepared
        trial = f"{prepared.name} " if prepared.sweep else ""
        with prepared.signals.outlive_terminal():
            for line in self._monitor.take_printed():
                if isinstance(line, LoggedRecord):
                    write_record(line)
                else:
                    print_line(line, trial)

    def _show(self) -> Snapshot:
        """Take a snapshot of the run, queue its rows for the trackers, show it in the view, and return it."""
        snapshot = self._cost.update(self._monitor.snapshot(self._cursor))
        self._cursor = snapshot.cursor
        self._tracking.update(snapshot)
        if self._prepared.view is not None:
            with self._prepared.signals.outlive_terminal():
                self._prepared.view(snapshot)
        return snapshot

    def _record(self, snapshot: Snapshot) -> StopReason | None:
        """Write the documents that are due; return a stop request found in storage, if any. Runs in the background."""
        self._write_first_documents()
        self._writer.heartbeat(snapshot)
        return self._writer.stop_request()

    def _write_first_documents(self) -> None:
        """Write the run's first documents, by which others know that it exists, and this attempt's provenance.

        Do nothing if they are written. The trackers begin here, too.
        """
        # Once: the manifests and the configuration.
        if self._phase is RunPhase.UNKNOWN:
            prepared = self._prepared
            prepared.data.write(prepared.store)
            self._writer.begin(self._launch.config)
            ask_to_stop = prepared.signals.request_stop
            self._tracking.begin(
                self._launch.config, prepared.store, self._monitor.note_event, ask_to_stop, sweep=prepared.sweep
            )
            self._phase = RunPhase.RECORDED

        # Once: the provenance. An event says what differs from the attempt before.
        if (gathering := self._gathering) is None:
            return
        self._gathering = None
        try:
            difference = record_provenance(self._prepared.store, gathering.finish())
        except StorageError as error:  # the run goes on without this document
            self._monitor.note_event(DocumentLost(PROVENANCE, str(error)))
            return
        if difference:
            self._monitor.note_event(ProvenanceChanged(difference))

    def _outcome(self, ending: Ending, *, stopped_before_training: bool) -> Outcome:
        """Return the outcome that the workers reported, or, if they did not, one from what is known about their end.

        A run that the monitor has ended has failed, whatever the workers reported.
        """
        prepared, outcome = self._prepared, ending.outcome
        if outcome is not None and ending.reason is None:
            return outcome
        if outcome is None:
            progress = progress_of(self._monitor.snapshot(START), prepared.first_step)
            if stopped_before_training and ending.reason is None:
                return Outcome(status="stopped", progress=progress)
            outcome = Outcome(status="failed", progress=progress, accumulate=ending.accumulate)
        if isinstance(ending.error, NoWholeCheckpoint):  # which says what to do instead of a resume
            return dataclasses.replace(outcome, status="failed", error=f"Run {prepared.name!r} failed: {ending.error}")

        # It is a failure. The sentence says how to resume the run, unless storage answers that there is no checkpoint.
        has_checkpoint = True
        with suppress(StorageError):
            has_checkpoint = newest_checkpoint(prepared.store.fail_fast()) is not None
        sentence = failure_sentence(
            prepared.config,
            ending.reason or ending.lost or self._launch.failure() or "the workers exited without an error message",
            prepared.loop,
            has_checkpoint=has_checkpoint,
            has_step=outcome.progress.step > 0,
            command=prepared.command,
        )
        return dataclasses.replace(outcome, status="failed", error=sentence)

    def _conclude(self, outcome: Outcome) -> TrainResult:
        """Write the summary and the rest of the history, end the trackers, send the message, and return the result.

        Raises StorageError if storage is out of reach, unless the run failed: the reason of that matters more, and may
        be storage itself.
        """
        self._recording.close()
        unless_failed = suppress(*([StorageError] if outcome.error else []))
        with unless_failed:
            self._write_first_documents()

        # End the history with the result, and show the last rows; then write the summary.
        snapshot = self._cost.update(self._monitor.snapshot(self._cursor))
        result = self._writer.result(outcome, snapshot, self._launch.num_workers, self._launch.config.best_metric)
        self._monitor.finish(outcome.status, result)
        snapshot = self._show()
        self._picturing.close()
        self._pictures.update(snapshot)
        with unless_failed:
            self._writer.conclude(result, snapshot)
        self._phase = RunPhase.CONCLUDED  # whatever interrupts the session before this leaves a status

        # Trackers may report events at their end, too. A run that starts again at once, with more microbatches because
        # memory did not suffice, sends no message.
        self._tracking.finish(result)
        self._writer.log_events(self._show())
        starts_again = result.accumulate is not None and self._prepared.config.accumulate == "auto"
        if not starts_again:
            self._notification.send(message_of(result))
        return result

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._gathering is not None:
            self._gathering.close()
        # An exception has interrupted the session: trackers end as for a failed run, and a run that has documents, but
        # no result, gets a status.
        if kind is not None:
            with suppress(RaytrainError):  # if the coordinator has died, the last lines are lost
                self._print_lines_of_workers()
            self._tracking.abort()
            self._picturing.close(0.0)
            has_written = self._recording.close(_ABORTED_WITHIN_S)  # otherwise it may still write the status itself
            if has_written and self._phase is RunPhase.RECORDED:
                status = _STATUS_AFTER.get(kind, "failed")
                with suppress(RaytrainError):  # the reason why the session ends matters more
                    self._writer.write_status(status, fail_fast=True)
                if status != "starting":
                    name = self._prepared.name
                    self._notification.send({"text": f"Run {name} was {status}", "name": name, "status": status})
        self._launch.close(finished=self._phase is RunPhase.OVER)
        self._notification.wait()
        del self._launch  # otherwise its objects in the cluster live until Python's garbage collection


def _report_long_start(waited_s: float, *, loop_runs: bool) -> None:
    """Say what the workers do that have been starting for ``waited_s`` seconds, and whether this machine is busy.

    ``loop_runs``: they have begun to run the loop.
    """
    doing = "run the loop up to its first batch" if loop_runs else "start, and import torch and the code of the loop"
    load, num_cores, busy = os.getloadavg()[0], cores(), ""
    if load > 2 * num_cores:
        busy = f"; this machine is busy: some {load:.0f} processes share its {format_count(num_cores, 'core')}"
    STARTUP.info("still starting, after %.0f s: the workers %s%s …", waited_s, doing, busy)
