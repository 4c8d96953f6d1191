"""The process of one trial, as Ray Tune starts it: a run of one worker that keeps its own monitor and documents."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
import torch
from ray import tune
from ray.exceptions import RayActorError

from raytrain.backends.local_reporter import LocalReporter
from raytrain.backends.ray.block_cache import RemoteBlocks
from raytrain.backends.ray.coordinator import CoordinatorHandle
from raytrain.backends.ray.ingest import ImageSet
from raytrain.backends.ray.trials.sweep_coordinator import SweepCoordinatorHandle
from raytrain.backends.run_watcher import RunWatcher
from raytrain.data.block_order import CacheOrder
from raytrain.data.blocks import CachedBlocks
from raytrain.data.dataset import write_manifests
from raytrain.data.local_batch import LocalBatch, batches_from_cache
from raytrain.data.partition import Partition
from raytrain.errors import OwnerChanged, RaytrainError, StorageError
from raytrain.runs.claim import claim_run
from raytrain.runs.history import History
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.monitor import RunMonitor
from raytrain.runs.outcome import Outcome, StopReason
from raytrain.runs.recorder import RunRecorder, failed
from raytrain.runs.snapshot import Snapshot
from raytrain.runs.trackers.tracking import Tracking
from raytrain.runs.trial_status import TrialStatus
from raytrain.training.run_spec import RunSpec


@dataclass(frozen=True)
class TrialSpec:
    """Everything that the process of a trial is given. It holds no secret."""

    number: int
    run: RunSpec
    first_step: int
    train: ImageSet
    test: ImageSet
    train_order: CacheOrder  # in which the training images are kept, the same for all trials
    test_order: CacheOrder
    weights: Any  # ObjectRef of the initial weights; None if the seed or a checkpoint decides
    threads: int
    folder: str | None  # as for workers of a run
    coordinator: SweepCoordinatorHandle


def train_trial(config: dict[str, Any], specs: dict[int, TrialSpec]) -> None:
    """Train one trial until it finishes, fails, or stops by itself. Ray Tune calls this in the trial's process."""
    spec = specs[config["trial"]]
    if ray.get(spec.coordinator.wait_for_stop_request.remote(0.0)) is None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        torch.set_num_threads(spec.threads)
        if spec.folder is not None:
            os.chdir(spec.folder)
        with claim_run(spec.run.store, spec.run.config.name) as claim:
            _Trial(replace(spec, run=replace(spec.run, store=claim.owned_store))).train()


class _Trial:
    """The run of a trial, from its first document to its last."""

    def __init__(self, spec: TrialSpec) -> None:
        run = spec.run
        self._spec = spec
        history = History(run.store)
        self._monitor = RunMonitor(run.config.name, run.plan.num_steps, run.plan.steps_per_epoch, history)
        recorder = RunRecorder(run.store, run.plan.num_steps, spec.first_step)
        self._reporter = TrialReporter(spec, self._monitor, recorder)

    def train(self) -> None:
        """Train, and write how the run ended. A trial that fails ends alone, so nothing is raised."""
        try:
            outcome = self._train()
        except Exception as error:
            outcome = failed(_reason(error), self._monitor.snapshot())
        with suppress(StorageError, OwnerChanged):  # the history has an event of it
            self._conclude(outcome)
        status = _trial_status(self._monitor, outcome.status, outcome.error)
        ray.get(self._spec.coordinator.report_status.remote(self._spec.number, status))

    def _train(self) -> Outcome:
        spec, run = self._spec, self._spec.run
        write_manifests(run.store, ray.get(spec.train.manifest), ray.get(spec.test.manifest))
        self._reporter.watcher.begin(run.config, run.store)
        device = torch.device("cuda", 0) if run.config.device_type == "cuda" else torch.device("cpu")
        weights: Any = None if spec.weights is None else ray.get(spec.weights)
        with self._reporter:
            outcome = run.train(run.make_run(SharedBatches(spec), self._reporter, device, weights))
        failure = self._monitor.failure or outcome.error
        return failed(failure, self._monitor.snapshot()) if failure else outcome

    def _conclude(self, outcome: Outcome) -> None:
        """Write the summary, the skipped images and the last status."""
        self._monitor.skip(ray.get(self._spec.coordinator.skipped_images.remote()))
        self._reporter.watcher.conclude(outcome, num_workers=1)


class TrialReporter(LocalReporter):
    """A reporter that also tells the sweep how the trial stands, and learns from it when the trial should stop."""

    def __init__(self, spec: TrialSpec, monitor: RunMonitor, recorder: RunRecorder) -> None:
        super().__init__(monitor, RunWatcher(monitor, recorder, Tracking(()), self._exchange))
        self._number = spec.number
        self._coordinator = spec.coordinator

    def record(self, row: MetricRow) -> None:
        """Add a row of metrics. Evaluations go to Ray Tune first, which may decide that the trial should stop early."""
        super().record(row)
        if row.kind == "evaluation" and row.accuracy is not None:
            # It returns once Ray Tune has compared this trial with the others, so that its decision counts at once.
            tune.report({"epoch": row.epoch, "accuracy": row.accuracy})
            self._take_stop_request()

    def _exchange(self, snapshot: Snapshot) -> None:
        """Called about twice a second, in a thread."""
        with suppress(RayActorError):  # the driver notices, and ends the sweep
            status = _trial_status(self.monitor, "running")
            self._coordinator.report_status.remote(self._number, status)
            self._take_stop_request()

    def _take_stop_request(self) -> None:
        request: StopReason | None = ray.get(self._coordinator.trial_stop_request.remote(self._number))
        if request is not None:
            self.monitor.request_stop(request)


class SharedBatches:
    """A :class:`raytrain.training.protocols.BatchSource`: from the images in the object store that all trials share."""

    def __init__(self, spec: TrialSpec) -> None:
        run = spec.run
        self._train = Partition(run.plan, 0, (1.0,))
        self._test = Partition(run.test_plan, 0, (1.0,))
        self._train_blocks = _blocks(spec, "train", spec.train, spec.train_order)
        self._test_blocks = _blocks(spec, "test", spec.test, spec.test_order)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """The trial's batches from ``first_step`` on."""
        return batches_from_cache(self._train, self._train_blocks, first_step)

    def test(self) -> Iterator[LocalBatch]:
        """All test images."""
        return batches_from_cache(self._test, self._test_blocks, 0)


def _blocks(spec: TrialSpec, dataset: str, images: ImageSet, order: CacheOrder) -> CachedBlocks:
    return CachedBlocks(RemoteBlocks(cast(CoordinatorHandle, spec.coordinator), dataset, images.shape), order)


def _trial_status(monitor: RunMonitor, status: str, error: str | None = None) -> TrialStatus:
    snapshot = monitor.snapshot()
    latest, request = snapshot.latest, snapshot.stop_request
    accuracies = [row.accuracy for row in snapshot.rows if row.kind == "evaluation" and row.accuracy is not None]
    return TrialStatus(
        status=status,
        step=snapshot.step,
        num_steps=snapshot.num_steps,
        epoch=snapshot.epoch,
        num_epochs=snapshot.num_epochs,
        loss=latest and latest.loss,
        accuracy=max(accuracies, default=None),
        num_evaluations=len(accuracies),
        images_per_s=latest and latest.images_per_s,
        reason=None if status == "finished" else error or request,
    )


def _reason(error: Exception) -> str:
    """One line that says what went wrong."""
    if isinstance(error, RaytrainError):
        return str(error).rstrip(".")
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
