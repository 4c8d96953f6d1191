"""The same training without Ray: ``torchrun --nproc-per-node 2 -m raytrain.backends.torchrun cifar10 --data …``.

Takes the recipes and options of ``raytrain train``. Every process reads the images that it needs itself, keeps them in its
memory, and leaves the run where ``raytrain`` finds it: one may be begun here and resumed there.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raytrain.backends.ray.cluster import only_gpus
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train import prepare
from raytrain.cli.parser import RecipeOptions, parse
from raytrain.config import TrainConfig
from raytrain.data.batch_plan import BatchPlan, Cursor
from raytrain.data.block_order import CacheOrder
from raytrain.data.dataset import Dataset
from raytrain.data.decode import ImageReader
from raytrain.data.manifest import Manifest
from raytrain.data.partition import Block, CachedBlocks, LocalBatch, Partition, batches_from_cache
from raytrain.display.terminal import plain_line
from raytrain.errors import RaytrainError, TrainingFailed, UsageError
from raytrain.runs.bad_images import BadImageLimit
from raytrain.runs.history import Row
from raytrain.runs.recorder import RunRecorder
from raytrain.storage.base import Store
from raytrain.training.augment import Augment
from raytrain.training.checkpoint import Checkpoints, Identity
from raytrain.training.loop import train
from raytrain.training.run import Run
from raytrain.training.transfer import initial_weights
from raytrain.training.user_function import load_function

Skipped = Callable[[list[Row]], None]
"""Hears of images that cannot be used: ``key`` and ``reason`` each."""

_BLOCK_ROWS = 512
_LOOK_EVERY_S = 1.0


def work(options: RecipeOptions) -> None:
    """Train in this process as one of those that torchrun started."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not options.name:
        raise UsageError("--name is missing; the processes of torchrun have no other way to agree on one.")
    config = TrainConfig(**vars(options)).resolved(world_size)
    if config.gpus:
        os.environ.update(only_gpus(config.gpus))
    if config.loop is None:
        config.check_learning_rate()
    prepared = prepare(config)
    weights = initial_weights(config, prepared.data.train.classes, prepared.first_step)
    device = _device(config)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    config, data, store = dataclasses.replace(prepared.config, device=device.type), prepared.data, prepared.store
    plan = data.plan(config)
    if rank == 0:
        data.write(store)
    identity = Identity(config.model, data.train.classes, data.train.digest, config.batch_size or 1, config.seed)
    limit = BadImageLimit.of(config, len(data.train) + len(data.test))
    with StopSignals() as signals:
        recorder = RunRecorder(store, prepared.name, plan, world_size) if rank == 0 else None
        reporter = _First(recorder, config, signals, limit) if recorder else _Listener(signals, limit)
        run = Run(
            config=config,
            classes=data.train.classes,
            plan=plan,
            source=MemorySource(data, plan, rank, config.worker_load or (1.0,) * world_size, reporter.skipped),
            augment=Augment(config, data.mean, data.std),
            checkpoints=Checkpoints(store, identity, config.keep_checkpoints),
            reporter=reporter,
            device=device,
            weights=weights,
        )
        loop = load_function("--loop", config.loop) if config.loop else train
        loop(run)
        run.finish()
    _conclude(reporter, run, prepared.name)


def _conclude(reporter: _Listener, run: Run, name: str) -> None:
    """Put together which images each process could not read; the first one fails where they are too many."""
    lists: list[Any] = [list(reporter.bad.values())] * run.world_size
    if run.world_size > 1:
        dist.all_gather_object(lists, lists[0])
        dist.destroy_process_group()
    for entries in lists:
        reporter.skipped(entries)
    reporter.close(run)
    if reporter.failure and run.rank == 0:
        raise TrainingFailed(f"Run {name!r} failed: {reporter.failure}. Its last checkpoint is kept: go on with --resume.")


class MemorySource:
    """The worker's shares out of images that this process has read and keeps."""

    def __init__(self, data: Dataset, plan: BatchPlan, rank: int, loads: Sequence[float], skipped: Skipped) -> None:
        test_plan = data.test_plan(len(loads))
        self._train = Partition(plan, rank, loads)
        self._test = Partition(test_plan, rank, loads)
        self._train_blocks = _blocks(data.train_store, data.train, data, plan, skipped)
        self._test_blocks = _blocks(data.test_store, data.test, data, test_plan, skipped)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """See :class:`raytrain.training.protocols.BatchSource`."""
        return batches_from_cache(self._train, self._train_blocks, first_step)

    def test(self) -> Iterator[LocalBatch]:
        """See :class:`raytrain.training.protocols.BatchSource`."""
        return batches_from_cache(self._test, self._test_blocks, 0)


def _blocks(store: Store, manifest: Manifest, data: Dataset, plan: BatchPlan, skipped: Skipped) -> CachedBlocks:
    order = CacheOrder(plan, Cursor(), _BLOCK_ROWS)
    reader = ImageReader(store, data.shape)

    @cache
    def block(number: int) -> Block:
        samples = order.samples(number)
        wanted = manifest.select(samples)
        images, bad = reader.read(wanted)
        labels = wanted.labels.astype(np.int64)
        labels[list(bad)] = -1
        skipped([{"key": wanted.keys[place].as_py(), "reason": reason} for place, reason in bad.items()])
        return Block(images, labels, samples)

    return CachedBlocks(block, _BLOCK_ROWS, plan, Cursor())


class _Listener:
    """Hears of a stop request and keeps what this process cannot read; other news are those of the first process."""

    def __init__(self, signals: StopSignals, limit: BadImageLimit) -> None:
        self.bad: dict[str, Row] = {}
        self.failure: str | None = None
        self._signals = signals
        self._limit = limit

    def started(self, num_workers: int, step: int) -> None: ...
    def record(self, row: dict[str, Any]) -> None: ...
    def event(self, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self, run: Run) -> None: ...

    def skipped(self, entries: list[Row]) -> None:
        self.bad.update({row["key"]: row for row in entries})
        self.failure = self._limit.passed(list(self.bad.values()))

    def stop_requested(self) -> bool:
        return self.failure is not None or self._signals.reason is not None

    def save_requested(self) -> bool:
        return False


class _First(_Listener):
    """Keeps the run's documents in storage, hears there of ``raytrain stop``, and prints a line for each row."""

    def __init__(self, recorder: RunRecorder, config: TrainConfig, signals: StopSignals, limit: BadImageLimit) -> None:
        super().__init__(signals, limit)
        self._recorder = recorder
        self._monitor = recorder.monitor
        self._over = threading.Event()
        recorder.begin(config)
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="watch")
        self._watcher.start()

    def started(self, num_workers: int, step: int) -> None:
        self._monitor.started(num_workers, step)

    def record(self, row: dict[str, Any]) -> None:
        self._monitor.record(row)
        print(plain_line(self._monitor.snapshot()), flush=True)

    def flush(self) -> None:
        self._monitor.flush()

    def skipped(self, entries: list[Row]) -> None:
        super().skipped(entries)
        self._monitor.skipped(entries)

    def stop_requested(self) -> bool:
        return self._monitor.stop_reason is not None or super().stop_requested()

    def close(self, run: Run) -> None:
        self._over.set()
        self._watcher.join()
        if self._signals.reason:
            self._monitor.request_stop(self._signals.reason)
        self._recorder.conclude("failed" if self.failure else "stopped" if run.stopped else "finished", run.progress, self.failure)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self._recorder.look()


def _device(config: TrainConfig) -> torch.device:
    if config.device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(config.threads_per_worker or 1)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def main(argv: Sequence[str]) -> int:
    """Run ``argv``, the words after ``raytrain train``; gives the exit code."""
    commands: dict[str, Callable[..., None]] = {"train": work}
    try:
        parse(["train", *argv], commands)()
    except RaytrainError as error:
        print(f"raytrain: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
