"""A run on this machine, as the process that started it sees it: it keeps the run's documents, and watches the workers.

Imports no torch: the agent does, in the meantime.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from raytrain.backends.image_cache import image_cache
from raytrain.backends.local.agent_process import AgentProcess
from raytrain.backends.local.calls import CallServer
from raytrain.backends.local.job import Job
from raytrain.backends.machine import hardware
from raytrain.backends.placement import place
from raytrain.backends.prepare import Loop, PreparedRun
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.worker_task import WorkerTask
from raytrain.errors import RaytrainError, StorageError, TrainingFailed
from raytrain.runs.background import Background
from raytrain.runs.history import History
from raytrain.runs.monitor import RunMonitor
from raytrain.runs.outcome import Outcome, TrainResult, failure_sentence
from raytrain.runs.recorder import RunRecorder, failed
from raytrain.runs.snapshot import START, Snapshot, View
from raytrain.runs.stop_request import StopRequest
from raytrain.storage.tempdir import TemporaryFolder
from raytrain.trackers.tracking import Tracking

_LOOK_EVERY_S = 0.5
_SILENT = "the workers ended without a word"
_logger = logging.getLogger(__name__)


class LocalSession:
    """A run that trains while the session is open. When it closes, no process and no file of its workers is left.

    ``started_at`` is when the user started it, as ``time.monotonic()`` tells the time. Raises UsageError if the machine
    has too little for the run.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        loop: Loop | None,
        agent: AgentProcess,
        tracking: Tracking,
        started_at: float,
    ) -> None:
        placement = place(prepared.config, hardware(prepared.config.gpus))
        self._num_workers = placement.num_workers
        self._config = prepared.resolve(placement.num_workers, placement.device)
        self._prepared = prepared
        self._loop = loop
        self._agent = agent
        self._tracking = tracking
        data, first_step = prepared.data, prepared.first_step
        plan = data.plan(self._config)
        self._recorder = RunRecorder(prepared.store, plan.num_steps, first_step, started_at)
        history = History(prepared.store)
        limit = prepared.skip_limit()
        self._monitor = RunMonitor(
            prepared.name,
            plan.num_steps,
            plan.steps_per_epoch,
            history,
            skip_limit=limit,
            started_at=started_at,
        )
        self._documents = Background(self._keep_documents)  # storage may hang, and a stop must not wait for it
        self._seen = START
        self._ended = threading.Event()
        self._begun = False
        self._outcome: Outcome | None = None
        self._error: RaytrainError | None = None
        self._told: str | None = None  # by the first worker that failed, since the workers were started last
        self._failure: str | None = None

    def __enter__(self) -> LocalSession:
        """Start the workers."""
        with ExitStack() as opened:
            folder = opened.enter_context(TemporaryFolder())
            calls = CallServer(folder, self._calls())
            opened.callback(calls.close)
            prepared = self._prepared
            cache = image_cache(self._config, prepared.data, prepared.first_step, opened)
            task = WorkerTask(self._config, prepared.data, prepared.store, prepared.first_step, cache)
            opened.callback(self._agent.close)
            self._agent.start_workers(Job(task, self._loop, self._num_workers, calls.address, str(folder)))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._agent.close()
        self._tracking.abort()
        self._documents.close()
        if self._begun and self._monitor.snapshot().result is None:
            with suppress(RaytrainError):  # the reason why the session ends matters more
                self._recorder.write_status("interrupted" if kind is KeyboardInterrupt else "failed", fail_fast=True)
        self._opened.close()

    def watch(self, signals: StopSignals, view: View | None) -> TrainResult:
        """See the run to its end: show it, pass on stop requests, keep its status in storage.

        Raises TrainingFailed if it ends early.
        """
        while not self._ended.wait(_LOOK_EVERY_S) and not self._agent.has_ended:
            snapshot = self._look(view)
            stored = self._documents(snapshot) if self._begun else None
            if (request := signals.stop_request or stored) is not None:
                self._monitor.request_stop(request)
        self._agent.close()
        return self._conclude(view)

    def _keep_documents(self, snapshot: Snapshot) -> StopRequest | None:
        """Write the status; return a stop request that lies in storage."""
        self._recorder.heartbeat(snapshot)
        return self._recorder.stop_request()

    def _look(self, view: View | None) -> Snapshot:
        snapshot = self._monitor.snapshot(self._seen)
        self._seen = snapshot.cursor
        self._tracking.update(snapshot)
        if view is not None:
            view(snapshot)
        return snapshot

    def _conclude(self, view: View | None) -> TrainResult:
        """Write the summary and the rest of the history, and say how the run ended."""
        self._documents.close()
        if self._error is not None and not self._begun:
            raise self._error
        snapshot = self._monitor.snapshot()
        outcome = self._final_outcome(snapshot)
        result = self._recorder.result(outcome, snapshot, self._num_workers)
        self._monitor.finish(outcome.status, result)
        last = self._look(view)
        with suppress(*([StorageError] if outcome.error else [])):  # why the run failed matters more; it may be storage
            self._recorder.conclude(result, last)
        self._tracking.finish(result)
        self._recorder.log_events(self._look(view))  # what trackers said at the end
        if outcome.error:
            raise TrainingFailed(outcome.error, result.summary())
        return result

    def _final_outcome(self, snapshot: Snapshot) -> Outcome:
        """What the workers said, or why they could not say anything."""
        outcome = self._outcome
        error = self._monitor.failure or (outcome.error if outcome else str(self._error or self._failure or _SILENT))
        if error is None:
            assert outcome is not None
            return outcome
        sentence = failure_sentence(self._prepared.name, self._config.storage, error)
        return dataclasses.replace(outcome, status="failed", error=sentence) if outcome else failed(sentence, snapshot)

    def _calls(self) -> dict[str, Callable[..., Any]]:
        """What the workers and their agent may call."""
        monitor = self._monitor
        return {
            "started": monitor.started,
            "record": monitor.record,
            "event": monitor.event,
            "skip": monitor.skip,
            "flush": monitor.flush,
            "wait_for_stop_request": monitor.wait_for_stop_request,
            "begin": self._begin,
            "conclude": self._note_outcome,
            "give_up": self._note_error,
            "failed": self._note_failed_worker,
            "workers_failed": self._note_failed_workers,
        }

    def _begin(self) -> None:
        """Write down what the run is, once: workers that are started again call this, too."""
        if not self._begun:
            self._prepared.data.write(self._prepared.store)
            self._recorder.begin(self._config)
            self._tracking.begin(self._config, self._prepared.store, self._monitor.event)
            self._begun = True

    def _note_outcome(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._ended.set()

    def _note_error(self, error: RaytrainError) -> None:
        """A worker met an error of the user's: trying again would end the same way."""
        self._error = error
        self._ended.set()

    def _note_failed_worker(self, rank: int, reason: str, trace: str) -> None:
        _logger.debug("worker %d failed: %s", rank, trace)
        self._told = self._told or f"worker {rank} failed: {reason}"

    def _note_failed_workers(self, killed: dict[int, str]) -> None:
        """The workers have ended, and start again unless they have failed too often."""
        dead = [f"worker {rank} was killed by {name}" for rank, name in killed.items()]
        self._failure = " and ".join(dead) or self._told or _SILENT
        self._told = None
        self._monitor.event(self._failure)
