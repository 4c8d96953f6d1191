"""Which draws are in which step, so that each sample comes once an epoch, or every class equally often.

A run shall train on the same global batches with any number of workers, and after an interruption in any step. So the
plan depends on nothing that happens while it runs: it is a pure function of the seed, the epoch and the position.

- An epoch puts the N samples in an order. No list is shuffled: ``(seed, epoch, position) -> sample`` is a keyed
  pseudo-random permutation (:func:`raytrain.data.plan.permutation.permute`), so that any position of any epoch is found
  in constant time and memory, also with 10⁹ samples.
- Step k of an epoch has the positions ``[k*B, (k+1)*B)``: a global batch. The last one is shorter, and never dropped.
- With ``accumulate``, a global batch is computed in parts, one after the other.
- :class:`raytrain.data.plan.partition.Partition` gives each worker a contiguous slice of each part, sized by its load.
  All slices together are the part, whatever their number.
- The slices of a worker, one after the other, are its rows of the epoch, and blocks are cut from these. So a resume in
  step k begins with the row at which that step does.

For 10 samples, B = 4 and two equal workers, with the positions for the samples that the permutation puts there:

=========  =========  =========  ======  ===================================
step       0          1          2       rows of the epoch, in blocks of 3
=========  =========  =========  ======  ===================================
worker 0   0 1        4 5        8       (0 1 4) (5 8)
worker 1   2 3        6 7        9       (2 3 6) (7 9)
=========  =========  =========  ======  ===================================

Two orders replace the plain permutation where it does not fit. Packed images are read shard by shard, so
:class:`raytrain.data.plan.permutation.ShardShuffle` keeps to few shards at a time. With ``--sampling balanced``, a
:class:`ClassBalance` draws every class equally often, so that a sample may come several times in an epoch. A *draw*
says which time it is; its random numbers (crop, augmentation) depend on it.
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

    A global batch is computed in ``accumulate`` microbatches, one after the other, and each is divided over the
    workers. So which samples are together in a microbatch does not depend on the number of workers either.
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
        """Number of steps that use every sample once."""
        return -(-self.num_samples // self.batch_size)  # rounded up

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run."""
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def last_batch_size(self) -> int:
        """Number of samples in the last global batch of an epoch."""
        return self.num_samples - (self.steps_per_epoch - 1) * self.batch_size

    def batch(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step`` (counted from 0); ``BatchPlan(10, 4, 1, 0).batch(2)`` has 8 and 9."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        return GlobalBatch(step, epoch, start, min(start + self.batch_size, self.num_samples))

    def draws(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the draws at ``positions`` of ``epoch``, int64, in the shape of ``positions``.

        A draw is the sample (a row of the manifest) plus ``num_samples`` for each earlier time that it comes in this
        epoch, which happens only with a ``balance``. Random numbers depend on the draw, so that a sample which comes
        twice is augmented differently. :func:`samples_of` gives the samples.
        """
        slots = self.samples_once(epoch, positions)
        return slots if self.balance is None else self.balance.draws(slots, epoch, self.seed)

    def samples_once(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at ``positions`` of an order in which each comes once: that without ``balance``."""
        key = mix(self.seed, epoch) if self.shuffle else None
        if self.shard_shuffle is not None:
            return self.shard_shuffle.samples(positions, self.batch_size, key)
        return positions if key is None else permute(positions, self.num_samples, key=key)

    def batch_draws(self, batch: GlobalBatch) -> Int64s:
        """Return all draws of a global batch in their order, int64 (batch.size,), as :meth:`draws` gives them."""
        return self.draws(batch.epoch, np.arange(batch.start, batch.stop, dtype=np.int64))

    def microbatch_sizes(self, batch_size: int) -> list[int]:
        """Return the number of samples in each of the ``accumulate`` microbatches of a batch of ``batch_size``.

        The remainder goes one by one to the first microbatches. Those that would be empty are left out.
        """
        size, remainder = divmod(batch_size, self.accumulate)
        sizes = [size + 1] * remainder + [size] * (self.accumulate - remainder)
        return [size for size in sizes if size]


def samples_of(draws: Int64s, num_samples: int) -> Int64s:
    """Return the samples (rows of a manifest of ``num_samples``) that ``draws`` show, in the same shape.

    >>> samples_of(np.array([2, 5, 8]), 4).tolist()
    [2, 1, 0]
    """
    return draws % num_samples


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
        """Return the balance of samples with these ``labels``, (N,)."""
        sizes = np.bincount(labels)
        return cls(np.argsort(labels, kind="stable"), sizes[sizes > 0].astype(np.int64))

    def draws(self, slots: Int64s, epoch: int, seed: int) -> Int64s:
        """Return the draws at ``slots``, int64 (n,): positions of an epoch in random order."""
        num_samples, num_classes = len(self.members), len(self.sizes)
        # Slots of a class follow each other: N // K of them, or one more. Their ends say the class of each slot.
        quotas = num_samples // num_classes + (np.arange(num_classes) < num_samples % num_classes)  # (K,)
        last_slots, last_members = np.cumsum(quotas), np.cumsum(self.sizes)
        label = np.searchsorted(last_slots, slots, "right")  # (n,)
        quota, size = quotas[label], self.sizes[label]
        # Over all epochs, the draws of a class are numbered. A round of as many as it has samples is a permutation.
        number = epoch * quota + slots - (last_slots[label] - quota)  # of this draw, in all draws of the class
        round_, position = np.divmod(number, size)
        chosen = permute(position, size, key=mix(seed, _BALANCE_STREAM), tweak=round_ * num_classes + label)
        num_earlier = round_ - epoch * quota // size  # draws of the same sample in this epoch
        return self.members[last_members[label] - size + chosen] + num_samples * num_earlier
