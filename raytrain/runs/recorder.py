"""Keeps the documents of a run in storage for the process that trains, where no driver does."""

from __future__ import annotations

import time
from contextlib import suppress

from raytrain.backends.train import TrainResult
from raytrain.config import TrainConfig
from raytrain.data.batch_plan import BatchPlan
from raytrain.errors import StorageError
from raytrain.runs import records
from raytrain.runs.history import History
from raytrain.runs.layout import SUMMARY
from raytrain.runs.monitor import RunMonitor, Status
from raytrain.runs.throttle import Throttle
from raytrain.storage.base import Store
from raytrain.training.checkpoint import Progress


class RunRecorder:
    """Keeps the history, the status and the summary of the run ``name``; its ``monitor`` is for whoever trains."""

    def __init__(self, store: Store, name: str, plan: BatchPlan, num_workers: int) -> None:
        self.monitor = RunMonitor(name, plan.num_steps, plan.steps_per_epoch, History(store))
        self._store = store
        self._plan = plan
        self._num_workers = num_workers
        self._begun = time.monotonic()
        self._throttle = Throttle()

    def begin(self, config: TrainConfig) -> None:
        """Make the run known; what it trains on is written down already."""
        records.clear_stop_request(self._store)
        self._write_status("starting", self._store)
        records.write_config(self._store, config)  # the last: by it others know that the run is there

    def look(self) -> None:
        """Carry ``raytrain stop`` to the monitor, and say now and then that the run goes on; to be called about once a second."""
        store = self._store.fail_fast()
        with suppress(StorageError):  # it may be back in a moment
            reason = records.stop_requested(store)
            if reason is not None:
                self.monitor.request_stop(reason)
            if self._throttle.due("status", records.HEARTBEAT_EVERY_S):
                self._write_status("running", store)

    def conclude(self, status: Status, progress: Progress | None, error: str | None = None) -> None:
        """Write how the run ended; raises StorageError where storage is away. No :meth:`look` may come after it."""
        summary = self._result(status, progress, error).summary()
        self.monitor.finish(status, summary)
        records.write_json(self._store, SUMMARY, summary)
        self._write_status(status, self._store)

    def _write_status(self, status: Status, store: Store) -> None:
        snapshot = self.monitor.snapshot()
        known = {name: getattr(snapshot, name) for name in ("step", "num_steps", "epoch", "num_epochs")}
        records.write_status(store, records.RunStatus(status=status, num_workers=self._num_workers, **known))

    def _result(self, status: Status, progress: Progress | None, error: str | None) -> TrainResult:
        snapshot = self.monitor.snapshot()
        evaluation = snapshot.evaluation or {}
        step = snapshot.step if progress is None else progress.step
        path = max((found.path for found in records.list_checkpoints(self._store)), default=None)
        return TrainResult(
            name=snapshot.name,
            status=status,
            steps=step,
            epochs=round(step / self._plan.steps_per_epoch, 4),
            samples_seen=0 if progress is None else progress.samples_seen,
            test_accuracy=evaluation.get("accuracy"),
            test_loss=evaluation.get("loss"),
            checkpoint=path and f"{self._store.url}/{path}",
            run_dir=self._store.url,
            seconds=round(time.monotonic() - self._begun, 2),
            num_workers=self._num_workers,
            num_skipped=snapshot.num_skipped,
            num_retries=snapshot.num_retries,
            stop_reason=snapshot.stop_reason if status == "stopped" else None,
            error=error,
        )
