"""Which sample stands where: the order of samples as a pure function, and its division over workers.

``(seed, epoch, position) -> sample`` is a keyed pseudo-random permutation, so any position of any
epoch is found in constant time and memory, and the order knows nothing of the number of workers.
Samples that lie in packed shards are ordered by lanes, so that they are read shard by shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raytrain.data.permutation import Int64s, mix, permute
from raytrain.data.shard_shuffle import ShardShuffle


@dataclass(frozen=True)
class Cursor:
    """Where training stands: ``position`` samples of ``epoch`` have been used after ``step`` steps."""

    step: int = 0
    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class GlobalBatch:
    """One step's global batch: the positions ``start`` to ``stop`` of an epoch."""

    step: int
    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of samples in the global batch."""
        return self.stop - self.start


@dataclass(frozen=True)
class BatchPlan:
    """The global batches of a run: positions ``[k*B, (k+1)*B)`` of each epoch, the last one shorter, never dropped.

    A global batch is computed in ``accumulate`` parts, one after the other, each of them shared out over the workers: which
    samples are together in a part does not depend on the number of workers either.
    """

    num_samples: int
    batch_size: int
    epochs: int
    seed: int
    shuffle: bool = True
    max_steps: int | None = None
    accumulate: int = 1
    lanes: ShardShuffle | None = None
    """How the samples lie in packed shards; None where each lies by itself."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps that use every sample once."""
        return -(-self.num_samples // self.batch_size)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of ``step`` (counted from 0)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        return GlobalBatch(step, epoch, start, min(start + self.batch_size, self.num_samples))

    def cursor(self, step: int) -> Cursor:
        """Where a run stands that has completed ``step`` steps."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return Cursor(step, epoch, index * self.batch_size)

    def samples(self, epoch: int, positions: Int64s) -> Int64s:
        """Samples (indices into the manifest, int64) at ``positions`` of ``epoch``; same shape as ``positions``."""
        key = mix(self.seed, epoch) if self.shuffle else None
        if self.lanes is not None:
            return self.lanes.samples(positions, self.batch_size, key)
        return positions if key is None else permute(positions, self.num_samples, key=key)

    def part_sizes(self, size: int, rank: int, loads: Sequence[float]) -> list[int]:
        """How many samples a worker has in each part of a global batch of ``size``; parts that would be empty are left out."""
        return [split(part, loads)[rank] for part in self._parts(size)]

    def places(self, size: int, rank: int, loads: Sequence[float]) -> Int64s:
        """Where a worker's share stands in a global batch of ``size``: a contiguous slice of each part, sized by load."""
        slices: list[Int64s] = []
        start = 0
        for part in self._parts(size):
            counts = split(part, loads)
            first = start + sum(counts[:rank])
            slices.append(np.arange(first, first + counts[rank], dtype=np.int64))
            start += part
        return slices[0] if len(slices) == 1 else np.concatenate(slices)

    def share(self, batch: GlobalBatch, rank: int, loads: Sequence[float]) -> Int64s:
        """Samples of one worker's share of a global batch."""
        return self.samples(batch.epoch, batch.start + self.places(batch.size, rank, loads))

    def epoch_partition(self, rank: int, loads: Sequence[float]) -> EpochPartition:
        """Everything that one worker reads in an epoch, in its order."""
        sizes = (self.batch_size, self.num_samples - (self.steps_per_epoch - 1) * self.batch_size)
        places, last_places = (self.places(size, rank, loads) for size in sizes)
        parts, last_parts = (tuple(self.part_sizes(size, rank, loads)) for size in sizes)
        return EpochPartition(self, places, last_places, parts, last_parts)

    def _parts(self, size: int) -> list[int]:
        return [part for part in split(size, [1.0] * self.accumulate) if part]


@dataclass(frozen=True)
class EpochPartition:
    """One worker's shares of an epoch, one after the other, so that they can be read in blocks of any length.

    ``places`` says where its share stands in a global batch, ``last_places`` in the last one of an epoch.
    """

    plan: BatchPlan
    places: Int64s
    last_places: Int64s
    _part_sizes: tuple[int, ...]
    _last_part_sizes: tuple[int, ...]

    def __len__(self) -> int:
        return self.row(self.plan.steps_per_epoch - 1) + len(self.last_places)

    def row(self, index: int) -> int:
        """First row of the epoch's step number ``index``."""
        return index * len(self.places)

    def index(self, row: int) -> int:
        """Which of the epoch's steps uses ``row``."""
        last = self.plan.steps_per_epoch - 1
        return last if row >= self.row(last) else row // len(self.places)

    def share(self, batch: GlobalBatch) -> Int64s:
        """Samples of the worker's share of ``batch``; the same as :meth:`BatchPlan.share`."""
        return self.plan.samples(batch.epoch, batch.start + (self.last_places if self._is_last(batch) else self.places))

    def part_sizes(self, batch: GlobalBatch) -> tuple[int, ...]:
        """See :meth:`BatchPlan.part_sizes`."""
        return self._last_part_sizes if self._is_last(batch) else self._part_sizes

    def _is_last(self, batch: GlobalBatch) -> bool:
        return batch.stop == self.plan.num_samples

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Samples of the rows ``start`` to ``stop`` of ``epoch``."""
        rows = np.arange(start, min(stop, len(self)), dtype=np.int64)
        num_full = max(0, min(self.row(self.plan.steps_per_epoch - 1), start + len(rows)) - start)
        full, last = rows[:num_full], rows[num_full:]
        step, within = np.divmod(full, max(len(self.places), 1))
        in_last = last - self.row(self.plan.steps_per_epoch - 1)
        last_start = (self.plan.steps_per_epoch - 1) * self.plan.batch_size
        positions = np.concatenate([step * self.plan.batch_size + self.places[within], last_start + self.last_places[in_last]])
        return self.plan.samples(epoch, positions)


def split(num_samples: int, loads: Sequence[float]) -> list[int]:
    """Divide a batch over workers in proportion to their loads, the remainder one by one to the first that work.

    Raises ``ValueError`` where no load is above 0.
    """
    total = sum(loads)
    if total <= 0 or min(loads) < 0:
        raise ValueError(f"Worker loads are {list(loads)}; each must be at least 0 and one above 0.")
    # The small term keeps 0.1 + 0.2 from costing a sample: floor(2.9999999999999996) would be 2.
    counts = [int(num_samples * load / total + 1e-9) for load in loads]
    working = [rank for rank, load in enumerate(loads) if load > 0]
    for rank in working[: num_samples - sum(counts)]:
        counts[rank] += 1
    return counts
