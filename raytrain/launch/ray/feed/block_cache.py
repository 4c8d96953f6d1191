"""A data set kept decoded in Ray's object store: the driver fills it while training runs, every worker reads it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ray

from raytrain.data.blocks import Block, to_block
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageShape
from raytrain.data.plan.partition import BlockRef, CacheOrder
from raytrain.launch.ray.coordinator import CoordinatorHandle
from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet, blocks_by_tasks, read_block
from raytrain.launch.ray.ray_errors import root_cause

_POLL_S = 10.0
_FIRST_BLOCKS = 4  # read before anything else starts, so that the first steps have data, and the cores
_CLOSE_S = 10.0


class CacheFiller:
    """Reads the cached data sets, those with an order, into the object store, block by block.

    Each block is reported to the run's coordinator. The driver reads the first blocks itself, so that training can
    begin. Tasks read the rest after :meth:`start`, which is called once the workers have started, or at once if there
    are cores enough for both. The filler lives in the driver, which owns the blocks: they outlive any worker, and Ray
    reads lost ones again.

    ``images`` has the images of each data set, by name, and ``orders`` the order of those that are cached.
    """

    def __init__(
        self,
        coordinator: CoordinatorHandle,
        cpus: DataCpus,
        images: Mapping[str, ImageSet],
        orders: Mapping[str, CacheOrder],
    ) -> None:
        self._coordinator = coordinator
        self._cpus = cpus
        self._images = images
        self._orders = orders
        self._refs: list[Any] = []  # Ray keeps a block as long as there is a reference to it
        self._started = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._fill, daemon=True, name="cache")
        self._thread.start()

    def start(self) -> None:
        """Have tasks read all blocks that are not read yet, from now on. Further calls do nothing."""
        self._started.set()

    def close(self) -> None:
        """Stop reading, and release the blocks; wait at most ten seconds for the thread that reads."""
        self._closed = True
        self._started.set()
        self._thread.join(_CLOSE_S)
        self._refs.clear()

    def _fill(self) -> None:
        """Read all data sets, in a thread; report an error to the workers that wait for a block."""
        try:
            # The first training images are read here, one after the other: no task has to start for them.
            num_first: dict[str, int] = {}
            for dataset, order in self._orders.items():
                images = self._images[dataset]
                num_first[dataset] = min(_FIRST_BLOCKS, len(order)) if dataset == "train" else 0
                with ImageReader(images.store, *images.format, isolated=True) as reader:
                    for number in range(num_first[dataset]):
                        self._add(dataset, ray.put(read_block(images, order, number, reader)))

            # Tasks read the rest, once the workers no longer need all cores to start.
            self._started.wait()
            for dataset, order in self._orders.items():
                unread = (BlockRef(0, number) for number in range(num_first[dataset], len(order)))
                images, cpus = self._images[dataset], self._cpus
                for _, ref in blocks_by_tasks(images, [order], unread, cpus.num_tasks, cpus.task, lambda: self._closed):
                    self._add(dataset, ref)
        except Exception as error:
            if not self._closed:
                self._coordinator.fail_blocks.remote(root_cause(error))

    def _add(self, dataset: str, ref: Any) -> None:
        """Keep the block to which ``ref`` refers, the next one of its data set, and tell the coordinator of it."""
        self._refs.append(ref)
        self._coordinator.add_blocks.remote(dataset, [ref])


class RemoteBlocks:
    """The blocks of a cached data set for a worker, in shared memory. Each is kept after its first use."""

    def __init__(self, coordinator: CoordinatorHandle, dataset: str, shape: ImageShape) -> None:
        self._coordinator = coordinator
        self._dataset = dataset
        self._shape = shape
        self._refs: list[Any] = []
        self._blocks: dict[int, Block] = {}

    def __call__(self, number: int) -> Block:
        """Return block ``number``, once it has been read; raise RaytrainError if a data set cannot be read."""
        block = self._blocks.get(number)
        if block is None:
            # The coordinator answers with all further references that it has, in the order of their numbers.
            while number >= len(self._refs):
                self._refs += ray.get(self._coordinator.blocks.remote(self._dataset, len(self._refs), _POLL_S))
            block = self._blocks[number] = to_block(ray.get(self._refs[number]), self._shape)
        return block
