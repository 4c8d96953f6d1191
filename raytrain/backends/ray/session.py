"""A run on a Ray cluster, as the driver sees it: it starts coordinator, data feed and workers, and watches them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from contextlib import ExitStack

import ray
from ray.exceptions import RayActorError

from raytrain.backends.fastest_precision import fastest_precision
from raytrain.backends.placement import place
from raytrain.backends.prepare import PreparedRun, load_initial_weights, run_spec
from raytrain.backends.ray.capacity_check import CapacityCheck
from raytrain.backends.ray.connection import Connection
from raytrain.backends.ray.coordinator import CoordinatorHandle, RunInStorage, start_coordinator, stop_coordinator
from raytrain.backends.ray.credential_server import lend_credentials
from raytrain.backends.ray.data_feed import DataFeed
from raytrain.backends.ray.hardware import cluster_hardware, fastest_on_nodes
from raytrain.backends.ray.head_watch import HeadWatch
from raytrain.backends.ray.pickle_by_value import pickle_by_value
from raytrain.backends.ray.shared_folder import check_shared
from raytrain.backends.ray.shared_images import SharedImages
from raytrain.backends.ray.trainer import TrainerThread
from raytrain.backends.ray.worker import WorkerSpec, work
from raytrain.backends.run_watcher import LOOK_EVERY_S, RunWatcher
from raytrain.backends.train_request import TrainRequest
from raytrain.errors import CoordinatorLost
from raytrain.monitor.events import Event
from raytrain.runs.outcome import Outcome, StopReason, TrainResult, failure_sentence, successful
from raytrain.runs.recorder import RunRecorder, failed
from raytrain.runs.snapshot import START, RowCursor, Snapshot, Status
from raytrain.runs.trackers.tracking import Tracking
from raytrain.storage.tempdir import TemporaryFolder

os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a loop or a model may read files by relative paths

_STATUS_AFTER: dict[object, str] = {
    KeyboardInterrupt: "interrupted",
    CoordinatorLost: "starting",  # the driver starts the run again, or marks it as failed
}


class RemoteMonitor:
    """A :class:`raytrain.backends.run_watcher.Monitor`: the run's coordinator."""

    def __init__(self, coordinator: CoordinatorHandle) -> None:
        self._coordinator = coordinator

    def snapshot(self, since: RowCursor) -> Snapshot:
        """How the run stands, with the rows that a viewer at ``since`` lacks."""
        return ray.get(self._coordinator.snapshot.remote(since))

    def event(self, event: Event) -> None:
        """Note something worth a line; returns at once."""
        self._coordinator.event.remote(event)

    def finish(self, status: Status, result: TrainResult) -> None:
        """End the run: nothing is recorded after this."""
        ray.get(self._coordinator.finish.remote(status, result))


class RunSession:
    """A run that trains while the session is open. When it closes, nothing of the run is left in the cluster.

    Raises UsageError if the ``cluster`` has too little for the run.
    """

    def __init__(self, prepared: PreparedRun, request: TrainRequest, cluster: Connection) -> None:
        found = cluster_hardware()
        group = request.group
        self._placement = group.placement if group else place(prepared.config, found)
        check_shared(prepared.store, prepared.config.storage, found.num_nodes)
        num_workers = self._placement.num_workers
        fastest = fastest_precision if cluster.is_own else fastest_on_nodes
        config = prepared.resolve(num_workers, self._placement.device, fastest)
        self._prepared = prepared
        self._store = prepared.store
        self._request = request
        self._cluster = cluster
        self._is_over = False
        pickle_by_value(request.loop)
        self._spec = run_spec(config, prepared.data, prepared.store, request.loop, num_workers)
        pickle_by_value(self._spec.transforms)
        self._shared: SharedImages | None = group and group.images
        reading = config, prepared.data, self._spec.plan, self._spec.test_plan, prepared.first_step
        self._feed = self._shared.feed if self._shared else DataFeed(*reading, found.object_store_bytes)
        weights = load_initial_weights(self._spec, prepared.first_step)
        self._weights = None if weights is None else ray.put(weights)
        self._stop_request: StopReason | None = None

    def __enter__(self) -> RunSession:
        """Start the coordinator, the workers and the reading of the data, and write down what the run is."""
        with ExitStack() as opened:
            self._capacity = CapacityCheck(self._placement, self._placement.min_workers)
            plan, started_at = self._spec.plan, self._request.started_at
            in_storage = RunInStorage.of(self._prepared, plan.num_steps, plan.steps_per_epoch, started_at)
            self._coordinator = start_coordinator(in_storage, self._placement.num_workers)
            opened.callback(stop_coordinator, self._coordinator)
            data = self._prepared.data
            stores = self._store, data.train_store, data.test_store
            self._credentials, self._lender = lend_credentials(
                self._coordinator, stores, self._prepared.scope(f"{self._store.url}/")
            )
            if self._shared is None:
                self._feed.connect(self._coordinator, self._credentials)
            folder = opened.enter_context(TemporaryFolder())  # Ray Train's own notes; the run's are in its storage
            spec = self._worker_spec()
            self._trainer = TrainerThread(
                lambda: work(spec),
                self._coordinator,
                self._placement,
                str(folder),
                max_failures=spec.run.config.max_failures,
                own_cluster=self._cluster.is_own,
            )
            self._trainer.start()
            opened.callback(self._end_trainer)
            if self._shared is None:
                self._feed.start(self._placement)
                opened.callback(self._feed.close)
            data.write(self._store)
            recorder = RunRecorder(self._store, plan.num_steps, self._prepared.first_step, started_at)
            tracking = Tracking(self._request.trackers)
            opened.callback(tracking.abort)
            monitor = RemoteMonitor(self._coordinator)
            self._head = HeadWatch(monitor.event)
            opened.callback(self._head.close)
            self._watcher = RunWatcher(monitor, recorder, tracking, self._request.view)
            self._watcher.begin(self._spec.config, self._store, restarting=self._prepared.restarting)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._watcher.abandon(_STATUS_AFTER.get(exception[0], "failed"))
        self._opened.close()

    def watch(self) -> TrainResult:
        """See the run to its end: show it, pass on stop requests, keep its status in storage.

        Raises TrainingFailed if it ends early, and :class:`CoordinatorLost` if that is because its coordinator died.
        """
        try:
            return self._watch()
        except RayActorError:
            sentence = self._sentence("the process that coordinates it has died")
            request = self._request.signals.stop_request or self._stop_request
            raise CoordinatorLost(sentence, self._prepared.name, self._store.url, request) from None

    def _watch(self) -> TrainResult:
        outcome: Outcome | None = None
        while outcome is None and not self._trainer.ended.done():
            concurrent.futures.wait([self._trainer.ended], timeout=LOOK_EVERY_S)
            snapshot = self._watcher.look()
            self._pass_on_stop_request(self._watcher.keep(snapshot), snapshot)
            if snapshot.status == "running":
                self._feed.workers_started()
            if snapshot.status == "starting":
                self._capacity.check()
            if self._lender is not None:
                self._lender.lend_if_due()
            self._head.look()
            self._trainer.remember_controller()
            outcome = ray.get(self._coordinator.outcome.remote())
        if self._shared is not None:
            self._coordinator.skip.remote(self._shared.skipped_images())
        outcome = self._final_outcome(ray.get(self._coordinator.snapshot.remote(START)))
        self._prepared.copy_log()
        result = successful(self._watcher.conclude(outcome, self._placement.num_workers))
        self._is_over = True
        return result

    def _end_trainer(self) -> None:
        """See that nothing of the run uses the cluster, now or when the next run uses this process's own."""
        own = self._cluster.own
        if self._is_over and own is not None:
            own.leave_later(self._trainer)
            return
        if self._is_over:
            self._trainer.wait()
        if not self._trainer.ended.done():
            self._trainer.abort(cluster_ends=own is not None and own.spoil())

    def _pass_on_stop_request(self, stored: StopReason | None, snapshot: Snapshot) -> None:
        request = self._request.signals.stop_request or stored
        if request is not None and snapshot.stop_request is None:
            self._coordinator.request_stop.remote(request)
        self._stop_request = request or snapshot.stop_request or self._stop_request

    def _final_outcome(self, snapshot: Snapshot) -> Outcome:
        """What the workers said, or why they could not say anything."""
        told: Outcome | None = ray.get(self._coordinator.outcome.remote())
        failure: str | None = ray.get(self._coordinator.failure.remote())  # that only the coordinator knows of
        if told is not None and told.error is None:
            return dataclasses.replace(told, status="failed", error=self._sentence(failure)) if failure else told
        reason = failure or (told and told.error) or self._trainer.failure() or "the workers ended without a word"
        return failed(self._sentence(reason), snapshot, told and told.accumulate)

    def _sentence(self, reason: str) -> str:
        return failure_sentence(self._prepared.name, self._spec.config.storage, reason)

    def _worker_spec(self) -> WorkerSpec:
        store = self._store.with_lent_credentials(self._credentials)
        return WorkerSpec(
            run=dataclasses.replace(self._spec, store=store),
            train=self._feed.train,
            test=self._feed.test,
            weights=self._weights,
            train_order=self._feed.orders.get("train"),
            test_order=self._feed.orders.get("test"),
            threads=self._placement.threads,
            folder=os.getcwd() if self._cluster.is_own else None,
            coordinator=self._coordinator,
            directory=self._shared.coordinator if self._shared else self._coordinator,
        )
