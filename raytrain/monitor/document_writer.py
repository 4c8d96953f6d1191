"""Writes the documents of a run while it trains: configuration, status, events (also to the log) and summary."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any

from raytrain.config import TrainConfig
from raytrain.errors import StorageError
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import read_stop_request
from raytrain.runs.background_and_throttle import Throttle
from raytrain.runs.documents import CONFIG, MACHINE_HISTORY, SUMMARY, write_config, write_json
from raytrain.runs.machine_history import MEASURE_EVERY_S, MachineHistory, read_machine_history, write_machines
from raytrain.runs.outcome import Outcome, Progress, StopReason, TrainResult
from raytrain.runs.redact import redact
from raytrain.runs.status import HEARTBEAT_EVERY_S, RunStatus, write_status
from raytrain.runs.stored_checkpoints import newest_checkpoint
from raytrain.storage.store import Store

_POLL_EVERY_S = 1.0
_SPENT = ("dollars", "gpu_kwh", "elapsed_s")  # what a status keeps of all attempts
_log = logging.getLogger(__name__)


class DocumentWriter:
    """Keeps the documents of the run in ``store``, which is writable for its owner, up to date.

    ``first_step`` counts the completed steps when this attempt begins. ``started_at`` is when the user started the run,
    by ``time.monotonic()``; now by default. The first status keeps the time and the cost of the status ``before``.
    """

    def __init__(
        self,
        store: Store,
        num_steps: int,
        first_step: int = 0,
        started_at: float | None = None,
        before: RunStatus | None = None,
    ) -> None:
        self._store = store
        self._num_steps = num_steps
        self._step = first_step  # the monitor does not know it before workers start
        self._started_at = time.monotonic() if started_at is None else started_at
        spent = before or RunStatus(status="starting")
        self._spent: dict[str, Any] = {name: getattr(spent, name) for name in _SPENT}
        self._throttle = Throttle()
        self._num_logged = 0
        self._unwritten: TrainConfig | None = None  # options that will replace those in storage once workers start
        self._machines: MachineHistory | None = None  # read once workers report

    def begin(self, config: TrainConfig) -> None:
        """Write the first documents of an attempt.

        The options of an existing run are replaced only when its workers have started, because workers refuse a
        checkpoint that does not fit the new options. Raises StorageError if storage is out of reach.
        """
        self.write_status("starting")
        if self._store.exists(CONFIG):
            self._unwritten = config
        else:
            write_config(self._store, config)  # comes last: others know by it that the run exists

    def heartbeat(self, snapshot: Snapshot) -> None:
        """Log new events, and write the status and the use of the machines every few seconds.

        The options of a run that resumes are written here, too, once its workers have started. If storage is out of
        reach, nothing is raised, and a later call writes newer values.
        """
        self.log_events(snapshot)
        with suppress(StorageError):
            self._replace_config(snapshot)

            # The history of the machines grows in memory, and begins with that of earlier attempts in storage.
            if snapshot.machines and self._throttle.due("machines", MEASURE_EVERY_S):
                self._machines = self._machines or read_machine_history(self._store.fail_fast())
                self._machines.add(snapshot.elapsed_s, snapshot.machines)

            # Do not retry requests that fail: the next heartbeat has newer values.
            if self._throttle.due("heartbeat", HEARTBEAT_EVERY_S):
                self.write_status(snapshot.status, snapshot, fail_fast=True)
                self._write_machines(self._store.fail_fast(), snapshot)

    def stop_request(self) -> StopReason | None:
        """Return the stop request in storage, which is read at most once a second.

        None if there is none, if storage is out of reach, or if it was read within the last second.
        """
        with suppress(StorageError):
            if self._throttle.due("stop request", _POLL_EVERY_S):
                return read_stop_request(self._store.fail_fast())
        return None

    def result(self, outcome: Outcome, snapshot: Snapshot, num_workers: int, best_metric: str) -> TrainResult:
        """Return the result of the run, which its summary contains.

        ``outcome`` is what the workers reported, ``snapshot`` the last state of the run, and ``best_metric`` the metric
        of ``--best``. ``num_workers`` counts if the workers never trained.
        """
        # Lost workers cannot name their last checkpoint: take the newest one in storage, if storage answers.
        progress, steps_per_epoch = outcome.progress, snapshot.steps_per_epoch
        checkpoint, request = outcome.checkpoint, snapshot.stop_request
        with suppress(StorageError):
            checkpoint = checkpoint or newest_checkpoint(self._store)
        seconds = round(time.monotonic() - self._started_at, 2)
        return TrainResult(
            name=snapshot.name,
            status=outcome.status,
            steps=progress.step,
            epochs=round(progress.step / steps_per_epoch, 4),
            samples_seen=progress.samples_seen,
            validation_accuracy=progress.validation_accuracy,
            validation_loss=progress.validation_loss,
            test_accuracy=progress.test_accuracy,
            test_loss=progress.test_loss,
            best_metric=best_metric,
            best_value=progress.best_value,
            checkpoint=checkpoint and f"{self._store.url}/{checkpoint}",
            run_dir=self._store.url,
            seconds=seconds,
            total_seconds=max(seconds, round(snapshot.elapsed_s, 2)),
            startup_seconds=None if snapshot.startup_s is None else round(snapshot.startup_s, 2),
            num_workers=snapshot.num_workers or num_workers,
            dollars=snapshot.dollars,
            gpu_kwh=snapshot.gpu_kwh,
            num_skipped=snapshot.num_skipped,
            num_retries=snapshot.num_retries,
            num_decoded_on_cpu=snapshot.num_decoded_on_cpu,
            stop_reason=None if outcome.status == "finished" else outcome.stop_reason or request,
            error=outcome.error and redact(outcome.error),  # it may be the words of an exception of the user's loop
            accumulate=outcome.accumulate,
        )

    def conclude(self, result: TrainResult, snapshot: Snapshot) -> None:
        """Write the summary and the last status; raises StorageError if storage is out of reach."""
        # Write the status last, so that whoever reads that the run is over finds all other documents.
        self.log_events(snapshot)
        self._step = result.steps
        self._replace_config(snapshot)
        self._write_machines(self._store, snapshot)
        write_json(self._store, SUMMARY, result.summary())
        self.write_status(result.status, snapshot)

    def write_status(self, status: str, snapshot: Snapshot | None = None, *, fail_fast: bool = False) -> None:
        """Write the status with the progress and the cost in ``snapshot``.

        Without a snapshot, write the step, the time and the cost that are known so far, and the planned steps, but no
        epochs and workers. With ``fail_fast``, a request that fails is not retried. Raises StorageError.
        """
        progress: dict[str, Any] = {"num_steps": self._num_steps}
        if snapshot is not None:
            self._step = max(self._step, snapshot.step)
            self._spent = {name: getattr(snapshot, name) for name in _SPENT}
            self._spent["elapsed_s"] = round(snapshot.elapsed_s, 3)
            progress = {name: getattr(snapshot, name) for name in ("num_steps", "epoch", "num_epochs", "num_workers")}
        store = self._store.fail_fast() if fail_fast else self._store
        write_status(store, RunStatus(status=status, step=self._step, **progress, **self._spent))

    def log_events(self, snapshot: Snapshot) -> None:
        """Log the events of ``snapshot`` that were not logged before."""
        for event in snapshot.events:
            if event.number >= self._num_logged:
                _log.info("%s: %s", snapshot.name, event.event)
                self._num_logged = event.number + 1

    def _write_machines(self, store: Store, snapshot: Snapshot) -> None:
        """Write how the machines are used now, and since the start of the run; nothing before workers have reported."""
        if self._machines is not None:
            write_machines(store, snapshot.machines)
            write_json(store, MACHINE_HISTORY, self._machines.to_json())

    def _replace_config(self, snapshot: Snapshot) -> None:
        """Write the options of a run that is resumed, once its workers have started."""
        if self._unwritten is not None and snapshot.num_workers:
            write_config(self._store, self._unwritten)
            self._unwritten = None


def progress_of(snapshot: Snapshot, first_step: int) -> Progress:
    """Return the progress of a run whose workers could not report it, from its last ``snapshot``.

    ``first_step`` counts the completed steps when they began. The accuracy and the loss are those of the last
    evaluation.
    """
    # Rows of later steps are of an earlier attempt, and do not count: the run would train these steps again.
    step = max(snapshot.step, first_step)
    rows = [row for row in snapshot.rows if row.step <= step]
    evaluated = next((row for row in reversed(rows) if row.kind == "evaluation"), None)
    return Progress(
        step=step,
        samples_seen=max((row.samples_seen or 0 for row in rows), default=0),
        validation_accuracy=evaluated and evaluated.accuracy,
        validation_loss=evaluated and evaluated.loss,
    )
