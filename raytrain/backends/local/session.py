"""A run on this machine, as the process that started it sees it: it keeps the run's documents, and watches the workers.

Imports no torch: the agent does, in the meantime.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from raytrain.backends.image_cache import SharedImages, image_cache
from raytrain.backends.local.agent_process import AgentProcess
from raytrain.backends.local.calls import CallServer
from raytrain.backends.local.job import Job
from raytrain.backends.machine import machine_hardware
from raytrain.backends.placement import place
from raytrain.backends.prepare import PreparedRun
from raytrain.backends.run_watcher import LOOK_EVERY_S, watch_here
from raytrain.backends.train_request import TrainRequest
from raytrain.backends.worker_task import WorkerTask
from raytrain.errors import OutOfMemory, RaytrainError
from raytrain.monitor.events import WorkerFailed
from raytrain.runs.logs import WorkerLogs
from raytrain.runs.outcome import Outcome, TrainResult, failure_sentence, successful
from raytrain.runs.recorder import failed
from raytrain.runs.skipped_images import SkippedImage
from raytrain.runs.snapshot import Snapshot
from raytrain.storage.tempdir import TemporaryFolder

_SILENT = "the workers ended without a word"
_logger = logging.getLogger(__name__)


class LocalSession:
    """A run that trains while the session is open. When it closes, no process and no file of its workers is left.

    Raises UsageError if the machine has too little for the run.
    """

    def __init__(self, prepared: PreparedRun, request: TrainRequest, agent: AgentProcess) -> None:
        placement = place(prepared.config, machine_hardware(prepared.config.gpus))
        self._num_workers = placement.num_workers
        self._config = prepared.resolve(placement.num_workers, placement.device)
        self._prepared = prepared
        self._request = request
        self._shared: SharedImages | None = request.group and request.group.images
        self._agent = agent
        self._monitor, self._watcher = watch_here(prepared, self._config, request)
        self._ended = threading.Event()
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
            cache = self._shared and self._shared.cache
            cache = cache or image_cache(self._config, prepared.data, prepared.first_step, opened)
            self._logs = WorkerLogs(prepared.store, folder)
            self._logs.start()
            opened.callback(self._logs.close)
            task = WorkerTask(self._config, prepared.data, prepared.store, prepared.first_step, cache)
            opened.callback(self._agent.close)
            self._agent.start_workers(Job(task, self._request.loop, self._num_workers, calls.address, str(folder)))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._agent.close()
        self._watcher.abandon("interrupted" if kind is KeyboardInterrupt else "failed")
        self._opened.close()

    def watch(self) -> TrainResult:
        """See the run to its end: show it, pass on stop requests, keep its status in storage.

        Raises TrainingFailed if it ends early.
        """
        while not self._ended.wait(LOOK_EVERY_S) and not self._agent.has_ended:
            stored = self._watcher.keep(self._watcher.look())
            if (request := self._request.signals.stop_request or stored) is not None:
                self._monitor.request_stop(request)
        self._agent.close()
        if self._error is not None and not self._watcher.begun:
            raise self._error
        self._logs.close()
        self._prepared.copy_log()
        if self._shared is not None:
            self._monitor.skip(self._shared.skipped_images())
        return successful(self._watcher.conclude(self._final_outcome(self._monitor.snapshot()), self._num_workers))

    def _final_outcome(self, snapshot: Snapshot) -> Outcome:
        """What the workers said, or why they could not say anything."""
        outcome = self._outcome
        error = self._monitor.failure or (outcome.error if outcome else str(self._error or self._failure or _SILENT))
        if error is None:
            assert outcome is not None
            return outcome
        sentence = failure_sentence(self._prepared.name, self._config.storage, error)
        if outcome is not None:
            return dataclasses.replace(outcome, status="failed", error=sentence)
        return failed(sentence, snapshot, self._error.accumulate if isinstance(self._error, OutOfMemory) else None)

    def _calls(self) -> dict[str, Callable[..., Any]]:
        """What the workers and their agent may call."""
        monitor = self._monitor
        return {
            "started": monitor.started,
            "record": monitor.record,
            "measured": monitor.measured,
            "event": monitor.event,
            "skip": self._skip,
            "flush": monitor.flush,
            "wait_for_stop_request": monitor.wait_for_stop_request,
            "begin": self._begin,
            "conclude": self._note_outcome,
            "give_up": self._note_error,
            "failed": self._note_failed_worker,
            "workers_failed": self._note_failed_workers,
        }

    def _skip(self, images: list[SkippedImage]) -> None:
        self._monitor.skip(images)
        if self._shared is not None:
            self._shared.skip(images)

    def _begin(self) -> None:
        """Write down what the run is, once: workers that are started again call this, too."""
        if not self._watcher.begun:
            self._prepared.data.write(self._prepared.store)
            self._watcher.begin(self._config, self._prepared.store)

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
        self._monitor.event(WorkerFailed(self._failure))
