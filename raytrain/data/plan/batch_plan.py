"""Samples of each global batch, each once an epoch, or every class equally often.

The plan is a pure function: ``(seed, epoch, position) -> sample`` is a keyed pseudo-random permutation, so any position
of any epoch is found in constant time and memory, and the order does not depend on the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raytrain.data.plan.permutation import Int64s, ShardShuffle, mix, permute

_BALANCE_STREAM = 2  # keeps the order within a class apart from the order of the positions


@dataclass(frozen=True)
class GlobalBatch:
    """The global batch of one step: positions ``start`` to ``stop`` of an epoch."""

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
    """The global batches of a run: positions ``[k*B, (k+1)*B)`` of each epoch. The last one is shorter, never dropped.

    A global batch is computed in ``accumulate`` parts, one after the other, and each part is divided over the workers.
    So which samples are together in a part does not depend on the number of workers either.
    """

    num_samples: int
    batch_size: int
    epochs: int
    seed: int
    shuffle: bool = True
    max_steps: int | None = None
    accumulate: int = 1
    shard_shuffle: ShardShuffle | None = None
    """The order of samples in packed shards; None if each sample is an object of its own."""
    balance: ClassBalance | None = None  # draws every class equally often; None if each sample comes once in each epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps that use every sample once."""
        return -(-self.num_samples // self.batch_size)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def last_batch_size(self) -> int:
        """Samples in the last global batch of an epoch."""
        return self.num_samples - (self.steps_per_epoch - 1) * self.batch_size

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of ``step`` (counted from 0)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        return GlobalBatch(step, epoch, start, min(start + self.batch_size, self.num_samples))

    def samples(self, epoch: int, positions: Int64s) -> Int64s:
        """Samples (indices into the manifest, int64) at ``positions`` of ``epoch``; same shape as ``positions``.

        With a ``balance`` a sample may come several times in an epoch. What is returned is then a draw: the sample plus
        ``num_samples`` for each earlier time. Random numbers depend on the draw, so that it is augmented differently.
        """
        slots = self.each_once(epoch, positions)
        return slots if self.balance is None else self.balance.draws(slots, epoch, self.seed)

    def each_once(self, epoch: int, positions: Int64s) -> Int64s:
        """The same as :meth:`samples` without ``balance``: an order in which each sample comes once in an epoch."""
        key = mix(self.seed, epoch) if self.shuffle else None
        if self.shard_shuffle is not None:
            return self.shard_shuffle.samples(positions, self.batch_size, key)
        return positions if key is None else permute(positions, self.num_samples, key=key)

    def batch_samples(self, batch: GlobalBatch) -> Int64s:
        """All samples of a global batch in their order, int64 (batch.size,), as :meth:`samples` gives them."""
        return self.samples(batch.epoch, np.arange(batch.start, batch.stop, dtype=np.int64))

    def part_sizes(self, batch_size: int) -> list[int]:
        """Samples in each of the ``accumulate`` parts of a global batch of ``batch_size``.

        The remainder goes one by one to the first parts. Parts that would be empty are left out.
        """
        size, remainder = divmod(batch_size, self.accumulate)
        sizes = [size + 1] * remainder + [size] * (self.accumulate - remainder)
        return [size for size in sizes if size]


@dataclass(frozen=True, eq=False)
class ClassBalance:
    """The samples of K classes, each of which has at least one.

    An epoch of N positions has N // K draws of each class, and one more of each of the first N % K classes. A class is
    drawn round by round, over the epochs: in a round each of its samples comes once, in a random order. So after any
    number of epochs two samples of a class differ by at most one in how often they came.
    """

    members: Int64s  # (N,), samples, class after class
    sizes: Int64s  # (K,), samples in each class

    @classmethod
    def of(cls, labels: npt.NDArray[np.integer]) -> ClassBalance:
        """The balance of samples with these ``labels``, (N,)."""
        sizes = np.bincount(labels)
        return cls(np.argsort(labels, kind="stable"), sizes[sizes > 0].astype(np.int64))

    def draws(self, slots: Int64s, epoch: int, seed: int) -> Int64s:
        """The draws at ``slots``, int64 (n,), a permutation of an epoch's positions (see :meth:`BatchPlan.samples`)."""
        num_samples, num_classes = len(self.members), len(self.sizes)
        quotas = num_samples // num_classes + (np.arange(num_classes) < num_samples % num_classes)  # (K,)
        last_slots, last_members = np.cumsum(quotas), np.cumsum(self.sizes)
        label = np.searchsorted(last_slots, slots, "right")  # (n,)
        quota, size = quotas[label], self.sizes[label]
        number = epoch * quota + slots - (last_slots[label] - quota)  # of this draw, in all draws of the class
        round_, place = np.divmod(number, size)
        chosen = permute(place, size, key=mix(seed, _BALANCE_STREAM), tweak=round_ * num_classes + label)
        num_earlier = round_ - epoch * quota // size  # draws of the same sample in this epoch
        return self.members[last_members[label] - size + chosen] + num_samples * num_earlier
