"""One worker of a run as Ray Train starts it: it puts a ``Run`` together and hands it to the training loop."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train.v2._internal.execution.context import get_train_context

from raytrain.backends.ray.block_cache import RemoteBlocks
from raytrain.backends.ray.failures import root_cause
from raytrain.backends.ray.ingest import ImageSet
from raytrain.backends.ray.stream_queues import Stream
from raytrain.backends.ray.streaming import streamed_blocks
from raytrain.config import TrainConfig
from raytrain.data.batch_plan import BatchPlan, Cursor
from raytrain.data.partition import CachedBlocks, LocalBatch, Partition, batches_from_cache, batches_from_stream
from raytrain.errors import RaytrainError
from raytrain.storage.base import Store
from raytrain.training.augment import Augment
from raytrain.training.checkpoint import Checkpoints, Identity
from raytrain.training.run import Run

_POLL_S = 20.0


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker is told; it travels to each of them and holds no secret."""

    config: TrainConfig
    loop: Callable[[Run], None] | None  # None: the built-in one
    classes: tuple[str, ...]
    identity: Identity
    mean: tuple[float, ...]
    std: tuple[float, ...]
    run_store: Store
    train: ImageSet
    test: ImageSet
    plan: BatchPlan
    test_plan: BatchPlan
    weights: Any  # where in the object store the initial weights are; None: what the seed or a checkpoint decides
    train_origin: Cursor | None  # where the cached training images begin; None: they are streamed
    test_cached: bool
    threads: int
    coordinator: Any


def work(job: WorkerSpec) -> None:
    """Train on this worker to the end of the run, or to a stop."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    torch.set_num_threads(job.threads)
    run = _make_run(job)
    try:
        _loop(job)(run)
        run.finish()
    except RaytrainError as error:
        # Said once, to the driver: trying again would end the same way.
        ray.get(job.coordinator.conclude.remote({"error": root_cause(error)}))
        raise
    if run.rank == 0:
        ray.get(job.coordinator.conclude.remote({"stopped": run.stopped, "progress": run.progress, "checkpoint": run.checkpoints.newest()}))


def _make_run(job: WorkerSpec) -> Run:
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = 0, 1
    config = job.config
    device = ray.train.torch.get_device() if config.device == "cuda" else torch.device("cpu")
    source = RaySource(job, rank, config.worker_load or (1.0,) * world_size)
    return Run(
        config=config,
        classes=job.classes,
        plan=job.plan,
        source=source,
        augment=Augment(config, job.mean, job.std),
        checkpoints=Checkpoints(job.run_store, job.identity, config.keep_checkpoints, lambda path: _tell(job.coordinator, path)),
        reporter=RayReporter(job.coordinator, watch=rank == 0),
        device=device,
        weights=None if job.weights is None else ray.get(job.weights),
    )


def _group_number(coordinator: Any, rank: int) -> int:
    """Which of the run's worker groups this is, counted from 0."""
    number: list[Any] = [ray.get(coordinator.join_group.remote()) if rank == 0 else 0]
    if dist.is_initialized():
        dist.broadcast_object_list(number, src=0)
    return number[0]


def _loop(job: WorkerSpec) -> Callable[[Run], None]:
    if job.loop is not None:
        return job.loop
    from raytrain.training.loop import train

    return train


def _tell(coordinator: Any, path: str) -> None:
    coordinator.event.remote(f"checkpoint {path} written")


class RaySource:
    """The worker's shares: out of the data sets in the object store, or out of streams that the driver reads."""

    def __init__(self, job: WorkerSpec, rank: int, loads: tuple[float, ...]) -> None:
        self._job = job
        self._group = _group_number(job.coordinator, rank)
        self._opened: Counter[str] = Counter()
        self._train = Partition(job.plan, rank, loads)
        self._test = Partition(job.test_plan, rank, loads)
        self._cached: dict[str, CachedBlocks] = {}

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """See :class:`raytrain.training.protocols.BatchSource`."""
        origin = self._job.train_origin
        if origin is None:
            return self._streamed("train", self._train, first_step)
        return batches_from_cache(self._train, self._blocks("train", self._job.train, self._job.plan, origin), first_step)

    def test(self) -> Iterator[LocalBatch]:
        """See :class:`raytrain.training.protocols.BatchSource`."""
        if not self._job.test_cached:
            return self._streamed("test", self._test, 0)
        return batches_from_cache(self._test, self._blocks("test", self._job.test, self._job.test_plan, Cursor()), 0)

    def _streamed(self, name: str, shares: Partition, first_step: int) -> Iterator[LocalBatch]:
        stream = Stream(self._group, self._opened[name], name, first_step, len(shares.loads))
        self._opened[name] += 1
        return batches_from_stream(shares, streamed_blocks(self._job.coordinator, stream, shares.rank, self._job.train.shape), first_step)

    def _blocks(self, name: str, images: ImageSet, plan: BatchPlan, origin: Cursor) -> CachedBlocks:
        if name not in self._cached:
            remote = RemoteBlocks(self._job.coordinator, name, images.shape)
            self._cached[name] = CachedBlocks(remote, images.rows_per_block, plan, origin)
        return self._cached[name]


class RayReporter:
    """Sends news to the run's actor without waiting, and hears of a stop request from it."""

    def __init__(self, coordinator: Any, *, watch: bool) -> None:
        self._coordinator = coordinator
        self._stop = threading.Event()
        self._leaving: Any = None
        if watch:
            threading.Thread(target=self._watch, daemon=True, name="stop-watch").start()

    def started(self, num_workers: int, step: int) -> None:
        """A worker group begins after ``step`` steps."""
        self._coordinator.started.remote(num_workers, step)

    def record(self, row: dict[str, Any]) -> None:
        """One row of metrics."""
        self._coordinator.record.remote(row)

    def event(self, text: str) -> None:
        """Something worth a line."""
        self._coordinator.event.remote(text)

    def flush(self) -> None:
        """Wait until all rows so far are in storage."""
        ray.get(self._coordinator.received.remote())  # comes after them
        ray.get(self._coordinator.flush.remote())

    def stop_requested(self) -> bool:
        """Whether somebody asked for a stop."""
        return self._stop.is_set()

    def save_requested(self) -> bool:
        """Whether Ray has announced that a node of these workers will be taken away: True once for each announcement."""
        # What Ray has told this worker already: its public call for it is a barrier over all workers, at each step.
        leaving = get_train_context().preemption_context.preemption_info
        if leaving is None or leaving is self._leaving:
            return False
        self._leaving = leaving
        nodes = leaving.preempted_node_ids
        self.event(f"{'a node' if len(nodes) == 1 else f'{len(nodes)} nodes'} of the workers will be taken away: a checkpoint now")
        return True

    def _watch(self) -> None:
        while not self._stop.is_set():
            if ray.get(self._coordinator.wait_for_stop.remote(_POLL_S)) is not None:
                self._stop.set()
