"""The driver's side of a sweep: its actor, the images that its trials share in the object store, and Ray Tune, which starts them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from raytrain.backends.ray.capacity import CapacityCheck
from raytrain.backends.ray.cluster import Hardware, Placement, hardware, place
from raytrain.backends.ray.coordinator import CredentialLender, start_coordinator, with_cluster_credentials
from raytrain.backends.ray.data_feed import DataFeed
from raytrain.backends.ray.failures import root_cause
from raytrain.backends.ray.ingest import ImageSet
from raytrain.backends.ray.pickle_by_value import pickle_by_value
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train import PreparedRun
from raytrain.config import TrainConfig
from raytrain.errors import StorageError, TrainingFailed, UsageError
from raytrain.experiments.sweep.coordinator import SweepCoordinator
from raytrain.experiments.sweep.results import SweepResult, collect, collect_one
from raytrain.experiments.sweep.sweep import SweepView
from raytrain.experiments.sweep.trial_process import TrialSpec
from raytrain.experiments.sweep.trials import Sweep, is_over, trials_of, write_sweep
from raytrain.experiments.sweep.tuner import EarlyStopping, Tuning
from raytrain.runs import records
from raytrain.runs.bad_images import BadImageLimit
from raytrain.runs.layout import SUMMARY
from raytrain.runs.throttle import Throttle
from raytrain.runs.trial_status import TrialStatus
from raytrain.storage.base import Store
from raytrain.storage.tempdir import TemporaryFolder
from raytrain.training import transfer

_LOOK_EVERY_S = 0.5
_LOOK_IN_STORAGE_EVERY_S = 1.0
_CACHE_FRACTION = 0.8  # of the smallest node's object store


class SweepSession:
    """A sweep that goes on while the session is open; at its end nothing of it is left in the cluster."""

    def __init__(self, prepared: PreparedRun, sweep: Sweep, loop: Callable[..., None] | None, early_stopping: bool, begun: float) -> None:
        pickle_by_value(loop)
        self._name, self._store, self._data = prepared.name, prepared.store, prepared.data
        self._config = prepared.config
        self._sweep = sweep
        self._loop = loop
        self._early_stopping = early_stopping
        self._begun = begun
        config, self._placement = _placed(prepared.config, hardware(), len(sweep.points))
        self._trials = trials_of(sweep, config, prepared.name)
        self._cache_plan = self._data.plan(self._trials[0].config)
        self._reading = self._read()
        stores = [records.run_store(config.storage, trial.name) for trial in self._trials]
        self._open = [(number, store) for number, store in enumerate(stores) if not is_over(store)]
        self._first_steps = {number: records.newest_step(store) for number, store in self._open}
        self._weights = self._initial_weights()
        self._ended: Future[None] = Future()
        self._scratch = TemporaryFolder()  # Ray Tune's own notes; the trials are in the sweep's storage
        self._throttle = Throttle()

    def __enter__(self) -> SweepSession:
        """Write down what the sweep is; start its actor, the reading of its data, and the first trials."""
        self._room = CapacityCheck(self._placement, self._placement.num_workers)
        self._coordinator = start_coordinator(self._name, SweepCoordinator)
        self._lender = CredentialLender(self._coordinator)
        limit = BadImageLimit.of(self._config, len(self._data.train) + len(self._data.test))
        self._coordinator.begin.remote(self._name, 1, 1, self._store.url, self._store.settings, limit)
        self._write_down()
        train, test = self._reading.image_sets(self._coordinator)
        self._reading.begin(self._placement)
        self._reading.go_on()
        self._tuning = Tuning(self._coordinator, self._placement, str(self._scratch.path), self._config.max_failures, self._scheduler())
        tasks = [self._task(number, store, train, test) for number, store in self._open]
        threading.Thread(target=self._tune, args=(tasks,), daemon=True, name="tune").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._reading.close()
        if not self._ended.done():
            with suppress(StorageError):  # the reason why the session ends is worth more
                self._write_status("failed" if exception[0] is not KeyboardInterrupt else "interrupted", {})
        ray.kill(self._coordinator)
        self._scratch.remove()

    def watch(self, signals: StopSignals, view: SweepView | None) -> SweepResult:
        """See the sweep to its end: show it, carry stop requests to it, keep its status in storage.

        Raises TrainingFailed where the images cannot be used, or the process has died that the trials share.
        """
        try:
            return self._watch(signals, view)
        except RayActorError:
            raise TrainingFailed(self._sentence("the process that its trials share has died")) from None

    def _watch(self, signals: StopSignals, view: SweepView | None) -> SweepResult:
        while not self._ended.done():
            concurrent.futures.wait([self._ended], timeout=_LOOK_EVERY_S)
            standings = self._look(view)
            with suppress(StorageError):  # it may be back in a moment
                self._carry_stop(signals)
                if self._throttle.due("status", records.HEARTBEAT_EVERY_S):
                    self._write_status("running", standings)
            if not standings:
                self._room.check()
            self._lender.lend_if_due()
        return self._conclude(view)

    # Starting.

    def _read(self) -> DataFeed:
        """The images that all trials share, in an order that is no trial's own; UsageError where there is no room for them."""
        needed = (len(self._data.train) + len(self._data.test)) * self._data.shape.num_bytes
        there = hardware().object_store_bytes
        if needed > _CACHE_FRACTION * there:
            raise UsageError(
                f"The decoded images take {needed / 1e9:.1f} GB, and a node's object store has {there / 1e9:.1f} GB, of which the trials "
                f"of a sweep share {_CACHE_FRACTION:.0%}: use fewer or smaller images, or a cluster whose nodes have more memory."
            )
        config = dataclasses.replace(self._trials[0].config, cache="memory")
        return DataFeed(config, self._data, self._cache_plan, self._data.test_plan(1), 0, there)

    def _initial_weights(self) -> dict[int, Any]:
        """Where in the object store each trial finds what it begins with; the networks are made here only to be refused if need be."""
        classes = self._data.train.classes
        there: dict[tuple[Any, ...], Any] = {}
        found: dict[int, Any] = {}
        for number, _ in self._open:
            config = self._trials[number].config
            key = (config.model, config.weights, self._first_steps[number] > 0)
            if key not in there:
                weights = transfer.initial_weights(config, classes, self._first_steps[number])
                model = transfer.initial_model(config, len(classes), weights)
                if self._loop is None:  # a loop of the user's may train another network
                    transfer.freeze(model, config.freeze)
                    transfer.parameter_groups(model, len(classes), 0.0, config.head_learning_rate_factor)
                there[key] = None if weights is None else ray.put(weights)
            found[number] = there[key]
        return found

    def _scheduler(self) -> TrialScheduler:
        """What judges the trials: those that were over before are remembered, and shown."""
        numbers = {number for number, _ in self._open}
        before = {number: collect_one(trial) for number, trial in enumerate(self._trials) if number not in numbers}
        for number, result in before.items():
            self._coordinator.tell.remote(
                number, TrialStatus(status=result.status, step=result.steps, accuracy=result.accuracy, reason=result.reason)
            )
        if not self._early_stopping:
            return FIFOScheduler()
        plans = [self._data.plan(trial.config) for trial in self._trials]
        scheduler = EarlyStopping(self._coordinator, max(-(-plan.num_steps // plan.steps_per_epoch) for plan in plans))
        for result in before.values():
            scheduler.remember(result.name, result.evaluations)
        return scheduler

    def _task(self, number: int, store: Store, train: ImageSet, test: ImageSet) -> TrialSpec:
        config = self._trials[number].config
        return TrialSpec(
            number=number,
            config=config,
            loop=self._loop,
            classes=self._data.train.classes,
            digest=self._data.train.digest,
            mean=self._data.mean,
            std=self._data.std,
            store=with_cluster_credentials(store, self._coordinator),
            train=train,
            test=test,
            plan=self._data.plan(config),
            test_plan=self._data.test_plan(1),
            cache_plan=self._cache_plan,
            weights=self._weights[number],
            threads=self._placement.threads,
            coordinator=self._coordinator,
        )

    def _tune(self, tasks: Sequence[TrialSpec]) -> None:
        try:
            if tasks:
                self._tuning.run(tasks)
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)

    def _write_down(self) -> None:
        self._data.write(self._store)
        write_sweep(self._store, self._sweep)
        records.clear_stop_request(self._store)
        self._write_status("starting", {})
        records.write_config(self._store, self._config)  # the last: by it others know that the sweep is there

    # Watching.

    def _look(self, view: SweepView | None) -> dict[int, TrialStatus]:
        standings: dict[int, TrialStatus] = ray.get(self._coordinator.standings.remote())
        if view is not None:
            view(self._trials, {self._trials[number].name: standing for number, standing in standings.items()})
        return standings

    def _carry_stop(self, signals: StopSignals) -> None:
        reason = signals.reason
        if reason is None and self._throttle.due("stop", _LOOK_IN_STORAGE_EVERY_S):
            reason = records.stop_requested(self._store)
        if reason is None:  # asked for through the cluster, or the images cannot be used
            reason = ray.get(self._coordinator.wait_for_stop.remote(0.0))
        if reason is not None:
            self._coordinator.request_stop.remote(reason)
            self._tuning.start_no_more()

    def _write_status(self, status: str, standings: dict[int, TrialStatus]) -> None:
        steps = [standing.step for standing in standings.values()]
        plans = [self._data.plan(trial.config).num_steps for trial in self._trials]
        num_running = sum(standing.status == "running" for standing in standings.values())
        records.write_status(self._store, records.RunStatus(status=status, step=sum(steps), num_steps=sum(plans), num_workers=num_running))

    # Ending.

    def _conclude(self, view: SweepView | None) -> SweepResult:
        """Write the summary, and say how it ended."""
        standings = self._look(view)
        self._note_deaths(standings)
        unusable: str | None = ray.get(self._coordinator.unusable.remote())
        result = self._result(failed=unusable is not None)
        ray.get(self._coordinator.finish.remote(result.status, {}))
        records.write_json(self._store, SUMMARY, result.summary())
        self._write_status(result.status, standings)
        raised = self._ended.exception()
        if raised is not None or unusable is not None:
            reason = unusable or root_cause(raised or RuntimeError())
            raise TrainingFailed(self._sentence(reason), result.summary())
        return result

    def _sentence(self, reason: str) -> str:
        return f"Sweep {self._name!r} failed: {reason.rstrip('.')}. Go on with it with --resume."

    def _note_deaths(self, standings: dict[int, TrialStatus]) -> None:
        """Leave a summary of the trials that could not leave one themselves: their processes died for good."""
        for number, store in self._open:
            standing, status = standings.get(number), records.read_status(store)
            if standing is not None and standing.status == "failed" and status.status not in ("finished", "stopped", "failed"):
                step = records.newest_step(store)
                records.write_json(
                    store, SUMMARY, {"name": self._trials[number].name, "status": "failed", "steps": step, "error": standing.reason}
                )
                records.write_status(store, dataclasses.replace(status, status="failed"))

    def _result(self, failed: bool) -> SweepResult:
        trials = collect(self._trials)
        stop_reason: str | None = ray.get(self._coordinator.wait_for_stop.remote(0.0))
        stopped = stop_reason is not None and not all(is_over(store) for _, store in self._open)
        failed = failed or self._ended.exception() is not None or all(trial.status == "failed" for trial in trials)
        return SweepResult(
            name=self._name,
            status="failed" if failed else "stopped" if stopped else "finished",
            best=next((trial.name for trial in trials if trial.accuracy is not None), None),
            trials=trials,
            run_dir=self._store.url,
            seconds=round(time.monotonic() - self._begun, 2),
            stop_reason=stop_reason if stopped else None,
        )


def _placed(config: TrainConfig, found: Hardware, num_trials: int) -> tuple[TrainConfig, Placement]:
    """The options with their device settled, and how the trials are laid over the cluster: as many workers as train at once."""
    placement = place(config, found)
    if placement.num_workers > num_trials:
        placement = place(dataclasses.replace(config, workers=num_trials), found)
    return dataclasses.replace(config, device=placement.device), placement
