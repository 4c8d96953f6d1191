"""A worker's local batches, assembled from blocks ahead of time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from raytrain.data.blocks import Block, CachedBlocks
from raytrain.data.plan.batch_plan import GlobalBatch
from raytrain.data.plan.partition import Partition
from raytrain.data.plan.permutation import Int64s

T = TypeVar("T")


@dataclass(frozen=True)
class LocalBatch:
    """One worker's slice of a global batch, without the images that could not be read."""

    batch: GlobalBatch
    images: npt.NDArray[np.uint8]  # (m, H, W, C)
    labels: Int64s  # (m,)
    samples: Int64s  # (m,), indices into the manifest
    draws: Int64s  # (m,), what random numbers depend on: see BatchPlan.samples
    part_sizes: tuple[int, ...]  # how many of the m are in each part of the global batch


def batches_from_stream(partition: Partition, blocks: Iterable[Block], first_step: int) -> Iterator[LocalBatch]:
    """Cut the worker's blocks, which arrive in its order, into local batches from ``first_step`` to the plan's end."""
    source = iter(blocks)
    remaining: list[Block] = []
    for step in range(first_step, partition.plan.num_steps):
        batch = partition.plan.batch(step)
        rows, remaining = _next_rows(sum(partition.part_sizes(batch)), remaining, source)
        yield _local_batch(partition, batch, rows)


def batches_from_cache(partition: Partition, blocks: CachedBlocks, first_step: int) -> Iterator[LocalBatch]:
    """Gather the worker's local batches from a data set in memory, from ``first_step`` to the plan's end."""
    for step in range(first_step, partition.plan.num_steps):
        batch = partition.plan.batch(step)
        samples = partition.local_samples(batch)
        yield _local_batch(partition, batch, [blocks.gather(samples)] if len(samples) else [])


def _next_rows(count: int, remaining: list[Block], source: Iterator[Block]) -> tuple[list[Block], list[Block]]:
    """``count`` rows from the ``remaining`` ones and the blocks that follow, and the rows that then remain."""
    rows: list[Block] = []
    while count > 0:
        block = remaining.pop() if remaining else next(source)
        head, tail = block.split(min(count, len(block)))
        rows.append(head)
        count -= len(head)
        remaining = [tail] if len(tail) else []
    return rows, remaining


def _local_batch(partition: Partition, batch: GlobalBatch, blocks: list[Block]) -> LocalBatch:
    part_sizes: Sequence[int] = partition.part_sizes(batch)
    if not blocks:
        empty = np.empty(0, np.int64)
        return LocalBatch(batch, np.empty((0, 0, 0, 0), np.uint8), empty, empty, empty, tuple(part_sizes))
    images = np.concatenate([block.images for block in blocks]) if len(blocks) > 1 else blocks[0].images
    labels = np.concatenate([block.labels for block in blocks])
    draws = np.concatenate([block.samples for block in blocks])
    readable = labels >= 0
    if not readable.all():
        images, labels, draws = images[readable], labels[readable], draws[readable]
        part_sizes = [int(part.sum()) for part in np.split(readable, np.cumsum(part_sizes)[:-1])]
    return LocalBatch(batch, images, labels, draws % partition.plan.num_samples, draws, tuple(part_sizes))


class Prefetch(Iterator[T]):
    """The items of ``items``, produced by a thread up to ``depth`` ahead, starting now.

    An exception is raised where its item would have come. The thread closes ``items`` (a generator's ``finally`` runs
    there) when they are exhausted or :meth:`close` was called.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True, name="prefetch")
        self._thread.start()

    def __next__(self) -> T:
        item = self._ready.get()
        if isinstance(item, _End):
            self._ready.put(item)  # so that every further call raises it too
            raise item.error
        return item

    def close(self, wait_s: float = 0.0) -> None:
        """Stop producing, and wait up to ``wait_s`` seconds for the thread; the item in production may take longer."""
        self._closed.set()
        self._thread.join(wait_s)

    def _produce(self) -> None:
        try:
            for item in self._items:
                if not self._offer(item):
                    break
            getattr(self._items, "close", lambda: None)()  # generators have it
            self._offer(_End(StopIteration()))
        except BaseException as error:
            self._offer(_End(error))

    def _offer(self, item: T | _End) -> bool:
        """Put an item into the queue; False if nobody wants it any more."""
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return True
        return False


@dataclass(frozen=True)
class _End:
    """Marks the end of the items."""

    error: BaseException
