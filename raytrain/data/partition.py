"""A worker's shares of the global batches, from blocks of decoded images. Knows neither Ray nor torch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from raytrain.data.batch_plan import BatchPlan, Cursor, EpochPartition, GlobalBatch, Int64s

T = TypeVar("T")


@dataclass(frozen=True)
class LocalBatch:
    """One worker's part of a global batch; images that could not be read are left out."""

    batch: GlobalBatch
    images: npt.NDArray[np.uint8]  # (m, H, W, C)
    labels: Int64s  # (m,)
    samples: Int64s  # (m,), indices into the manifest
    part_sizes: tuple[int, ...]  # how many of the m are in each part that the batch is computed in


@dataclass(frozen=True)
class Block:
    """Decoded images that travel together; a label below 0 marks one that could not be read."""

    images: npt.NDArray[np.uint8]  # (n, H, W, C)
    labels: Int64s  # (n,)
    samples: Int64s  # (n,)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Partition:
    """What decides a worker's part of each batch."""

    plan: BatchPlan
    rank: int
    loads: Sequence[float]

    @cached_property
    def epoch_partition(self) -> EpochPartition:
        """The shares of an epoch in a row."""
        return self.plan.epoch_partition(self.rank, self.loads)


def batches_from_stream(shares: Partition, blocks: Iterable[Block], first_step: int) -> Iterator[LocalBatch]:
    """Cut the worker's blocks, which come in its order, into shares, from ``first_step`` to the end of the plan."""
    source = iter(blocks)
    left: list[Block] = []
    for step in range(first_step, shares.plan.num_steps):
        batch = shares.plan.batch(step)
        sizes = shares.epoch_partition.part_sizes(batch)
        taken, left = _take(sum(sizes), left, source)
        yield _share(batch, taken, sizes)


class CachedBlocks:
    """A whole data set as blocks in memory; row ``r`` of them is position ``origin.position + r`` of epoch ``origin.epoch``.

    ``block(i)`` gives block ``i`` and waits until it is there, so that training starts with the first block.
    """

    def __init__(self, block: Callable[[int], Block], rows_per_block: int, plan: BatchPlan, origin: Cursor) -> None:
        self._block = block
        self._rows_per_block = rows_per_block
        positions = (origin.position + np.arange(plan.num_samples, dtype=np.int64)) % plan.num_samples
        self._row_of_sample = np.empty(plan.num_samples, np.int64)
        self._row_of_sample[plan.samples(origin.epoch, positions)] = np.arange(plan.num_samples)

    def gather(self, samples: Int64s) -> Block:
        """The images of ``samples``, in their order, copied out of the blocks."""
        rows = self._row_of_sample[samples]
        order = np.argsort(rows, kind="stable")
        numbers, starts = np.unique(rows[order] // self._rows_per_block, return_index=True)
        images: npt.NDArray[np.uint8] | None = None
        labels = np.empty(len(samples), np.int64)
        for number, places in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            block = self._block(number)
            within = rows[places] - number * self._rows_per_block
            if images is None:
                images = np.empty((len(samples), *block.images.shape[1:]), np.uint8)
            images[places] = block.images[within]
            labels[places] = block.labels[within]
        assert images is not None
        return Block(images, labels, samples)


def batches_from_cache(shares: Partition, blocks: CachedBlocks, first_step: int) -> Iterator[LocalBatch]:
    """The worker's shares out of a data set in memory, from ``first_step`` to the end of the plan."""
    for step in range(first_step, shares.plan.num_steps):
        batch = shares.plan.batch(step)
        samples = shares.epoch_partition.share(batch)
        yield _share(batch, [blocks.gather(samples)] if len(samples) else [], shares.epoch_partition.part_sizes(batch))


class Prefetch(Iterator[T]):
    """The same items, made by a thread up to ``depth`` ahead, from now on; an error comes where its item would have come.

    What ``items`` holds open is closed by that thread, when they have ended or nobody wants more.
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
            self._ready.put(item)  # for whoever asks again
            raise item.error
        return item

    def close(self, wait_s: float = 0.0) -> None:
        """Make no more items; the one that is being made may take longer than the ``wait_s`` seconds that this waits for it."""
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
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return True
        return False


@dataclass(frozen=True)
class _End:
    """What comes after the last item."""

    error: BaseException


def _take(count: int, left: list[Block], source: Iterator[Block]) -> tuple[list[Block], list[Block]]:
    """``count`` rows from what is left and the blocks that follow, and what is then left."""
    taken: list[Block] = []
    while count > 0:
        block = left.pop() if left else next(source)
        head, tail = _cut(block, min(count, len(block)))
        taken.append(head)
        count -= len(head)
        left = [tail] if len(tail) else []
    return taken, left


def _cut(block: Block, count: int) -> tuple[Block, Block]:
    parts = [Block(block.images[s], block.labels[s], block.samples[s]) for s in (slice(None, count), slice(count, None))]
    return parts[0], parts[1]


def _share(batch: GlobalBatch, blocks: list[Block], part_sizes: Sequence[int]) -> LocalBatch:
    if not blocks:
        nothing = np.empty(0, np.int64)
        return LocalBatch(batch, np.empty((0, 0, 0, 0), np.uint8), nothing, nothing, tuple(part_sizes))
    images = np.concatenate([block.images for block in blocks]) if len(blocks) > 1 else blocks[0].images
    labels = np.concatenate([block.labels for block in blocks])
    samples = np.concatenate([block.samples for block in blocks])
    used = labels >= 0
    if not used.all():
        images, labels, samples = images[used], labels[used], samples[used]
        part_sizes = [int(part.sum()) for part in np.split(used, np.cumsum(part_sizes)[:-1])]
    return LocalBatch(batch, images, labels, samples, tuple(part_sizes))
