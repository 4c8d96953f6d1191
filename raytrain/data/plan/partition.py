"""The division of global batches over workers: which samples each worker reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raytrain.data.plan.batch_plan import BatchPlan, GlobalBatch
from raytrain.data.plan.permutation import Int64s


@dataclass(frozen=True)
class Partition:
    """One worker's local batches: of each part of a global batch a contiguous slice, sized by the worker's load.

    The local batches of an epoch, one after the other, are the worker's rows. Rows can be read in blocks of any length.
    """

    plan: BatchPlan
    rank: int
    loads: Sequence[float]

    @property
    def rows_per_epoch(self) -> int:
        """Samples that the worker reads in an epoch."""
        return self._last_batch_row + len(self._last.indices)

    def first_row(self, index: int) -> int:
        """First row of the epoch's step number ``index``."""
        return index * len(self._full.indices)

    def step_of_row(self, row: int) -> int:
        """Number, within the epoch, of the step that uses ``row``."""
        return self.plan.steps_per_epoch - 1 if row >= self._last_batch_row else row // len(self._full.indices)

    def local_samples(self, batch: GlobalBatch) -> Int64s:
        """Samples of the worker's local batch, int64 (n,), in their order."""
        return self.plan.samples(batch.epoch, batch.start + self._slice(batch).indices)

    def part_sizes(self, batch: GlobalBatch) -> tuple[int, ...]:
        """The worker's number of samples in each part of a global batch (see :meth:`BatchPlan.part_sizes`)."""
        return self._slice(batch).part_sizes

    def row_samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Samples of the rows ``start`` to ``stop`` of ``epoch``, or to the epoch's last row."""
        full, last = self._full.indices, self._last.indices
        rows = np.arange(start, min(stop, self.rows_per_epoch), dtype=np.int64)
        before_last = rows < self._last_batch_row
        step, row = np.divmod(rows[before_last], max(len(full), 1))
        last_start = (self.plan.steps_per_epoch - 1) * self.plan.batch_size
        last_positions = last_start + last[rows[~before_last] - self._last_batch_row]
        return self.plan.samples(epoch, np.concatenate([step * self.plan.batch_size + full[row], last_positions]))

    @property
    def _last_batch_row(self) -> int:
        return self.first_row(self.plan.steps_per_epoch - 1)

    def _slice(self, batch: GlobalBatch) -> _LocalSlice:
        return self._last if batch.stop == self.plan.num_samples else self._full

    @cached_property
    def _full(self) -> _LocalSlice:
        return _local_slice(self, self.plan.batch_size)

    @cached_property
    def _last(self) -> _LocalSlice:
        return _local_slice(self, self.plan.last_batch_size)


@dataclass(frozen=True)
class _LocalSlice:
    """Which samples of a global batch of a given size belong to one worker."""

    indices: Int64s
    """From 0 within the global batch, (n,)."""
    part_sizes: tuple[int, ...]


def _local_slice(partition: Partition, batch_size: int) -> _LocalSlice:
    slices: list[Int64s] = []
    start = 0
    for part_size in partition.plan.part_sizes(batch_size):
        sizes = partition_sizes(part_size, partition.loads)
        first = start + sum(sizes[: partition.rank])
        slices.append(np.arange(first, first + sizes[partition.rank], dtype=np.int64))
        start += part_size
    return _LocalSlice(np.concatenate(slices), tuple(len(each) for each in slices))


def partition_sizes(num_samples: int, loads: Sequence[float]) -> list[int]:
    """Divide samples over workers in proportion to their loads; the remainder goes one by one to the first with a load.

    Raises ``ValueError`` if no load is above 0, or one is below.
    """
    total = sum(loads)
    if total <= 0 or min(loads) < 0:
        raise ValueError(f"Worker loads are {list(loads)}; each must be at least 0, and one must be above 0.")
    # The small term keeps 0.1 + 0.2 from costing a sample: floor(2.9999999999999996) would be 2.
    sizes = [int(num_samples * load / total + 1e-9) for load in loads]
    working = [rank for rank, load in enumerate(loads) if load > 0]
    for rank in working[: num_samples - sum(sizes)]:
        sizes[rank] += 1
    return sizes
