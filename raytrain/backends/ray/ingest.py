"""Reading images with Ray Data: plan rows in, blocks of decoded images out, in order.

A row of the pipeline is the number of a block. The map stage asks the plan which samples the block holds, fetches them
concurrently and decodes them. So the pipeline has no listing, shuffle or barrier, and one execution spans epochs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, ExecutionResources

from raytrain.backends.ray.coordinator import CoordinatorHandle
from raytrain.backends.ray.private_api import EXECUTION_CALLBACK, is_repeated_task
from raytrain.data.block_order import BlockOrder, BlockRef, interleave, rows_per_block
from raytrain.data.blocks import to_table
from raytrain.data.decode import ImageFormat, ImageShape
from raytrain.data.image_reader import ImageReader
from raytrain.data.manifest import Manifest
from raytrain.data.permutation import Int64s
from raytrain.data.prefetch import Prefetch
from raytrain.runs.skipped_images import SkippedImage
from raytrain.storage.base import Store
from raytrain.storage.retry import num_retries

_HEAD_BLOCKS, _HEAD_BYTES = 4, 64 << 20  # per order, read by plain tasks while a pipeline starts, which takes seconds
_TURN_S = 0.01
_CLOSE_S = 10.0
_BLOCKS_PER_EXECUTION = 1024  # Ray Data plans every task of an execution before the first one starts


@dataclass(frozen=True)
class ImageSet:
    """What a data task needs to read the images of one manifest."""

    store: Store
    format: ImageFormat
    manifest: Any  # ObjectRef[Manifest]: one copy per node, however many tasks there are
    num_images: int
    packed: bool
    coordinator: CoordinatorHandle | None = None  # hears of images that cannot be read, and of retried requests

    @property
    def shape(self) -> ImageShape:
        """The shape of the decoded images."""
        return self.format.shape

    @property
    def rows_per_block(self) -> int:
        """Images in one block."""
        return rows_per_block(self.shape.num_bytes, packed=self.packed)

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


def block_refs(images: ImageSet, orders: Sequence[BlockOrder], cpus: DataCpus) -> Iterator[tuple[int, Any]]:
    """References of the blocks of all ``orders``, in turn, as they are read: number of the order, and reference."""
    turns = interleave(orders)
    head = list(islice(turns, images.within(_HEAD_BLOCKS, _HEAD_BYTES) * len(orders)))
    piped = Prefetch(_by_pipelines(images, orders, cpus, turns), depth=2)  # starts now
    try:
        # They take no CPUs of the cluster: the pipeline beside them has those for reading, and workers need the others.
        yield from blocks_by_tasks(images, orders, head, cpus.num_tasks, task_cpus=0)
        yield from piped
    finally:
        piped.close(_CLOSE_S)  # otherwise its thread asks a cluster that may have ended by then


def blocks_by_tasks(
    images: ImageSet, orders: Sequence[BlockOrder], turns: Iterable[BlockRef], at_a_time: int, task_cpus: float
) -> Iterator[tuple[int, Any]]:
    """The same for ``turns`` alone, without Ray Data: sooner, but without a limit on what is read and not yet used.

    ``at_a_time`` tasks of ``task_cpus`` each run at a time. The blocks lie on all nodes; a lost one is read again.
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


def read_block(images: ImageSet, order: BlockOrder, number: int, *, isolated: bool | None = None) -> pa.Table:
    """Fetch and decode a block of ``order``, as :func:`read_table` does.

    ``isolated``: see :class:`ImageReader`; by default if this task was begun before: an image may have killed it.
    """
    isolated = is_repeated_task() if isolated is None else isolated
    return read_table(images, order.samples(number), order.epoch(number), isolated=isolated)


def _by_pipelines(
    images: ImageSet, orders: Sequence[BlockOrder], cpus: DataCpus, turns: Iterator[BlockRef]
) -> Iterator[tuple[int, Any]]:
    while chunk := list(islice(turns, _BLOCKS_PER_EXECUTION)):
        bundles = _pipeline(images, orders, chunk, cpus).iter_internal_ref_bundles()  # REF_BUNDLES in private_api.py
        refs = (ref for bundle in bundles for ref in bundle.block_refs)
        for (which, _), ref in zip(chunk, refs, strict=True):
            yield which, ref


def read_table(images: ImageSet, samples: Int64s, epoch: int, *, isolated: bool) -> pa.Table:
    """Fetch ``samples`` and decode them for ``epoch``.

    The columns are image (H*W*C bytes), label (below 0 for an unreadable image) and sample.
    """
    assert images.coordinator is not None
    wanted = chosen(images, samples)
    labels = wanted.labels.astype(np.int64)
    retries_before = num_retries()
    reader = ImageReader(images.store, *images.format, isolated)
    pixels, bad = reader.read(wanted, images.format.framing.frames(samples, epoch))
    if retries := num_retries() - retries_before:
        images.coordinator.retried.remote(retries)
    if bad:
        labels[list(bad)] = -1
        skipped = [SkippedImage(wanted.keys[index].as_py(), reason) for index, reason in bad.items()]
        images.coordinator.skip.remote(skipped)
    return to_table(pixels, labels, samples)


def chosen(images: ImageSet, samples: Int64s) -> Manifest:
    """What the manifest says of ``samples`` (see :meth:`BatchPlan.samples`)."""
    return _manifest(images.manifest).select(samples % images.num_images)


def _pipeline(
    images: ImageSet, orders: Sequence[BlockOrder], turns: Sequence[BlockRef], cpus: DataCpus
) -> ray.data.Dataset:
    def read_row(row: Any) -> Any:
        return read_block(images, orders[int(row["which"][0])], int(row["number"][0]))

    # The buffer limit: two blocks per task and two per order.
    room = (2 * cpus.num_tasks + 2 * len(orders)) * images.rows_per_block * images.shape.num_bytes
    configure(DataContext.get_current(), cpus.all, room)
    items = [{"which": which, "number": number} for which, number in turns]
    rows = ray.data.from_items(
        items, override_num_blocks=len(items)
    )  # its rows exist already; those of a range are read by tasks
    return rows.map_batches(read_row, batch_size=1, batch_format="numpy", num_cpus=cpus.task, zero_copy_batch=True)


_ExecutionCallback: Any = EXECUTION_CALLBACK.load()


class _Pause(_ExecutionCallback):
    """Keeps Ray Data's scheduling loop from spinning while there is nothing to do, which takes a whole core."""

    def __init__(self) -> None:
        self._last = 0.0

    def on_execution_step(self, executor: Any) -> None:
        """Called by Ray Data after each turn of its loop."""
        time.sleep(max(0.0, self._last + _TURN_S - time.monotonic()))
        self._last = time.monotonic()


def configure(context: DataContext, cpus: float, object_store_bytes: float | None = None) -> None:
    """Keep the order of rows, stay within ``cpus`` and ``object_store_bytes``, and keep quiet."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is reported once, in our words
    context.enable_progress_bars = False
    context.custom_execution_callback_classes = [_Pause]
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(cpu=cpus, object_store_memory=object_store_bytes)


@lru_cache(maxsize=4)
def _manifest(ref: Any) -> Manifest:
    return ray.get(ref)
