"""Reading images by tasks: each fetches and decodes a block of the plan. Imports no Ray Data, which takes a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from raytrain.data.blocks import Buffers, to_table
from raytrain.data.images.decode import ImageFormat, ImageShape
from raytrain.data.images.image_reader import ImageReader
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.partition import BlockOrder, BlockRef
from raytrain.data.plan.permutation import Int64s
from raytrain.launch.ray.coordinator import CoordinatorHandle
from raytrain.launch.ray.private_api import is_repeated_task
from raytrain.runs.metric_row import SkippedImage
from raytrain.storage.bucket_client import take_num_retries
from raytrain.storage.store import Store


@dataclass(frozen=True)
class ImageSet:
    """What a data task needs to read the images of one manifest."""

    store: Store
    format: ImageFormat
    manifest: Any  # ObjectRef[Manifest]: one copy per node, however many tasks there are
    rows_per_block: int  # images in one block
    coordinator: CoordinatorHandle  # hears of images that cannot be read, and of retried requests; has what is kept

    @property
    def shape(self) -> ImageShape:
        """The shape of the decoded images."""
        return self.format.shape

    def reader(self, *, isolated: bool) -> ImageReader:
        """Fetches and decodes them."""
        return ImageReader(self.store, *self.format, isolated)

    def within(self, num_blocks: int, num_bytes: int) -> int:
        """How many blocks fit into ``num_bytes``: at most ``num_blocks``, at least 1."""
        return max(1, min(num_blocks, num_bytes // (self.rows_per_block * self.shape.num_bytes)))


@dataclass(frozen=True)
class DataCpus:
    """CPUs for reading, and how many of them one task takes."""

    all: float
    task: float

    @property
    def num_tasks(self) -> int:
        """Tasks at a time."""
        return max(1, round(self.all / self.task))


def blocks_by_tasks(
    images: ImageSet, orders: Sequence[BlockOrder], turns: Iterable[BlockRef], at_a_time: int, task_cpus: float
) -> Iterator[tuple[int, Any]]:
    """References of the blocks of ``turns``, as they are read: number of the order in ``orders``, and reference.

    This is sooner than Ray Data, but has no limit on what is read and not yet used. ``at_a_time`` tasks of
    ``task_cpus`` each run at a time. The blocks lie on all nodes; a lost one is read again.
    """
    read = ray.remote(read_block).options(num_cpus=task_cpus, max_retries=-1, scheduling_strategy="SPREAD")
    asked: deque[tuple[int, Any]] = deque()
    running: list[Any] = []
    for which, number in turns:
        if len(running) >= at_a_time:  # more of them would wait for CPUs that starting workers need
            _, running = ray.wait(running, num_returns=1, fetch_local=False)
        asked.append((which, read.remote(images, orders[which], number)))
        running.append(asked[-1][1])
        while asked[0][1] not in running:
            yield asked.popleft()
    for which, ref in asked:
        ray.wait([ref], fetch_local=False)
        yield which, ref


_buffers = Buffers()  # of this process: the next block needs as much as the last one


def read_block(images: ImageSet, order: BlockOrder, number: int) -> pa.Table:
    """Fetch and decode a block; isolated if this task was begun before: an image may have killed it."""
    with images.reader(isolated=is_repeated_task()) as reader:
        return read_table(images, reader, order.samples(number), order.epoch(number))


def read_table(images: ImageSet, reader: ImageReader, samples: Int64s, epoch: int) -> pa.Table:
    """Fetch ``samples`` and decode them: columns image (H*W*C bytes), label (below 0 if unreadable) and sample."""
    wanted = chosen(images, samples)
    labels = wanted.labels.astype(np.int64)
    room = _buffers.take((images.rows_per_block * images.shape.num_bytes,))
    pixels, bad = reader.read(wanted, images.format.cropping.crops(samples, epoch), room)
    if retries := take_num_retries():
        images.coordinator.retried.remote(retries)
    if bad:
        labels[list(bad)] = -1
        skipped = [SkippedImage(wanted.keys[index].as_py(), reason) for index, reason in bad.items()]
        images.coordinator.skip.remote(skipped)
    return to_table(pixels, labels, samples)


def chosen(images: ImageSet, samples: Int64s) -> Manifest:
    """What the manifest says of ``samples`` (see :meth:`BatchPlan.samples`)."""
    manifest: Manifest = ray.get(images.manifest)  # shared memory, which a process that kept it would not let go
    return manifest.select(samples % len(manifest))
