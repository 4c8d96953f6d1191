"""Reading images with Ray Data: plan rows in, blocks of decoded images out, in order.

A row of the pipeline is the number of a block; the map stage asks the plan which samples stand in it, fetches them
concurrently and decodes them. So there is no listing, no shuffle and no barrier in it, and one execution spans epochs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, ExecutionResources
from ray.data._internal.execution.execution_callback import ExecutionCallback

from raytrain.data.batch_plan import Int64s
from raytrain.data.block_order import Order, Turn, in_turn
from raytrain.data.decode import ImageReader, ImageShape
from raytrain.data.manifest import Manifest
from raytrain.data.partition import Block, Prefetch
from raytrain.storage.base import Store
from raytrain.storage.retry import num_retries

BLOCK_ROWS = 512
PACKED_BLOCK_ROWS = 2048  # what reads a shard had better use much of it
_HEAD_BLOCKS, _HEAD_BYTES = 4, 64 << 20  # of each order, read by plain tasks while a pipeline starts, which takes seconds
_BLOCK_BYTES = 32 << 20
_TURN_S = 0.01
_CLOSE_S = 10.0
_BLOCKS_PER_EXECUTION = 1024  # Ray Data plans every task of an execution before the first one starts


@dataclass(frozen=True)
class ImageSet:
    """What a data task needs to read images of one manifest."""

    store: Store
    shape: ImageShape
    manifest: Any  # ObjectRef[Manifest]: one copy a node, however many tasks
    num_images: int
    monitor: Any  # the run's actor, told of images that cannot be read, and of requests that were repeated
    packed: bool = False

    @property
    def rows_per_block(self) -> int:
        """Images that travel together."""
        return max(1, min(PACKED_BLOCK_ROWS if self.packed else BLOCK_ROWS, _BLOCK_BYTES // self.shape.num_bytes))

    def within(self, num_blocks: int, num_bytes: int) -> int:
        """At most ``num_blocks``, so many that they take at most ``num_bytes``, at least 1."""
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


def block_refs(images: ImageSet, orders: Sequence[Order], cpus: DataCpus, first: int = 0) -> Iterator[tuple[int, Any]]:
    """References of the blocks of all ``orders``, in turn, as they are read: the number of the order, and the reference.

    Those before the turn ``first`` are left out.
    """
    turns = islice(in_turn(orders), first, None)
    head = list(islice(turns, images.within(_HEAD_BLOCKS, _HEAD_BYTES) * len(orders)))
    piped = Prefetch(_by_pipelines(images, orders, cpus, turns), depth=2)  # starts now
    try:
        yield from _by_tasks(images, orders, cpus, head)
        yield from piped
    finally:
        piped.close(_CLOSE_S)  # or its thread asks a cluster that may have ended by then


def _by_tasks(images: ImageSet, orders: Sequence[Order], cpus: DataCpus, turns: Sequence[Turn]) -> Iterator[tuple[int, Any]]:
    read = ray.remote(_read_block).options(num_cpus=cpus.task)
    asked: deque[tuple[int, Any]] = deque()
    running: list[Any] = []
    for which, number in turns:
        if len(running) >= cpus.num_tasks:  # more would wait for CPUs that starting workers want
            _, running = ray.wait(running, num_returns=1, fetch_local=False)
        asked.append((which, read.remote(images, orders[which], number)))
        running.append(asked[-1][1])
        while asked[0][1] not in running:
            yield asked.popleft()
    for which, ref in asked:
        ray.wait([ref], fetch_local=False)
        yield which, ref


def _read_block(images: ImageSet, order: Order, number: int) -> pa.Table:
    return read_table(images, order.samples(number))


def _by_pipelines(images: ImageSet, orders: Sequence[Order], cpus: DataCpus, turns: Iterator[Turn]) -> Iterator[tuple[int, Any]]:
    while chunk := list(islice(turns, _BLOCKS_PER_EXECUTION)):
        refs = (ref for bundle in _pipeline(images, orders, chunk, cpus).iter_internal_ref_bundles() for ref in bundle.block_refs)
        for (which, _), ref in zip(chunk, refs, strict=True):
            yield which, ref


def to_block(table: pa.Table, shape: ImageShape) -> Block:
    """A block out of the table that travels through the object store, without a copy."""
    column = table.column("image").combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    pixels = np.frombuffer(column.buffers()[1], np.uint8)
    start, stop = column.offset * shape.num_bytes, (column.offset + len(column)) * shape.num_bytes
    images = pixels[start:stop].reshape(-1, shape.height, shape.width, shape.channels)
    return Block(images, table.column("label").to_numpy(), table.column("sample").to_numpy())


def read_table(images: ImageSet, samples: Int64s) -> pa.Table:
    """Fetch and decode ``samples``: columns image (H*W*C bytes), label (below 0 where the image cannot be read), sample."""
    wanted = chosen(images, samples)
    labels = wanted.labels.astype(np.int64)
    repeats_before = num_retries()
    pixels, bad = ImageReader(images.store, images.shape).read(wanted)
    if repeats := num_retries() - repeats_before:
        images.monitor.repeated.remote(repeats)
    if bad:
        labels[list(bad)] = -1
        images.monitor.skipped.remote([{"key": wanted.keys[place].as_py(), "reason": reason} for place, reason in bad.items()])
    return to_table(pixels, labels, samples)


def chosen(images: ImageSet, samples: Int64s) -> Manifest:
    """What the manifest says of ``samples``."""
    return _manifest(images.manifest).select(samples)


def to_table(pixels: np.ndarray[Any, np.dtype[np.uint8]], labels: Int64s, samples: Int64s) -> pa.Table:
    """The inverse of :func:`to_block`."""
    kind = pa.binary(pixels[0].size)
    column = pa.FixedSizeBinaryArray.from_buffers(kind, len(pixels), [None, pa.py_buffer(pixels)])
    return pa.table({"image": column, "label": labels, "sample": samples})


def _pipeline(images: ImageSet, orders: Sequence[Order], turns: Sequence[Turn], cpus: DataCpus) -> ray.data.Dataset:
    def read_block(row: Any) -> Any:
        return _read_block(images, orders[int(row["which"][0])], int(row["number"][0]))

    # Read and not yet taken: twice what is being read, and two for each order.
    room = (2 * cpus.num_tasks + 2 * len(orders)) * images.rows_per_block * images.shape.num_bytes
    configure(DataContext.get_current(), cpus.all, room)
    items = [{"which": which, "number": number} for which, number in turns]
    rows = ray.data.from_items(items, override_num_blocks=len(items))  # its rows are there, where a range's are read by tasks
    return rows.map_batches(read_block, batch_size=1, batch_format="numpy", num_cpus=cpus.task, zero_copy_batch=True)


class _Rest(ExecutionCallback):
    """Keeps Ray Data's scheduling loop from turning without a pause while nothing is to be done, which takes a whole core."""

    def __init__(self) -> None:
        self._last = 0.0

    def on_execution_step(self, executor: Any) -> None:
        """Called after each turn."""
        time.sleep(max(0.0, self._last + _TURN_S - time.monotonic()))
        self._last = time.monotonic()


def configure(context: DataContext, cpus: float, object_store_bytes: float | None = None) -> None:
    """Keep the order of rows, stay within ``cpus`` and ``object_store_bytes``, and keep quiet."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is said once, in our words
    context.enable_progress_bars = False
    context.custom_execution_callback_classes = [_Rest]
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(cpu=cpus, object_store_memory=object_store_bytes)


@lru_cache(maxsize=4)
def _manifest(ref: Any) -> Manifest:
    return ray.get(ref)
