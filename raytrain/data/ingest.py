"""Reading images with Ray Data: plan rows in, blocks of decoded images out, in order.

A row of the pipeline is the number of a block; the map stage asks the plan which samples stand in it, fetches them
concurrently and decodes them. So there is no listing, no shuffle and no barrier in it, and one execution spans epochs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, ExecutionResources

from raytrain.data.decode import ImageShape, Reader
from raytrain.data.manifest import Manifest
from raytrain.data.order import CacheOrder, WorkerOrder
from raytrain.data.plan import Int64s
from raytrain.data.shares import Block, Prefetch
from raytrain.data.storage import Store

BLOCK_ROWS = 512
PACKED_BLOCK_ROWS = 2048  # what reads a shard had better use much of it
_ALONE_BLOCKS = 3  # read before a pipeline starts
_HEAD_BLOCKS = 16  # read by plain tasks, which start at once, while a pipeline starts, which takes seconds
_HEAD_TASKS = 2  # of them asked for at a time
_BLOCK_BYTES = 32 << 20
_BLOCKS_PER_EXECUTION = 4096  # Ray Data plans every task of an execution before the first one starts


@dataclass(frozen=True)
class ImageSet:
    """What a data task needs to read images of one manifest."""

    store: Store
    shape: ImageShape
    manifest: Any  # ObjectRef[Manifest]: one copy a node, however many tasks
    num_images: int
    monitor: Any  # the run's actor, told of images that cannot be read
    packed: bool = False

    @property
    def rows_per_block(self) -> int:
        """Images that travel together."""
        return max(1, min(PACKED_BLOCK_ROWS if self.packed else BLOCK_ROWS, _BLOCK_BYTES // self.shape.num_bytes))


@dataclass(frozen=True)
class DataCpus:
    """CPUs that one pipeline may use, and how many of them one of its tasks takes."""

    pipeline: float
    task: float


def block_refs(images: ImageSet, order: WorkerOrder | CacheOrder, cpus: DataCpus, first: int = 0) -> Iterator[Any]:
    """Object references of the blocks of ``order`` from number ``first`` on, in order, as they are read."""
    alone, head = (min(first + count, len(order)) for count in (_ALONE_BLOCKS, _HEAD_BLOCKS))
    yield from _by_tasks(images, order, cpus, range(first, alone))
    piped = Prefetch(_by_pipelines(images, order, cpus, head), depth=2)  # starts now
    try:
        yield from _by_tasks(images, order, cpus, range(alone, head))
        yield from piped
    finally:
        piped.close()


def blocks(images: ImageSet, order: WorkerOrder, cpus: DataCpus) -> Iterator[Block]:
    """The blocks of ``order``, in order."""
    refs = Prefetch(block_refs(images, order, cpus), depth=2)
    try:
        for ref in refs:
            yield to_block(ray.get(ref), images.shape)
    finally:
        refs.close()


def _by_tasks(images: ImageSet, order: WorkerOrder | CacheOrder, cpus: DataCpus, numbers: range) -> Iterator[Any]:
    read = ray.remote(_read_numbered).options(num_cpus=cpus.task)
    refs: deque[Any] = deque()
    for number in numbers:
        refs.append(read.remote(images, order, number))
        if len(refs) > _HEAD_TASKS:
            ray.wait([refs[0]], fetch_local=False)
            yield refs.popleft()
    yield from refs


def _read_numbered(images: ImageSet, order: WorkerOrder | CacheOrder, number: int) -> pa.Table:
    return read_table(images, order.samples(number))


def _by_pipelines(images: ImageSet, order: WorkerOrder | CacheOrder, cpus: DataCpus, first: int) -> Iterator[Any]:
    for start in range(first, len(order), _BLOCKS_PER_EXECUTION):
        count = min(_BLOCKS_PER_EXECUTION, len(order) - start)
        for bundle in _pipeline(images, order.samples, start, count, cpus).iter_internal_ref_bundles():
            yield from bundle.block_refs


def warm_up(cpus: DataCpus) -> None:
    """Start the processes that pipelines need, which takes many seconds, while nobody waits for them yet."""
    configure(DataContext.get_current(), cpus.pipeline)
    count = max(1, round(cpus.pipeline / cpus.task))
    with suppress(Exception):  # a run that ends before it takes Ray away from it
        ray.data.range(count, override_num_blocks=count).map_batches(_import_all, batch_size=1, num_cpus=cpus.task).materialize()


def _import_all(row: Any) -> Any:
    import raytrain.data.bucket  # noqa: F401

    return row


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
    pixels, bad = Reader(images.store, images.shape).read(wanted)
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


def _pipeline(images: ImageSet, samples_of: Callable[[int], Int64s], first: int, count: int, cpus: DataCpus) -> ray.data.Dataset:
    def read_block(row: Any) -> Any:
        return read_table(images, samples_of(first + int(row["id"][0])))

    configure(DataContext.get_current(), cpus.pipeline)
    numbers = ray.data.range(count, override_num_blocks=count)
    return numbers.map_batches(read_block, batch_size=1, batch_format="numpy", num_cpus=cpus.task, zero_copy_batch=True)


def configure(context: DataContext, cpus: float) -> None:
    """Keep the order of rows, stay within ``cpus``, and keep quiet."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(cpu=cpus)


@lru_cache(maxsize=4)
def _manifest(ref: Any) -> Manifest:
    return ray.get(ref)
