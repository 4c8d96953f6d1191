"""A sweep on a Ray cluster, as the driver sees it: starts its coordinator, its data feed and Ray Tune."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, cast

import ray
from ray.exceptions import RayActorError

from raytrain.backends.fastest_precision import fastest_precision
from raytrain.backends.placement import Hardware, Placement, place
from raytrain.backends.prepare import Loop, PreparedRun, load_initial_weights, run_spec
from raytrain.backends.ray.capacity_check import CapacityCheck
from raytrain.backends.ray.coordinator import RunInStorage, start_coordinator, stop_coordinator
from raytrain.backends.ray.credential_server import lend_credentials
from raytrain.backends.ray.data_feed import DataFeed
from raytrain.backends.ray.hardware import cluster_hardware, fastest_on_nodes
from raytrain.backends.ray.pickle_by_value import pickle_by_value
from raytrain.backends.ray.shared_folder import check_shared
from raytrain.backends.ray.trials.early_stopping import EarlyStopping
from raytrain.backends.ray.trials.sweep_coordinator import SweepCoordinator, SweepCoordinatorHandle, SweepState
from raytrain.backends.ray.trials.trial_process import TrialSpec
from raytrain.backends.ray.trials.tuner import TunerThread
from raytrain.config import TrainConfig
from raytrain.data.dataset import Dataset
from raytrain.errors import CoordinatorLost, UsageError
from raytrain.runs.outcome import StopReason
from raytrain.runs.snapshot import Status
from raytrain.storage.tempdir import TemporaryFolder

_CACHE_FRACTION = 0.8  # of the smallest node's object store


class SweepSession:
    """A sweep that trains while the session is open. When it closes, nothing of the sweep is left in the cluster.

    Args:
        prepared: the sweep, whose images all trials share.
        trials: all trials, as runs of their own. They are numbered in this order.
        over: the numbers of the trials that are over. The others are compared with them, by their evaluations: each of
            these is an epoch and an accuracy on the test images.
        loop: the training loop; None for the built-in one.
        early_stopping: whether trials that are worse than the others are asked to stop.
        own_cluster: whether nobody else uses the cluster, which is this machine.

    Raises UsageError if the cluster has too little for the sweep.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        trials: Sequence[PreparedRun],
        over: Mapping[int, Sequence[tuple[int, float]]],
        loop: Loop | None,
        *,
        early_stopping: bool,
        own_cluster: bool,
    ) -> None:
        found = cluster_hardware()
        check_shared(prepared.store, prepared.config.storage, found.num_nodes)
        _check_kept(prepared.config, prepared.data, found)
        pickle_by_value(loop)
        self._prepared = prepared
        self._trials = trials
        self._over = over
        self._early_stopping = early_stopping
        self._own_cluster = own_cluster
        self._placement = _place(prepared.config, found, len(trials))
        device = self._placement.device
        fastest = cache(fastest_precision if own_cluster else fastest_on_nodes)
        self._specs = [
            run_spec(trial.resolve(1, device, fastest), trial.data, trial.store, loop, 1) for trial in trials
        ]
        pickle_by_value(self._specs[0].transforms)
        self._weights = self._put_initial_weights()
        shared = self._specs[0]  # its order is the one in which the images are kept in memory
        self._feed = DataFeed(
            dataclasses.replace(shared.config, cache="memory"),
            prepared.data,
            shared.plan,
            shared.test_plan,
            0,
            found.object_store_bytes,
        )

    @property
    def num_steps(self) -> int:
        """Steps of all trials together."""
        return sum(spec.plan.num_steps for spec in self._specs)

    def __enter__(self) -> SweepSession:
        """Start the coordinator, the reading of the images, and the first trials."""
        with ExitStack() as opened:
            self._capacity = CapacityCheck(self._placement, self._placement.num_workers)
            steps_per_epoch = self._specs[0].plan.steps_per_epoch
            in_storage = RunInStorage.of(self._prepared, self.num_steps, steps_per_epoch)
            coordinator = start_coordinator(in_storage, self._placement.num_workers, SweepCoordinator)
            self._coordinator = cast(SweepCoordinatorHandle, coordinator)  # handles of actors are invariant
            opened.callback(stop_coordinator, coordinator)
            data, stores = self._prepared.data, [spec.store for spec in self._specs]
            scope = self._prepared.scope(*(f"{self._prepared.store.url}{end}" for end in "/-"))  # NAME and NAME-00
            credentials, self._lender = lend_credentials(
                coordinator, [data.train_store, data.test_store, *stores], scope
            )
            self._stores = [store.with_lent_credentials(credentials) for store in stores]
            self._feed.connect(coordinator, credentials)
            self._feed.start(self._placement)
            opened.callback(self._feed.close)
            self._feed.workers_started()  # trials start at different times, so the whole cache is filled at once
            folder = opened.enter_context(TemporaryFolder())  # Ray Tune's own notes; the trials' are in their storage
            self._tuner = TunerThread(
                {number: self._trial_spec(number) for number in self._unfinished},
                self._coordinator,
                self._placement,
                str(folder),
                self._scheduler(),
                max_failures=self._prepared.config.max_failures,
            )
            self._tuner.start()
            opened.callback(self._tuner.abort)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all trials have ended, at most ``timeout_s`` seconds; whether they have."""
        concurrent.futures.wait([self._tuner.ended], timeout=timeout_s)
        return self._tuner.ended.done()

    def state(self) -> SweepState:
        """How the sweep stands. To be called every second or so, as this also keeps the sweep alive.

        Raises :class:`CoordinatorLost` if the coordinator has died, and UsageError if there is no room for any trial.
        """
        try:
            state: SweepState = ray.get(self._coordinator.state.remote())
            if self._lender is not None:
                self._lender.lend_if_due()
        except RayActorError:
            raise self._coordinator_lost() from None
        if not state.statuses:
            self._capacity.check()
        if state.stop_request is not None:
            self._tuner.start_no_more_trials()
        return state

    def request_stop(self, request: StopReason) -> None:
        """Ask all trials to stop with a checkpoint, and start no others."""
        self._coordinator.request_stop.remote(request)
        self._tuner.start_no_more_trials()

    def finish(self, status: Status) -> None:
        """End the sweep's monitor: the list of skipped images is in storage when this returns."""
        try:
            ray.get(self._coordinator.finish.remote(status, None))
        except RayActorError:
            raise self._coordinator_lost() from None

    def failure(self) -> str | None:
        """Why Ray Tune gave up; None if it has not ended, or ended normally."""
        return self._tuner.failure()

    @property
    def _unfinished(self) -> list[int]:
        """The numbers of the trials that are not over."""
        return [number for number in range(len(self._trials)) if number not in self._over]

    def _put_initial_weights(self) -> dict[int, Any]:
        """ObjectRefs of the initial weights of each trial; a file of weights is read once for all trials."""
        put: dict[tuple[str, str | None, bool], Any] = {}
        refs: dict[int, Any] = {}
        for number in self._unfinished:
            spec, first_step = self._specs[number], self._trials[number].first_step
            key = (spec.config.model, spec.config.weights, first_step > 0)
            if key not in put:
                weights = load_initial_weights(spec, first_step)
                put[key] = None if weights is None else ray.put(weights)
            refs[number] = put[key]
        return refs

    def _trial_spec(self, number: int) -> TrialSpec:
        spec = self._specs[number]
        return TrialSpec(
            number=number,
            run=dataclasses.replace(spec, store=self._stores[number]),
            first_step=self._trials[number].first_step,
            train=self._feed.train,
            test=self._feed.test,
            train_order=self._feed.orders["train"],
            test_order=self._feed.orders["test"],
            weights=self._weights[number],
            threads=self._placement.threads,
            folder=os.getcwd() if self._own_cluster else None,
            coordinator=self._coordinator,
        )

    def _scheduler(self) -> EarlyStopping | None:
        if not self._early_stopping:
            return None
        num_epochs = max(-(-spec.plan.num_steps // spec.plan.steps_per_epoch) for spec in self._specs)
        scheduler = EarlyStopping(num_epochs, partial(_request_early_stop, self._coordinator))
        for number, evaluations in self._over.items():
            scheduler.add_finished(self._trials[number].name, evaluations)
        return scheduler

    def _coordinator_lost(self) -> CoordinatorLost:
        name, storage = self._prepared.name, self._prepared.config.storage
        sentence = (
            f"Sweep {name!r} failed: the process that coordinates its trials has died. Resume it with --name {name} "
            f"--storage {storage} --resume."
        )
        return CoordinatorLost(sentence, name, self._prepared.store.url, None)


def _request_early_stop(coordinator: SweepCoordinatorHandle, trial: int, request: StopReason) -> None:
    ray.get(coordinator.request_early_stop.remote(trial, request))


def _place(config: TrainConfig, found: Hardware, num_trials: int) -> Placement:
    """How the trials are laid out over the cluster, with a worker for each that trains at the same time."""
    placement = place(config, found)
    if placement.num_workers <= num_trials:
        return placement
    return place(dataclasses.replace(config, workers=num_trials), found)


def _check_kept(config: TrainConfig, data: Dataset, found: Hardware) -> None:
    """Raise UsageError if decoded images cannot be kept, or do not fit into the object store."""
    if config.crops_originals:
        raise UsageError(
            "The trials of a sweep share decoded images, and --random-resized-crop reads the originals in every epoch; "
            "add --cache-side 1.15."
        )
    needed = sum(data.num_bytes)
    available = found.object_store_bytes
    if needed > _CACHE_FRACTION * available:
        raise UsageError(
            f"The decoded images take {needed / 1e9:.1f} GB, and a node's object store has {available / 1e9:.1f} GB, "
            f"of which the trials of a sweep share {_CACHE_FRACTION:.0%}: use fewer or smaller images, or a cluster "
            "whose nodes have more memory."
        )
