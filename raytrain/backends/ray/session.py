"""The driver's side of a run: its actor, its data in the object store, and its workers."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig

from raytrain.backends.ray.capacity import CapacityCheck
from raytrain.backends.ray.cluster import hardware, place
from raytrain.backends.ray.coordinator import CredentialLender, start_coordinator, with_cluster_credentials
from raytrain.backends.ray.data_feed import DataFeed
from raytrain.backends.ray.failures import FailureReporter, root_cause
from raytrain.backends.ray.ingest import ImageSet
from raytrain.backends.ray.pickle_by_value import pickle_by_value
from raytrain.backends.ray.trainer import Trainer
from raytrain.backends.ray.worker import WorkerSpec, work
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train import PreparedRun, TrainResult, View
from raytrain.errors import MonitorLost, StorageError, TrainingFailed
from raytrain.runs import records
from raytrain.runs.bad_images import BadImageLimit
from raytrain.runs.layout import SUMMARY
from raytrain.runs.monitor import RowCursor, Snapshot
from raytrain.runs.throttle import Throttle
from raytrain.storage.base import Store
from raytrain.storage.tempdir import TemporaryFolder
from raytrain.training import transfer
from raytrain.training.checkpoint import Identity, Progress

os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a loop or a model may read files by relative paths

_LOOK_EVERY_S = 0.5
_RESIZE_EVERY_S = 30.0  # how often an elastic run sees whether there is room for more workers
_LOOK_IN_STORAGE_EVERY_S = 1.0
_ABORTED_WITHIN_S = 10.0
_STATUS_AFTER: dict[object, str] = {
    KeyboardInterrupt: "interrupted",
    MonitorLost: "starting",
}  # the driver begins it again, or says otherwise


class Session:
    """A run that trains while the session is open; at its end nothing of it is left in the cluster."""

    def __init__(self, prepared: PreparedRun, loop: Callable[..., None] | None, begun: float, *, own_cluster: bool) -> None:
        found = hardware()
        self._placement = place(prepared.config, found)
        config = prepared.config.resolved(self._placement.num_workers)
        self._config = dataclasses.replace(config, device=self._placement.device)
        self._prepared = prepared
        self._store = prepared.store
        self._data = prepared.data
        self._loop = loop
        pickle_by_value(loop)
        self._begun = begun
        self._own_cluster = own_cluster
        self._plan = self._data.plan(config)
        self._test_plan = self._data.test_plan(self._placement.num_workers)
        self._reading = DataFeed(config, self._data, self._plan, self._test_plan, prepared.first_step, found.object_store_bytes)
        self._weights = self._initial_weights()
        self._ended: Future[None] = Future()
        self._scratch = TemporaryFolder()  # Ray Train's own notes; the run's are in its storage
        self._seen = RowCursor()
        self._throttle = Throttle()
        self._reached = prepared.first_step  # more than what its actor has heard of, before it begins and at its end
        self._stop_reason: str | None = None
        self._controller: Any = None

    def __enter__(self) -> Session:
        """Write down what the run is; start its actor, the reading of its data, and its workers."""
        self._room = CapacityCheck(self._placement, self._placement.min_workers)
        self._coordinator = start_coordinator(self._prepared.name)
        self._lender = CredentialLender(self._coordinator)
        self._coordinator.begin.remote(
            self._prepared.name,
            self._plan.num_steps,
            self._plan.steps_per_epoch,
            self._store.url,
            self._store.settings,
            BadImageLimit.of(self._config, len(self._data.train) + len(self._data.test)),
        )
        train, test = self._reading.image_sets(self._coordinator)
        threading.Thread(target=self._fit, args=(self._job(train, test),), daemon=True, name="trainer").start()
        self._reading.begin(self._placement)
        self._write_down()
        return self

    def __exit__(self, *exception: object) -> None:
        self._reading.close()
        if not self._ended.done():
            with suppress(StorageError):  # the reason why the session ends is worth more
                self._write_status(_STATUS_AFTER.get(exception[0], "failed"), None)
            self._abort()
        ray.kill(self._coordinator)
        self._scratch.remove()

    def watch(self, signals: StopSignals, view: View | None) -> TrainResult:
        """See the run to its end: show it, carry stop requests to it, keep its status in storage.

        Raises TrainingFailed where it ends before its time, as :class:`MonitorLost` where its actor has died.
        """
        try:
            return self._watch(signals, view)
        except RayActorError:
            sentence = self._sentence("the process that keeps its metrics and its credentials has died")
            known = {
                "name": self._prepared.name,
                "status": "failed",
                "run_dir": self._store.url,
                "stop_reason": signals.reason or self._stop_reason,
            }
            raise MonitorLost(sentence, known) from None

    def _watch(self, signals: StopSignals, view: View | None) -> TrainResult:
        outcome: Any = None
        while not self._ended.done() and not (outcome or {}).get("error"):
            concurrent.futures.wait([self._ended], timeout=_LOOK_EVERY_S)
            snapshot = self._look(view)
            with suppress(StorageError):  # it may be back in a moment, and stops and keys must not wait; the history says so if not
                self._carry_stop(signals, snapshot)
                if self._throttle.due("status", records.HEARTBEAT_EVERY_S):
                    self._write_status(snapshot.status, snapshot, self._store.fail_fast())
            if snapshot.status == "starting":
                self._room.check()
            self._lender.lend_if_due()
            self._controller = self._controller or ray.get(self._coordinator.controller.remote())
            outcome = ray.get(self._coordinator.outcome.remote())
        outcome = ray.get(self._coordinator.outcome.remote())
        return self._conclude(outcome or {}, view)

    # Starting.

    def _job(self, train: ImageSet, test: ImageSet) -> WorkerSpec:
        config = self._config
        return WorkerSpec(
            config=config,
            loop=self._loop,
            classes=self._data.train.classes,
            identity=Identity(config.model, self._data.train.classes, self._data.train.digest, config.batch_size or 1, config.seed),
            mean=self._data.mean,
            std=self._data.std,
            run_store=with_cluster_credentials(self._store, self._coordinator),
            train=train,
            test=test,
            plan=self._plan,
            test_plan=self._test_plan,
            weights=self._weights,
            train_origin=self._reading.origin,
            test_cached=self._reading.test_cached,
            threads=self._placement.threads,
            coordinator=self._coordinator,
        )

    def _initial_weights(self) -> Any:
        """Where all workers find what they begin with: read once and put into the object store; None where there is none.

        The network is made here only to be refused before anything starts, where it, or what is to be done with it, leads nowhere.
        """
        config, classes = self._config, self._data.train.classes
        weights = transfer.initial_weights(config, classes, self._prepared.first_step)
        model = transfer.initial_model(config, len(classes), weights)
        if self._loop is None:  # a loop of the user's may train another network
            transfer.freeze(model, config.freeze)
            transfer.parameter_groups(model, len(classes), 0.0, config.head_learning_rate_factor)
        return None if weights is None else ray.put(weights)

    def _fit(self, job: WorkerSpec) -> None:
        """Run the trainer to its end, in a thread: where it can take no signals, which it would answer with an abort."""
        trainer = Trainer(
            lambda: work(job),
            coordinator=self._coordinator,
            own_cluster=self._own_cluster,
            scaling_config=ScalingConfig(
                num_workers=self._num_workers,
                use_gpu=bool(self._gpu),
                resources_per_worker={"CPU": self._placement.cpus, **self._gpu},
                elastic_resize_monitor_interval_s=_RESIZE_EVERY_S,
            ),
            run_config=RunConfig(
                storage_path=str(self._scratch.path),
                failure_config=FailureConfig(max_failures=self._config.max_failures),
                callbacks=[FailureReporter(self._coordinator)],
            ),
        )
        try:
            trainer.fit()
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)

    @property
    def _gpu(self) -> dict[str, float]:
        return {"GPU": 1.0} if self._placement.device == "cuda" else {}

    @property
    def _num_workers(self) -> int | tuple[int, int]:
        fewest, most = self._placement.min_workers, self._placement.num_workers
        return (fewest, most) if self._config.elastic_workers else most

    def _write_down(self) -> None:
        self._data.write(self._store)
        if not self._prepared.again:
            records.clear_stop_request(self._store)
        self._write_status("starting", None)
        records.write_config(self._store, self._config)  # the last: by it others know that the run is there

    # Watching.

    def _look(self, view: View | None) -> Snapshot:
        snapshot: Snapshot = ray.get(self._coordinator.snapshot.remote(self._seen))
        self._seen = snapshot.cursor
        if snapshot.status == "running":
            self._reading.go_on()
        if view is not None:
            view(snapshot)
        return snapshot

    def _carry_stop(self, signals: StopSignals, snapshot: Snapshot) -> None:
        reason = signals.reason
        if reason is None and self._throttle.due("stop", _LOOK_IN_STORAGE_EVERY_S):
            reason = records.stop_requested(self._store.fail_fast())
        if reason is not None and snapshot.stop_reason is None:
            self._coordinator.request_stop.remote(reason)
        self._stop_reason = reason or snapshot.stop_reason

    def _write_status(self, status: str, snapshot: Snapshot | None, store: Store | None = None) -> None:
        known: dict[str, Any] = {"num_steps": self._plan.num_steps}
        if snapshot is not None:
            self._reached = max(self._reached, snapshot.step)
            known = {name: getattr(snapshot, name) for name in ("num_steps", "epoch", "num_epochs", "num_workers")}
        records.write_status(store or self._store, records.RunStatus(status=status, step=self._reached, **known))

    # Ending.

    def _conclude(self, outcome: dict[str, Any], view: View | None) -> TrainResult:
        """Write the summary and the last of the history, and say how it ended."""
        error = self._error(outcome)
        result = self._result(outcome, error)
        ray.get(self._coordinator.finish.remote(result.status, result.summary()))
        self._reached, last = result.steps, self._look(view)
        with suppress(*([StorageError] if error else [])):  # why the run failed is worth more, and may be its storage
            records.write_json(self._store, SUMMARY, result.summary())
            self._write_status(result.status, last)
        if error:
            raise TrainingFailed(error, result.summary())
        return result

    def _abort(self) -> None:
        """End workers that Ray Train would start again, in a cluster that outlives this run; those of our own end with it.

        The thread that waits for them must end with the session, too: what asks a cluster that has gone may take this process along.
        """
        controller: Any = self._controller
        with suppress(RayError):  # the controller ends by this; GetTimeoutError is one, too
            if controller is None:
                controller = ray.get(self._coordinator.controller.remote(), timeout=_ABORTED_WITHIN_S)
            if controller is not None and not self._own_cluster:
                ray.get(controller.abort.remote(), timeout=_ABORTED_WITHIN_S)
        if controller is not None:
            ray.kill(controller)
            concurrent.futures.wait([self._ended], timeout=_ABORTED_WITHIN_S)

    def _error(self, outcome: dict[str, Any]) -> str | None:
        if "progress" in outcome and "error" not in outcome:
            return None
        raised = self._ended.exception() if self._ended.done() else None
        reason = outcome.get("error") or (root_cause(raised) if raised else "the workers ended without a word")
        return self._sentence(str(reason).rstrip("."))

    def _sentence(self, reason: str) -> str:
        name, storage = self._prepared.name, self._config.storage
        return f"Run {name!r} failed: {reason}. Its last checkpoint is kept: go on with --name {name} --storage {storage} --resume."

    def _result(self, outcome: dict[str, Any], error: str | None) -> TrainResult:
        snapshot: Snapshot = ray.get(self._coordinator.snapshot.remote(self._seen))
        progress = outcome.get("progress") or Progress(step=snapshot.step)
        path = outcome.get("checkpoint")
        return TrainResult(
            name=self._prepared.name,
            status="failed" if error else "stopped" if outcome["stopped"] else "finished",
            steps=progress.step,
            epochs=round(progress.step / self._plan.steps_per_epoch, 4),
            samples_seen=progress.samples_seen,
            test_accuracy=progress.test_accuracy,
            test_loss=progress.test_loss,
            checkpoint=path and f"{self._store.url}/{path}",
            run_dir=self._store.url,
            seconds=round(time.monotonic() - self._begun, 2),
            num_workers=snapshot.num_workers or self._placement.num_workers,
            num_skipped=snapshot.num_skipped,
            num_retries=snapshot.num_retries,
            stop_reason=snapshot.stop_reason,
            error=error,
        )
