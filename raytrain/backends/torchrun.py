"""Training without Ray, in the processes of ``torchrun --nproc-per-node 2 -m raytrain train cifar10 --name first …``.

The processes of a machine share the images that they decode. The first process keeps the run's documents, so that the
run is listed, shown, stopped and resumed like any other.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist

from raytrain.backends.gpus import visible_gpus
from raytrain.backends.image_cache import ImageCache, image_cache
from raytrain.backends.local_reporter import LocalReporter
from raytrain.backends.prepare import Loop, PreparedRun, prepare
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.worker_process import collective_backend, train_worker, worker_device
from raytrain.backends.worker_task import WorkerTask
from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.errors import RaytrainError, TrainingFailed, UsageError
from raytrain.runs.history import History
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.monitor import RunMonitor
from raytrain.runs.outcome import Outcome, TrainResult, failure_sentence
from raytrain.runs.recorder import RunRecorder, failed
from raytrain.runs.skipped_images import SkippedImage
from raytrain.runs.snapshot import START, View
from raytrain.trackers.tracking import Tracking


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
    device = worker_device(config)
    with prepare(config, owns_run=rank == 0) as prepared, signals, ExitStack() as opened:
        if world_size > 1:
            dist.init_process_group(collective_backend(device))
        resolved = prepared.resolve(world_size, device.type)
        cache = _shared_cache(prepared, resolved, opened, world_size)
        task = WorkerTask(resolved, prepared.data, prepared.store, prepared.first_step, cache)
        process = (_FirstProcess if rank == 0 else _Process)(prepared, task, signals, view, tracking, started_at)
        outcome = process.train(loop, device)
        return _shared(process.conclude(outcome, _gathered(process.skipped, world_size)), world_size)


class _Process:
    """One process of torchrun: it listens for stop requests, and remembers the images that it cannot use."""

    def __init__(
        self,
        prepared: PreparedRun,
        task: WorkerTask,
        signals: StopSignals,
        view: View | None,
        tracking: Tracking,
        started_at: float,
    ) -> None:
        self.skipped: dict[str, SkippedImage] = {}
        self._failure: str | None = None
        self._prepared = prepared
        self._task = task
        self._signals = signals
        self._limit = prepared.skip_limit()

    def train(self, loop: Loop | None, device: torch.device) -> Outcome:
        """See the training to its end."""
        return train_worker(self._task, loop, device, self)

    def conclude(self, outcome: Outcome, skipped: list[SkippedImage]) -> TrainResult | None:
        """Nothing: the first process writes how the run ended."""

    def skip(self, images: list[SkippedImage]) -> None:
        """Note images that cannot be used."""
        self.skipped |= {image.key: image for image in images}
        self._failure = self._limit.exceeded(list(self.skipped.values()))

    def begin(self) -> None: ...
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
        task: WorkerTask,
        signals: StopSignals,
        view: View | None,
        tracking: Tracking,
        started_at: float,
    ) -> None:
        super().__init__(prepared, task, signals, view, tracking, started_at)
        plan = prepared.data.plan(task.config)
        history = History(prepared.store)
        self._monitor = RunMonitor(
            prepared.name,
            plan.num_steps,
            plan.steps_per_epoch,
            history,
            skip_limit=self._limit,
            started_at=started_at,
        )
        self._recorder = RunRecorder(prepared.store, plan.num_steps, prepared.first_step, started_at)
        self._reporter = LocalReporter(self._monitor, self._recorder, self._look)
        self._opened = ExitStack()
        self._begun = False
        self._view = view
        self._tracking = tracking
        self._seen = START

    def train(self, loop: Loop | None, device: torch.device) -> Outcome:
        try:
            with self._opened:
                return super().train(loop, device)
        except BaseException as error:
            self._tracking.abort()
            with suppress(RaytrainError):  # the reason why the run ends matters more
                if self._begun:
                    self._recorder.write_status("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise

    def begin(self) -> None:
        self._prepared.data.write(self._prepared.store)
        self._recorder.begin(self._task.config)
        self._begun = True
        self._tracking.begin(self._task.config, self._prepared.store, self._monitor.event)
        self._opened.enter_context(self._reporter)

    def conclude(self, outcome: Outcome, skipped: list[SkippedImage]) -> TrainResult:
        """Write how the run ended."""
        self._monitor.skip(skipped)
        if reason := self._monitor.failure or outcome.error:
            error = failure_sentence(self._prepared.name, self._task.config.storage, reason)
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


def _shared_cache(prepared: PreparedRun, config: ResolvedConfig, opened: ExitStack, world_size: int) -> ImageCache:
    """Where the processes of this machine keep decoded images. The first process of each machine decides."""
    machine, mine = os.environ.get("GROUP_RANK", "0"), None
    if os.environ["LOCAL_RANK"] == "0":
        mine = image_cache(config, prepared.data, prepared.first_step, opened)
    caches: list[Any] = [(machine, mine)] * world_size
    if world_size > 1:
        dist.all_gather_object(caches, (machine, mine))
    return next(cache for where, cache in caches if where == machine and cache is not None)


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
