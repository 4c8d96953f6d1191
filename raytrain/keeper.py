"""Keeps the documents of a run in storage for the process that trains, where no driver does."""

from __future__ import annotations

import time
from contextlib import suppress

from raytrain import runs
from raytrain.config import TrainConfig
from raytrain.data.plan import Plan
from raytrain.data.storage import Store
from raytrain.driver import TrainResult
from raytrain.errors import StorageError
from raytrain.layout import SUMMARY
from raytrain.monitor.history import History
from raytrain.monitor.run_monitor import RunMonitor, Status
from raytrain.pace import Pace
from raytrain.training.checkpoint import Progress


class Keeper:
    """Keeps the history, the status and the summary of the run ``name``; its ``monitor`` is for whoever trains."""

    def __init__(self, store: Store, name: str, plan: Plan, num_workers: int) -> None:
        self.monitor = RunMonitor(name, plan.num_steps, plan.steps_per_epoch, History(store))
        self._store = store
        self._plan = plan
        self._num_workers = num_workers
        self._begun = time.monotonic()
        self._pace = Pace()

    def begin(self, config: TrainConfig) -> None:
        """Make the run known; what it trains on is written down already."""
        runs.clear_stop_request(self._store)
        self._write_status("starting", self._store)
        runs.write_config(self._store, config)  # the last: by it others know that the run is there

    def look(self) -> None:
        """Carry ``raytrain stop`` to the monitor, and say now and then that the run goes on; to be called about once a second."""
        store = self._store.in_haste()
        with suppress(StorageError):  # it may be back in a moment
            reason = runs.stop_requested(store)
            if reason is not None:
                self.monitor.request_stop(reason)
            if self._pace.due("status", runs.HEARTBEAT_EVERY_S):
                self._write_status("running", store)

    def conclude(self, status: Status, progress: Progress | None, error: str | None = None) -> None:
        """Write how the run ended; raises StorageError where storage is away. No :meth:`look` may come after it."""
        summary = self._result(status, progress, error).summary()
        self.monitor.finish(status, summary)
        runs.write_json(self._store, SUMMARY, summary)
        self._write_status(status, self._store)

    def _write_status(self, status: Status, store: Store) -> None:
        snapshot = self.monitor.snapshot()
        known = {name: getattr(snapshot, name) for name in ("step", "num_steps", "epoch", "num_epochs")}
        runs.write_status(store, runs.RunStatus(status=status, num_workers=self._num_workers, **known))

    def _result(self, status: Status, progress: Progress | None, error: str | None) -> TrainResult:
        snapshot = self.monitor.snapshot()
        evaluation = snapshot.evaluation or {}
        step = snapshot.step if progress is None else progress.step
        path = max((found.path for found in runs.list_checkpoints(self._store)), default=None)
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
            num_repeated_requests=snapshot.num_repeated_requests,
            stop_reason=snapshot.stop_reason if status == "stopped" else None,
            error=error,
        )
