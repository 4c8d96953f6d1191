"""A run on a Ray cluster, as the driver sees it: it starts coordinator, data feed and workers, and watches them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from contextlib import ExitStack, suppress

import ray
from ray.exceptions import RayActorError

from raytrain.backends.placement import place
from raytrain.backends.prepare import Loop, PreparedRun, load_initial_weights, run_spec
from raytrain.backends.ray.capacity_check import CapacityCheck
from raytrain.backends.ray.coordinator import RunInStorage, start_coordinator, stop_coordinator
from raytrain.backends.ray.credential_server import lend_credentials
from raytrain.backends.ray.data_feed import DataFeed
from raytrain.backends.ray.hardware import hardware
from raytrain.backends.ray.pickle_by_value import pickle_by_value
from raytrain.backends.ray.shared_folder import check_shared
from raytrain.backends.ray.trainer import TrainerThread
from raytrain.backends.ray.worker import WorkerSpec, work
from raytrain.backends.stop_signals import StopSignals
from raytrain.errors import CoordinatorLost, RaytrainError, StorageError, TrainingFailed
from raytrain.runs.background import Background
from raytrain.runs.outcome import Outcome, TrainResult, failure_sentence
from raytrain.runs.recorder import RunRecorder, failed
from raytrain.runs.snapshot import START, Snapshot, View
from raytrain.runs.stop_request import StopRequest
from raytrain.storage.tempdir import TemporaryFolder
from raytrain.trackers.tracking import Tracking

os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a loop or a model may read files by relative paths

_LOOK_EVERY_S = 0.5
_STATUS_AFTER: dict[object, str] = {
    KeyboardInterrupt: "interrupted",
    CoordinatorLost: "starting",  # the driver starts the run again, or marks it as failed
}


class RunSession:
    """A run that trains while the session is open. When it closes, nothing of the run is left in the cluster.

    ``started_at`` is when the user started it, as ``time.monotonic()`` tells the time; ``own_cluster`` says that the
    cluster ends with this process. Raises UsageError if the cluster has too little for the run.
    """

    def __init__(
        self, prepared: PreparedRun, loop: Loop | None, tracking: Tracking, started_at: float, *, own_cluster: bool
    ) -> None:
        found = hardware()
        self._placement = place(prepared.config, found)
        check_shared(prepared.store, prepared.config.storage, found.num_nodes)
        num_workers = self._placement.num_workers
        config = prepared.resolve(num_workers, self._placement.device)
        self._prepared = prepared
        self._store = prepared.store
        self._own_cluster = own_cluster
        self._tracking = tracking
        self._started_at = started_at
        pickle_by_value(loop)
        self._spec = run_spec(config, prepared.data, prepared.store, loop, num_workers)
        pickle_by_value(self._spec.transforms)
        self._feed = DataFeed(
            config, prepared.data, self._spec.plan, self._spec.test_plan, prepared.first_step, found.object_store_bytes
        )
        weights = load_initial_weights(self._spec, prepared.first_step)
        self._weights = None if weights is None else ray.put(weights)
        self._recorder = RunRecorder(self._store, self._spec.plan.num_steps, prepared.first_step, started_at)
        self._documents = Background(self._keep_documents)  # storage may hang, and a stop must not wait for it
        self._seen = START
        self._stop_reason: str | None = None

    def __enter__(self) -> RunSession:
        """Start the coordinator, the workers and the reading of the data, and write down what the run is."""
        with ExitStack() as opened:
            self._capacity = CapacityCheck(self._placement, self._placement.min_workers)
            plan = self._spec.plan
            in_storage = RunInStorage.of(self._prepared, plan.num_steps, plan.steps_per_epoch, self._started_at)
            self._coordinator = start_coordinator(in_storage, self._placement.num_workers)
            opened.callback(stop_coordinator, self._coordinator)
            data = self._prepared.data
            stores = self._store, data.train_store, data.test_store
            self._credentials, self._lender = lend_credentials(
                self._coordinator, stores, self._prepared.scope(f"{self._store.url}/")
            )
            self._feed.connect(self._coordinator, self._credentials)
            folder = opened.enter_context(TemporaryFolder())  # Ray Train's own notes; the run's are in its storage
            spec = self._worker_spec()
            self._trainer = TrainerThread(
                lambda: work(spec),
                self._coordinator,
                self._placement,
                str(folder),
                max_failures=spec.run.config.max_failures,
                own_cluster=self._own_cluster,
            )
            self._trainer.start()
            opened.callback(self._trainer.abort)
            self._feed.start(self._placement)
            opened.callback(self._feed.close)
            data.write(self._store)
            self._recorder.begin(self._spec.config, restarting=self._prepared.restarting)
            self._tracking.begin(self._spec.config, self._store, self._coordinator.event.remote)
            opened.callback(self._tracking.abort)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._documents.close()
        if not self._trainer.ended.done():
            with suppress(RaytrainError):  # the reason why the session ends matters more
                self._recorder.write_status(_STATUS_AFTER.get(exception[0], "failed"), fail_fast=True)
        self._opened.close()

    def watch(self, signals: StopSignals, view: View | None) -> TrainResult:
        """See the run to its end: show it, pass on stop requests, keep its status in storage.

        Raises TrainingFailed if it ends early, and :class:`CoordinatorLost` if that is because its coordinator died.
        """
        try:
            return self._watch(signals, view)
        except RayActorError:
            sentence = self._sentence("the process that coordinates it has died")
            reason = signals.stop_request.reason if signals.stop_request else self._stop_reason
            raise CoordinatorLost(sentence, self._prepared.name, self._store.url, reason) from None

    def _watch(self, signals: StopSignals, view: View | None) -> TrainResult:
        outcome: Outcome | None = None
        while not self._trainer.ended.done() and not (outcome and outcome.error):
            concurrent.futures.wait([self._trainer.ended], timeout=_LOOK_EVERY_S)
            snapshot = self._look(view)
            stored = self._documents(snapshot)
            self._pass_on_stop_request(signals.stop_request or stored, snapshot)
            if snapshot.status == "starting":
                self._capacity.check()
            if self._lender is not None:
                self._lender.lend_if_due()
            self._trainer.remember_controller()
            outcome = ray.get(self._coordinator.outcome.remote())
        return self._conclude(view)

    def _look(self, view: View | None) -> Snapshot:
        snapshot: Snapshot = ray.get(self._coordinator.snapshot.remote(self._seen))
        self._seen = snapshot.cursor
        if snapshot.status == "running":
            self._feed.workers_started()
        self._tracking.update(snapshot)
        if view is not None:
            view(snapshot)
        return snapshot

    def _keep_documents(self, snapshot: Snapshot) -> StopRequest | None:
        """Write the status; return a stop request that lies in storage."""
        self._recorder.heartbeat(snapshot)
        return self._recorder.stop_request()

    def _pass_on_stop_request(self, request: StopRequest | None, snapshot: Snapshot) -> None:
        if request is not None and snapshot.stop_request is None:
            self._coordinator.request_stop.remote(request)
        known = request or snapshot.stop_request
        self._stop_reason = known.reason if known else self._stop_reason

    def _conclude(self, view: View | None) -> TrainResult:
        """Write the summary and the rest of the history, and say how the run ended."""
        self._documents.close()
        snapshot: Snapshot = ray.get(self._coordinator.snapshot.remote(self._seen))
        outcome = self._outcome(snapshot)
        result = self._recorder.result(outcome, snapshot, self._placement.num_workers)
        ray.get(self._coordinator.finish.remote(outcome.status, result))
        last = self._look(view)
        with suppress(*([StorageError] if outcome.error else [])):  # why the run failed matters more; it may be storage
            self._recorder.conclude(result, last)
        self._tracking.finish(result)
        self._recorder.log_events(self._look(view))  # what trackers said at the end
        if outcome.error:
            raise TrainingFailed(outcome.error, result.summary())
        return result

    def _outcome(self, snapshot: Snapshot) -> Outcome:
        """What the workers said, or why they could not say anything."""
        told: Outcome | None = ray.get(self._coordinator.outcome.remote())
        failure: str | None = ray.get(self._coordinator.failure.remote())  # that only the coordinator knows of
        if told is not None and told.error is None:
            return dataclasses.replace(told, status="failed", error=self._sentence(failure)) if failure else told
        reason = failure or (told and told.error) or self._trainer.failure() or "the workers ended without a word"
        return failed(self._sentence(reason), snapshot)

    def _sentence(self, reason: str) -> str:
        return failure_sentence(self._prepared.name, self._spec.config.storage, reason)

    def _worker_spec(self) -> WorkerSpec:
        store = self._store.with_lent_credentials(self._credentials)
        return WorkerSpec(
            run=dataclasses.replace(self._spec, store=store),
            train=self._feed.train,
            test=self._feed.test,
            weights=self._weights,
            train_origin=self._feed.origin,
            test_cached=self._feed.test_cached,
            threads=self._placement.threads,
            coordinator=self._coordinator,
        )
