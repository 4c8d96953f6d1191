"""The division of global batches over workers, and of a worker's draws into blocks.

:mod:`raytrain.data.plan.batch_plan` says how both belong together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from raytrain.data.plan.batch_plan import BatchPlan, GlobalBatch
from raytrain.data.plan.permutation import Int64s


@dataclass(frozen=True)
class Partition:
    """One worker's local batches: of each microbatch a contiguous slice, sized by the worker's load.

    The local batches of an epoch, one after the other, are the worker's rows. Rows can be read in blocks of any length.
    """

    plan: BatchPlan
    rank: int
    loads: Sequence[float]

    @property
    def rows_per_epoch(self) -> int:
        """Number of draws that the worker reads in an epoch."""
        return self._last_batch_row + len(self._last.indices)

    def first_row(self, index: int) -> int:
        """Return the first row of the epoch's step number ``index``."""
        return index * len(self._full.indices)

    def step_of_row(self, row: int) -> int:
        """Return the number, within the epoch, of the step that uses ``row``."""
        return self.plan.steps_per_epoch - 1 if row >= self._last_batch_row else row // len(self._full.indices)

    def local_draws(self, batch: GlobalBatch) -> Int64s:
        """Return the draws of the worker's local batch, int64 (n,), in their order."""
        return self.plan.draws(batch.epoch, batch.start + self._slice(batch).indices)

    def microbatch_sizes(self, batch: GlobalBatch) -> tuple[int, ...]:
        """Return the worker's number of samples in each microbatch (see :meth:`BatchPlan.microbatch_sizes`)."""
        return self._slice(batch).microbatch_sizes

    def row_draws(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the draws of the rows ``start`` to ``stop`` of ``epoch``, or to the epoch's last row."""
        # All steps but the last one have the same slice, so that a row says its step and its index in the slice.
        full, last = self._full.indices, self._last.indices
        rows = np.arange(start, min(stop, self.rows_per_epoch), dtype=np.int64)
        before_last = rows < self._last_batch_row
        step, row = np.divmod(rows[before_last], max(len(full), 1))
        # The last global batch is shorter, and has a slice of its own.
        last_start = (self.plan.steps_per_epoch - 1) * self.plan.batch_size
        last_positions = last_start + last[rows[~before_last] - self._last_batch_row]
        return self.plan.draws(epoch, np.concatenate([step * self.plan.batch_size + full[row], last_positions]))

    @property
    def _last_batch_row(self) -> int:
        return self.first_row(self.plan.steps_per_epoch - 1)

    def _slice(self, batch: GlobalBatch) -> _LocalSlice:
        return self._last if batch.stop == self.plan.num_samples else self._full

    @cached_property
    def _full(self) -> _LocalSlice:
        # With more images in a batch than there are, the only step of an epoch is its last one.
        return _local_slice(self, min(self.plan.batch_size, self.plan.num_samples))

    @cached_property
    def _last(self) -> _LocalSlice:
        return _local_slice(self, self.plan.last_batch_size)


@dataclass(frozen=True)
class _LocalSlice:
    """Which samples of a global batch of a given size belong to one worker."""

    indices: Int64s  # from 0 within the global batch, (n,)
    microbatch_sizes: tuple[int, ...]


def _local_slice(partition: Partition, batch_size: int) -> _LocalSlice:
    """Return a worker's rows of a global batch of this size: a contiguous slice of each microbatch."""
    slices: list[Int64s] = []
    start = 0
    for microbatch_size in partition.plan.microbatch_sizes(batch_size):
        sizes = partition_sizes(microbatch_size, partition.loads)
        first = start + sum(sizes[: partition.rank])
        slices.append(np.arange(first, first + sizes[partition.rank], dtype=np.int64))
        start += microbatch_size
    return _LocalSlice(np.concatenate(slices), tuple(map(len, slices)))


def partition_sizes(num_samples: int, loads: Sequence[float]) -> list[int]:
    """Divide samples in proportion to loads, none below 0; the remainder goes one by one to the first with a load."""
    total = sum(loads)
    if total <= 0 or min(loads) < 0:
        raise ValueError(f"Worker loads are {list(loads)}; each must be at least 0, and one must be above 0.")
    # The small term keeps 0.1 + 0.2 from costing a sample: floor(2.9999999999999996) would be 2.
    sizes = [int(num_samples * load / total + 1e-9) for load in loads]
    working = [rank for rank, load in enumerate(loads) if load > 0]
    for rank in working[: num_samples - sum(sizes)]:
        sizes[rank] += 1
    return sizes


_ROWS, _PACKED_ROWS = 512, 2048  # whoever reads a shard should use much of it
BLOCK_BYTES = 64 << 20  # a task, and those who pass a block on, take the same time for one of any size


def rows_per_block(image_bytes: int, *, packed: bool, most_bytes: int) -> int:
    """Return how many images are in one block of at most ``most_bytes``, for decoded images of this size."""
    return max(1, min(_PACKED_ROWS if packed else _ROWS, most_bytes // image_bytes))


@dataclass(frozen=True)
class WorkerOrder:
    """Which draws each block contains, for one worker that reads its partition epoch after epoch."""

    partition: Partition
    first_step: int
    rows_per_block: int

    def __len__(self) -> int:
        plan = self.partition.plan
        epochs = -(-plan.num_steps // plan.steps_per_epoch)  # rounded up
        return max(0, (epochs - self._first_epoch) * self._blocks_per_epoch - self._skipped_blocks)

    def draws(self, number: int) -> Int64s:
        """Return the draws of block ``number``; the first block begins with the local batch of the first step."""
        epoch, index = divmod(number + self._skipped_blocks, self._blocks_per_epoch)
        start = index * self.rows_per_block
        # The first step may begin in the middle of a block. If this worker has no draws left in its first epoch, all
        # blocks of that epoch are skipped, and block 0 is a whole one of the next epoch.
        if number == 0 and epoch == 0:
            start = self._first_row
        stop = (index + 1) * self.rows_per_block
        return self.partition.row_draws(self._first_epoch + epoch, start, stop)

    def epoch(self, number: int) -> int:
        """Return the epoch that block ``number`` is read for."""
        return self._first_epoch + (number + self._skipped_blocks) // self._blocks_per_epoch

    def priority(self, number: int) -> int:
        """Return the step that first needs block ``number``, which is comparable between workers of different loads."""
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
        return -(-self.partition.rows_per_epoch // self.rows_per_block)  # rounded up


@dataclass(frozen=True)
class CacheOrder:
    """Which samples each block of a cached data set contains: each once, starting with those of ``first_step``."""

    plan: BatchPlan
    first_step: int
    rows_per_block: int

    def __len__(self) -> int:
        return -(-self.plan.num_samples // self.rows_per_block)  # rounded up

    def draws(self, number: int) -> Int64s:
        """Return the draws of block ``number``: its samples, for each comes once."""
        start = number * self.rows_per_block
        return self._in_rows(np.arange(start, min(start + self.rows_per_block, self.plan.num_samples), dtype=np.int64))

    def row_of_sample(self) -> Int64s:
        """Return in which row of the whole data set each sample is, (num_samples,)."""
        rows = np.arange(self.plan.num_samples, dtype=np.int64)
        row_of_sample = np.empty_like(rows)
        row_of_sample[self._in_rows(rows)] = rows
        return row_of_sample

    def epoch(self, number: int) -> int:
        """Return the first epoch that uses block ``number``; later ones use it again."""
        return self.plan.batch(self.first_step).epoch

    def priority(self, number: int) -> int:
        """Return ``number``: blocks are needed in the order of their numbers."""
        return number

    def _in_rows(self, rows: Int64s) -> Int64s:
        """Return the samples that are kept in ``rows``: in the order in which the first step's epoch needs them."""
        first = self.plan.batch(self.first_step)
        return self.plan.samples_once(first.epoch, (first.start + rows) % self.plan.num_samples)


BlockOrder = WorkerOrder | CacheOrder


class BlockRef(NamedTuple):
    """One block of one of several orders."""

    order: int  # index of the order
    number: int  # number of the block in that order


def interleave(orders: Sequence[BlockOrder]) -> Iterator[BlockRef]:
    """Yield the blocks of all ``orders`` in the order in which they are needed."""
    merged = heapq.merge(*(_by_priority(index, order) for index, order in enumerate(orders)))
    return (BlockRef(index, number) for _, index, number in merged)


def _by_priority(index: int, order: BlockOrder) -> Iterator[tuple[int, int, int]]:
    return ((order.priority(number), index, number) for number in range(len(order)))
