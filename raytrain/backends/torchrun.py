"""Training without Ray, in the processes of ``torchrun --nproc-per-node 2 -m raytrain train cifar10 --name first …``.

Every process reads the images that it needs and keeps them in its memory. The first one keeps the run's documents, so
that the run is listed, shown, stopped and resumed like any other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.backends.gpus import visible_gpus
from raytrain.backends.local_reporter import LocalReporter
from raytrain.backends.memory_batches import MemoryBatches
from raytrain.backends.prepare import Loop, PreparedRun, load_initial_weights, prepare, run_spec
from raytrain.backends.stop_signals import StopSignals
from raytrain.config import TrainConfig
from raytrain.errors import RaytrainError, TrainingFailed, UsageError
from raytrain.runs.history import History
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.monitor import RunMonitor
from raytrain.runs.outcome import Outcome, TrainResult, failure_sentence
from raytrain.runs.recorder import RunRecorder, failed
from raytrain.runs.skipped_images import SkippedImage
from raytrain.runs.snapshot import START, View
from raytrain.trackers.tracking import Tracking
from raytrain.training.run_spec import RunSpec


def train(
    config: TrainConfig,
    loop: Loop | None,
    view: View | None,
    signals: StopSignals,
    tracking: Tracking,
    started_at: float,
) -> TrainResult:
    """Train in this process, as one of those that torchrun started. Every process returns the result.

    Raises UsageError, StorageError and TrainingFailed, like :func:`raytrain.train`.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not config.name:
        raise UsageError("--name is missing; the processes of torchrun have no other way to agree on one.")
    if config.scope_keys:
        raise UsageError("--scope-keys limits what a Ray cluster is lent; under torchrun, leave it out.")
    if config.gpus:
        os.environ.update(visible_gpus(config.gpus))
    device = _device(config)
    with prepare(config, owns_run=rank == 0) as prepared, signals:
        if world_size > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        resolved = prepared.resolve(world_size, device.type)
        spec = run_spec(resolved, prepared.data, prepared.store, loop, world_size)
        weights = load_initial_weights(spec, prepared.first_step)  # before the run is known: they may not fit
        process = (_FirstProcess if rank == 0 else _Process)(prepared, spec, signals, view, tracking, started_at)
        outcome = process.train(device, rank, world_size, weights)
        return _shared(process.conclude(outcome, _gathered(process.skipped, world_size)), world_size)


class _Process:
    """One process of torchrun: it listens for stop requests, and remembers the images that it cannot use."""

    def __init__(
        self,
        prepared: PreparedRun,
        spec: RunSpec,
        signals: StopSignals,
        view: View | None,
        tracking: Tracking,
        started_at: float,
    ) -> None:
        self.skipped: dict[str, SkippedImage] = {}
        self._failure: str | None = None
        self._prepared = prepared
        self._spec = spec
        self._signals = signals
        self._limit = prepared.skip_limit()

    def train(self, device: torch.device, rank: int, world_size: int, weights: Mapping[str, Tensor] | None) -> Outcome:
        """See the training to its end."""
        prepared, spec = self._prepared, self._spec
        loads = spec.config.worker_load or (1.0,) * world_size
        source = MemoryBatches(
            prepared.data,
            spec.plan,
            rank,
            loads,
            self.skip,
            isolated=prepared.config.resume,  # an image may have ended the run before
        )
        run = spec.make_run(source, self, device, weights)
        return spec.train(run)

    def conclude(self, outcome: Outcome, skipped: list[SkippedImage]) -> TrainResult | None:
        """Nothing: the first process writes how the run ended."""

    def skip(self, images: list[SkippedImage]) -> None:
        """Note images that cannot be used."""
        self.skipped |= {image.key: image for image in images}
        self._failure = self._limit.exceeded(list(self.skipped.values()))

    def started(self, num_workers: int, step: int) -> None: ...
    def record(self, row: MetricRow) -> None: ...
    def event(self, text: str) -> None: ...
    def flush(self) -> None: ...

    def stop_requested(self) -> bool:
        """Whether the run should stop, as far as this process knows."""
        return self._failure is not None or self._signals.stop_request is not None

    def checkpoint_requested(self) -> bool:
        """Never: there are only the checkpoints that the options ask for."""
        return False


class _FirstProcess(_Process):
    """The first process, which keeps the run's monitor and documents."""

    def __init__(
        self,
        prepared: PreparedRun,
        spec: RunSpec,
        signals: StopSignals,
        view: View | None,
        tracking: Tracking,
        started_at: float,
    ) -> None:
        super().__init__(prepared, spec, signals, view, tracking, started_at)
        plan = spec.plan
        history = History(prepared.store)
        self._monitor = RunMonitor(prepared.name, plan.num_steps, plan.steps_per_epoch, history, skip_limit=self._limit)
        self._recorder = RunRecorder(prepared.store, plan.num_steps, prepared.first_step, started_at)
        self._reporter = LocalReporter(self._monitor, self._recorder, self._look)
        self._view = view
        self._tracking = tracking
        self._seen = START

    def train(self, device: torch.device, rank: int, world_size: int, weights: Mapping[str, Tensor] | None) -> Outcome:
        self._prepared.data.write(self._prepared.store)
        self._recorder.begin(self._spec.config)
        self._tracking.begin(self._spec.config, self._prepared.store, self._monitor.event)
        try:
            with self._reporter:
                return super().train(device, rank, world_size, weights)
        except BaseException as error:
            self._tracking.abort()
            with suppress(RaytrainError):  # the reason why the run ends matters more
                self._recorder.write_status("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise

    def conclude(self, outcome: Outcome, skipped: list[SkippedImage]) -> TrainResult:
        """Write how the run ended."""
        self._monitor.skip(skipped)
        if reason := self._monitor.failure or outcome.error:
            error = failure_sentence(self._prepared.name, self._spec.config.storage, reason)
            outcome = failed(error, self._monitor.snapshot())
        if self._signals.stop_request is not None:
            self._monitor.request_stop(self._signals.stop_request)
        result = self._recorder.result(outcome, self._monitor.snapshot(), int(os.environ["WORLD_SIZE"]))
        self._monitor.finish(outcome.status, result)
        self._look()
        self._recorder.conclude(result, self._monitor.snapshot())
        self._tracking.finish(result)
        self._look()  # shows what trackers said at the end
        self._recorder.log_events(self._monitor.snapshot())
        return result

    def started(self, num_workers: int, step: int) -> None:
        self._reporter.started(num_workers, step)

    def record(self, row: MetricRow) -> None:
        self._reporter.record(row)

    def event(self, text: str) -> None:
        self._reporter.event(text)

    def flush(self) -> None:
        self._reporter.flush()

    def skip(self, images: list[SkippedImage]) -> None:
        super().skip(images)
        self._monitor.skip(images)

    def stop_requested(self) -> bool:
        return self._reporter.stop_requested() or super().stop_requested()

    def _look(self) -> None:
        snapshot = self._monitor.snapshot(self._seen)
        self._seen = snapshot.cursor
        self._tracking.update(snapshot)
        if self._view is not None:
            self._view(snapshot)


def _gathered(skipped: dict[str, SkippedImage], world_size: int) -> list[SkippedImage]:
    """The images that any process could not use."""
    lists: list[Any] = [list(skipped.values())] * world_size
    if world_size > 1:
        dist.all_gather_object(lists, lists[0])
    return [image for one in lists for image in one]


def _shared(result: TrainResult | None, world_size: int) -> TrainResult:
    """The first process's result, on every process; raises TrainingFailed on all of them if the run failed."""
    results: list[Any] = [result]
    if world_size > 1:
        dist.broadcast_object_list(results, src=0)
        dist.destroy_process_group()
    shared: TrainResult = results[0]
    if shared.error is not None:
        raise TrainingFailed(shared.error, shared.summary())
    return shared


def _device(config: TrainConfig) -> torch.device:
    if config.device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(config.threads_per_worker or 1)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
