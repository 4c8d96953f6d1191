"""One worker, as Ray Train starts it, with the user's modules that travel to it."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.util import get_current_placement_group

import raytrain
from raytrain.config.user_code import sending, trace_of
from raytrain.data.blocks import CachedBlocks, LocalBatch, batches_from_cache, batches_from_stream
from raytrain.data.plan.partition import CacheOrder, Partition
from raytrain.errors import RaytrainError
from raytrain.launch.ray.coordinator import CoordinatorHandle
from raytrain.launch.ray.feed.block_cache import RemoteBlocks
from raytrain.launch.ray.feed.exchange import Stream
from raytrain.launch.ray.feed.ingest import ImageSet
from raytrain.launch.ray.feed.streaming import FeederHandle, stream_blocks
from raytrain.launch.ray.private_api import announced_preemption
from raytrain.monitor.events import NodeLeaving
from raytrain.runs.logs import ProcessLog
from raytrain.runs.machine_history import MachineUse
from raytrain.training.assembly import make_run, train_run
from raytrain.training.run_spec import RunSpec


def pickle_functions(spec: RunSpec, *, with_imports: bool) -> bytes:
    """The loop and the transforms of a run, with the modules of the user's that they are defined in.

    ``with_imports`` says that the workers may have no copy of the files beside these, so that what was imported from
    there travels, too.
    """
    functions = spec.loop, spec.transforms
    for function in functions:
        module = inspect.getmodule(getattr(function, "func", function))
        if module is not None and (file := _users_file(module)):
            beside = list(sys.modules.values()) if with_imports else []
            folder = file.parents[module.__name__.count(".")]
            others = [each for each in beside if (its := _users_file(each)) and its.is_relative_to(folder)]
            for each in (module, *others):
                if each.__name__ != "__main__":  # which is pickled by value anyway
                    cloudpickle.register_pickle_by_value(each)  # pyright: ignore
    with sending({"The loop": spec.loop, "--transforms": spec.transforms}):
        return cloudpickle.dumps(functions)  # pyright: ignore[reportPrivateImportUsage]


def _users_file(module: ModuleType) -> Path | None:
    """The file of a module that is not installed."""
    file: str | None = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] in _installed_packages():
        return None
    if any(Path(file).is_relative_to(folder) for folder in _INSTALLED):
        return None
    return Path(file)


@cache
def _installed_packages() -> Collection[str]:
    return importlib.metadata.packages_distributions().keys()  # also those that are installed where they are written


_INSTALLED = (*set(sysconfig.get_paths().values()), *raytrain.__path__)
_POLL_S = 20.0


@dataclass(frozen=True)
class Surroundings:
    """Where the workers of a run get its images, and where they report. Holds no secret."""

    images: Mapping[str, ImageSet]  # train and test
    orders: Mapping[str, CacheOrder]  # in which they are kept; those without one are streamed
    weights: Any  # ObjectRef of the initial weights; None if the seed or a checkpoint decides
    functions: bytes  # the pickled loop and transforms of the spec, which may need the folders of path
    path: tuple[str, ...]  # where the driver looks for modules: some workers have the same folders
    threads: int
    folder: str | None  # that of the driver, on the same machine; None if the cluster may have others
    feeders: tuple[FeederHandle, ...]  # from which workers get what is streamed
    coordinator: CoordinatorHandle


def work(spec: RunSpec, here: Surroundings) -> None:
    """Train on this worker until the run ends or stops."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    torch.set_num_threads(here.threads)
    if here.folder is not None:
        os.chdir(here.folder)  # a loop or a model may read files by relative paths
    sys.path.extend(folder for folder in here.path if folder not in sys.path)  # a loop may import what is beside it
    loop, transforms = cloudpickle.loads(here.functions)
    spec = replace(spec, loop=loop, transforms=transforms)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = spec.config
    device = ray.train.torch.get_device() if config.device_type == "cuda" else torch.device("cpu")
    source = RayBatches(spec, here, rank, config.worker_load or (1.0,) * world_size)
    reporter: Any = RayReporter(here.coordinator, watch=rank == 0)
    weights: Any = None if here.weights is None else ray.get(here.weights)
    try:
        with ProcessLog(spec.store, rank):
            outcome = train_run(spec, make_run(spec, source, reporter, device, weights))
    except RaytrainError as error:
        if ray.get(here.coordinator.give_up.remote(error, trace_of(error))):
            return  # the driver ends the run; an exception would have Ray Train start other workers
        raise
    if dist.is_initialized():
        dist.barrier()  # every worker's log must be there before the driver ends them
    if rank == 0:
        ray.get(here.coordinator.conclude.remote(outcome))


class RayBatches:
    """A :class:`raytrain.training.protocols.BatchSource` over blocks in the object store, or the feeders' streams."""

    def __init__(self, spec: RunSpec, here: Surroundings, rank: int, loads: tuple[float, ...]) -> None:
        self._here = here
        self._group = _join_group(here.coordinator, rank)
        self._num_streams: Counter[str] = Counter()
        self._train = Partition(spec.plan, rank, loads)
        self._test = Partition(spec.test_plan, rank, loads)
        self._caches = {
            dataset: CachedBlocks(RemoteBlocks(images.coordinator, dataset, images.shape), here.orders[dataset])
            for dataset, images in here.images.items()
            if dataset in here.orders
        }

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        return self._batches("train", self._train, first_step)

    def test(self) -> Iterator[LocalBatch]:
        return self._batches("test", self._test, 0)

    def _batches(self, dataset: str, partition: Partition, first_step: int) -> Iterator[LocalBatch]:
        if dataset in self._caches:
            return batches_from_cache(partition, self._caches[dataset], first_step)
        stream = Stream(self._group, self._num_streams[dataset], dataset, first_step, len(partition.loads))
        self._num_streams[dataset] += 1
        blocks = stream_blocks(self._here.feeders, stream, self._here.images[dataset], partition)
        return batches_from_stream(partition, blocks, first_step)


class RayReporter:
    """Sends everything to the run's coordinator without waiting; with ``watch``, it waits there for a stop request."""

    def __init__(self, coordinator: CoordinatorHandle, *, watch: bool) -> None:
        self._coordinator = coordinator
        self._stop_requested = threading.Event()
        self._preemption: Any = None
        if watch:
            threading.Thread(target=self._watch, daemon=True, name="stop-watch").start()

    def __getattr__(self, name: str) -> Any:
        """The coordinator's method of this name, whose answer nobody waits for."""
        return getattr(self._coordinator, name).remote

    def measured(self, use: MachineUse) -> None:
        self._coordinator.measured_on.remote(use, ray.get_runtime_context().get_node_id())

    def flush(self) -> None:
        ray.get(self._coordinator.received.remote())  # returns after they have arrived
        ray.get(self._coordinator.flush.remote())

    def stop_requested(self) -> bool:
        return self._stop_requested.is_set()

    def checkpoint_requested(self) -> bool:
        """Whether Ray has announced that a node of these workers will be taken away: True once per announcement."""
        preemption = announced_preemption()
        if preemption is None or preemption is self._preemption:
            return False
        self._preemption = preemption
        self.event(NodeLeaving(len(preemption.preempted_node_ids)))
        return True

    def _watch(self) -> None:
        with suppress(RayActorError):  # the run is over
            while ray.get(self._coordinator.wait_for_stop_request.remote(_POLL_S)) is None:
                pass
            self._stop_requested.set()


def _join_group(coordinator: CoordinatorHandle, rank: int) -> int:
    """The number of this worker group in the run, counted from 0."""
    number: list[Any] = [0]
    if rank == 0:
        number = [ray.get(coordinator.join_group.remote(get_current_placement_group()))]
    if dist.is_initialized():
        dist.broadcast_object_list(number, src=0)
    return number[0]
