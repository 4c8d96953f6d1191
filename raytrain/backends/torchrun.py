"""Training without Ray, in the processes of ``torchrun --nproc-per-node 2 -m raytrain train cifar10 --name first …``.

The processes of a machine share the images that they decode. The first process keeps the run's documents, so that the
run is listed, shown, stopped and resumed like any other.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from raytrain.backends.fastest_precision import common_precision, fastest_precision
from raytrain.backends.gpus import visible_gpus
from raytrain.backends.image_cache import ImageCache, image_cache
from raytrain.backends.local_reporter import LocalReporter
from raytrain.backends.prepare import PreparedRun, load_loop, prepare
from raytrain.backends.run_watcher import watch_here
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train_request import TrainRequest
from raytrain.backends.worker_process import collective_backend, train_worker, worker_device
from raytrain.backends.worker_task import WorkerTask
from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.options import Precision
from raytrain.errors import UsageError
from raytrain.runs.machine_use import MachineUse
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import Outcome, TrainResult, failure_sentence, successful
from raytrain.runs.recorder import failed
from raytrain.runs.skipped_images import SkipLimit, SkippedImage


def train(request: TrainRequest) -> TrainResult:
    """Train in this process, as one of those that torchrun started. Every process returns the result.

    Raises UsageError, StorageError and TrainingFailed, like :func:`raytrain.train`.
    """
    config, rank, world_size = request.config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _check(config)
    loop = load_loop(config, request.loop)
    if config.gpus:
        os.environ.update(visible_gpus(config.gpus))
    device = worker_device(config)
    with prepare(config, owns_run=rank == 0) as prepared, request.signals, ExitStack() as opened:
        if world_size > 1:
            dist.init_process_group(collective_backend(device))
        resolved = prepared.resolve(world_size, device.type, lambda kind: _agreed_precision(kind, world_size))
        cache = _shared_cache(prepared, resolved, opened, world_size)
        task = WorkerTask(resolved, prepared.data, prepared.store, prepared.first_step, cache)
        first = FirstProcess(prepared, resolved, request) if rank == 0 else None
        process = first or OtherProcess(prepared.skip_limit(), request.signals)
        with process:
            outcome = train_worker(task, loop, device, process)
        skipped = _gathered(process.skipped_images, world_size)
        return _shared(first and first.conclude(outcome, skipped, world_size), world_size)


def _check(config: TrainConfig) -> None:
    if not config.name:
        raise UsageError("--name is missing; the processes of torchrun have no other way to agree on one.")
    if config.scope_keys:
        raise UsageError("--scope-keys limits what a Ray cluster is lent; under torchrun, leave it out.")


class FirstProcess(LocalReporter):
    """The reporter of the first process, which keeps the run's monitor and documents."""

    def __init__(self, prepared: PreparedRun, config: ResolvedConfig, request: TrainRequest) -> None:
        super().__init__(*watch_here(prepared, config, request))
        self._prepared = prepared
        self._config = config
        self._signals = request.signals

    @property
    def skipped_images(self) -> list[SkippedImage]:
        """The images that this process could not use."""
        return self.monitor.skipped_images

    def begin(self) -> None:
        """Write down what the run is."""
        self._prepared.data.write(self._prepared.store)
        self.watcher.begin(self._config, self._prepared.store)

    def skip(self, images: list[SkippedImage]) -> None:
        """Note images that cannot be used."""
        self.monitor.skip(images)

    def stop_requested(self) -> bool:
        """Whether the run should stop."""
        return super().stop_requested() or self._signals.stop_request is not None

    def conclude(self, outcome: Outcome, skipped: list[SkippedImage], num_workers: int) -> TrainResult:
        """Write how the run ended; ``skipped`` are the images that any process could not use."""
        self.monitor.skip(skipped)
        if reason := self.monitor.failure or outcome.error:
            error = failure_sentence(self._prepared.name, self._config.storage, reason)
            outcome = failed(error, self.monitor.snapshot())
        if self._signals.stop_request is not None:
            self.monitor.request_stop(self._signals.stop_request)
        self._prepared.copy_log()
        return self.watcher.conclude(outcome, num_workers)


class OtherProcess:
    """The reporter of any other process: it listens for stop requests, and remembers the images that it cannot use."""

    def __init__(self, limit: SkipLimit, signals: StopSignals) -> None:
        self._limit = limit
        self._signals = signals
        self._skipped: dict[str, SkippedImage] = {}

    @property
    def skipped_images(self) -> list[SkippedImage]:
        """The images that this process could not use."""
        return list(self._skipped.values())

    def skip(self, images: list[SkippedImage]) -> None:
        """Note images that cannot be used."""
        self._skipped |= {image.key: image for image in images}

    def stop_requested(self) -> bool:
        """Whether the run should stop, as far as this process knows."""
        return self._limit.exceeded(self.skipped_images) is not None or self._signals.stop_request is not None

    def checkpoint_requested(self) -> bool:
        """Never: there are only the checkpoints that the options ask for."""
        return False

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *exception: object) -> None: ...
    def begin(self) -> None: ...
    def started(self, num_workers: int, step: int) -> None: ...
    def record(self, row: MetricRow) -> None: ...
    def measured(self, use: MachineUse) -> None: ...
    def event(self, text: str) -> None: ...
    def flush(self) -> None: ...


def _shared_cache(prepared: PreparedRun, config: ResolvedConfig, opened: ExitStack, world_size: int) -> ImageCache:
    """Where the processes of this machine keep decoded images. The first process of each machine decides."""
    machine, mine = os.environ.get("GROUP_RANK", "0"), None
    if os.environ["LOCAL_RANK"] == "0":
        mine = image_cache(config, prepared.data, prepared.first_step, opened)
    caches: list[Any] = [(machine, mine)] * world_size
    if world_size > 1:
        dist.all_gather_object(caches, (machine, mine))
    return next(cache for where, cache in caches if where == machine and cache is not None)


def _agreed_precision(device: str, world_size: int) -> Precision:
    """The fastest precision that trains well on the machines of all processes."""
    found: list[Any] = [fastest_precision(device)] * world_size
    if world_size > 1:
        dist.all_gather_object(found, found[0])
    return common_precision(found)


def _gathered(skipped: list[SkippedImage], world_size: int) -> list[SkippedImage]:
    """The images that any process could not use."""
    lists: list[Any] = [skipped] * world_size
    if world_size > 1:
        dist.all_gather_object(lists, skipped)
    return [image for one in lists for image in one]


def _shared(result: TrainResult | None, world_size: int) -> TrainResult:
    """The first process's result, on every process; raises TrainingFailed on all of them if the run failed."""
    results: list[Any] = [result]
    if world_size > 1:
        dist.broadcast_object_list(results, src=0)
        dist.destroy_process_group()
    return successful(results[0])
