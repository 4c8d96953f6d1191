"""Which samples stand in which block, for a worker that streams its shares and for a data set that is cached."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raytrain.data.batch_plan import BatchPlan, Cursor, EpochPartition, Int64s
from raytrain.data.partition import Partition


@dataclass(frozen=True)
class WorkerOrder:
    """Which samples stand in which block, for one worker that reads its shares epoch after epoch."""

    shares: Partition
    first_step: int
    rows_per_block: int

    def __len__(self) -> int:
        plan = self.shares.plan
        epochs = -(-plan.num_steps // plan.steps_per_epoch)
        return max(0, (epochs - self._first_epoch) * self._blocks_per_epoch - self._skipped_blocks)

    def samples(self, number: int) -> Int64s:
        """Samples of block ``number``; the first block begins with the first step's share."""
        epoch, index = divmod(number + self._skipped_blocks, self._blocks_per_epoch)
        start = index * self.rows_per_block
        if number == 0 and epoch == 0:  # not where the worker has nothing left to do in the epoch that it begins in
            start = self._first_row
        stop = (index + 1) * self.rows_per_block
        return self._epoch_partition.samples(self._first_epoch + epoch, start, stop)

    def when(self, number: int) -> int:
        """The step that first needs block ``number``: what workers of different shares have in common."""
        epoch, index = divmod(number + self._skipped_blocks, self._blocks_per_epoch)
        return (self._first_epoch + epoch) * self.shares.plan.steps_per_epoch + self._epoch_partition.index(index * self.rows_per_block)

    @property
    def _epoch_partition(self) -> EpochPartition:
        return self.shares.epoch_partition

    @property
    def _first_epoch(self) -> int:
        return self.first_step // self.shares.plan.steps_per_epoch

    @property
    def _first_row(self) -> int:
        return self._epoch_partition.row(self.first_step % self.shares.plan.steps_per_epoch)

    @property
    def _skipped_blocks(self) -> int:
        if self._first_row == len(self._epoch_partition):  # an epoch's last batch in which the worker has no share
            return self._blocks_per_epoch
        return self._first_row // self.rows_per_block

    @property
    def _blocks_per_epoch(self) -> int:
        return -(-len(self._epoch_partition) // self.rows_per_block)


@dataclass(frozen=True)
class CacheOrder:
    """Which samples stand in which block of a cached data set: those of one epoch, from where training stands."""

    plan: BatchPlan
    origin: Cursor
    rows_per_block: int

    def __len__(self) -> int:
        return -(-self.plan.num_samples // self.rows_per_block)

    def samples(self, number: int) -> Int64s:
        """Samples of block ``number``."""
        start = number * self.rows_per_block
        rows = np.arange(start, min(start + self.rows_per_block, self.plan.num_samples), dtype=np.int64)
        return self.plan.samples(self.origin.epoch, (self.origin.position + rows) % self.plan.num_samples)

    def when(self, number: int) -> int:
        """When block ``number`` is needed: one after the other."""
        return number


Order = WorkerOrder | CacheOrder
Turn = tuple[int, int]
"""The number of an order, and the number of a block in it."""


def in_turn(orders: Sequence[Order]) -> Iterator[Turn]:
    """The blocks of all ``orders`` in the order in which they are needed, made as they are asked for."""
    turns = heapq.merge(*(_turns(which, order) for which, order in enumerate(orders)))
    return ((which, number) for _, which, number in turns)


def _turns(which: int, order: Order) -> Iterator[tuple[int, int, int]]:
    return ((order.when(number), which, number) for number in range(len(order)))
