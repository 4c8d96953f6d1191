"""Samples of each block, in a worker's stream and in a cache."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raytrain.data.plan.batch_plan import BatchPlan, Cursor
from raytrain.data.plan.partition import Partition
from raytrain.data.plan.permutation import Int64s

_ROWS, _PACKED_ROWS = 512, 2048  # whoever reads a shard should use much of it
_BLOCK_BYTES = 32 << 20


def rows_per_block(image_bytes: int, *, packed: bool) -> int:
    """Images in one block, for decoded images of this size."""
    return max(1, min(_PACKED_ROWS if packed else _ROWS, _BLOCK_BYTES // image_bytes))


@dataclass(frozen=True)
class WorkerOrder:
    """Which samples each block contains, for one worker that reads its partition epoch after epoch."""

    partition: Partition
    first_step: int
    rows_per_block: int

    def __len__(self) -> int:
        plan = self.partition.plan
        epochs = -(-plan.num_steps // plan.steps_per_epoch)
        return max(0, (epochs - self._first_epoch) * self._blocks_per_epoch - self._skipped_blocks)

    def samples(self, number: int) -> Int64s:
        """Samples of block ``number``; the first block begins with the local batch of the first step."""
        epoch, index = divmod(number + self._skipped_blocks, self._blocks_per_epoch)
        start = index * self.rows_per_block
        if number == 0 and epoch == 0:  # unless the worker has nothing left to do in its first epoch
            start = self._first_row
        stop = (index + 1) * self.rows_per_block
        return self.partition.row_samples(self._first_epoch + epoch, start, stop)

    def epoch(self, number: int) -> int:
        """The epoch that block ``number`` is read for."""
        return self._first_epoch + (number + self._skipped_blocks) // self._blocks_per_epoch

    def priority(self, number: int) -> int:
        """The step that first needs block ``number``. Steps are comparable between workers of different loads."""
        epoch, index = divmod(number + self._skipped_blocks, self._blocks_per_epoch)
        first_step = (self._first_epoch + epoch) * self.partition.plan.steps_per_epoch
        return first_step + self.partition.step_of_row(index * self.rows_per_block)

    @property
    def _first_epoch(self) -> int:
        return self.first_step // self.partition.plan.steps_per_epoch

    @property
    def _first_row(self) -> int:
        return self.partition.first_row(self.first_step % self.partition.plan.steps_per_epoch)

    @property
    def _skipped_blocks(self) -> int:
        if self._first_row == self.partition.rows_per_epoch:  # the epoch's last batch has no sample for this worker
            return self._blocks_per_epoch
        return self._first_row // self.rows_per_block

    @property
    def _blocks_per_epoch(self) -> int:
        return -(-self.partition.rows_per_epoch // self.rows_per_block)


@dataclass(frozen=True)
class CacheOrder:
    """Which samples each block of a cached data set contains: each once, starting at the cursor ``origin``."""

    plan: BatchPlan
    origin: Cursor
    rows_per_block: int

    def __len__(self) -> int:
        return -(-self.plan.num_samples // self.rows_per_block)

    def samples(self, number: int) -> Int64s:
        """Samples of block ``number``."""
        start = number * self.rows_per_block
        return self._in_rows(np.arange(start, min(start + self.rows_per_block, self.plan.num_samples), dtype=np.int64))

    def row_of_sample(self) -> Int64s:
        """In which row of the whole data set each sample is, (num_samples,)."""
        rows = np.arange(self.plan.num_samples, dtype=np.int64)
        row_of_sample = np.empty_like(rows)
        row_of_sample[self._in_rows(rows)] = rows
        return row_of_sample

    def epoch(self, number: int) -> int:
        """The first epoch that uses block ``number``; later ones use it again."""
        return self.origin.epoch

    def priority(self, number: int) -> int:
        """Blocks are needed in the order of their numbers."""
        return number

    def _in_rows(self, rows: Int64s) -> Int64s:
        return self.plan.each_once(self.origin.epoch, (self.origin.position + rows) % self.plan.num_samples)


BlockOrder = WorkerOrder | CacheOrder


class BlockRef(NamedTuple):
    """One block of one of several orders."""

    order: int
    """Index of the order."""
    number: int
    """Number of the block in that order."""


def interleave(orders: Sequence[BlockOrder]) -> Iterator[BlockRef]:
    """The blocks of all ``orders`` in the order in which they are needed, computed lazily."""
    merged = heapq.merge(*(_by_priority(index, order) for index, order in enumerate(orders)))
    return (BlockRef(index, number) for _, index, number in merged)


def _by_priority(index: int, order: BlockOrder) -> Iterator[tuple[int, int, int]]:
    return ((order.priority(number), index, number) for number in range(len(order)))
