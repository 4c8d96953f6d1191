"""Balanced sampling as a pure function: every class is drawn equally often, and within a class every sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raytrain.data.permutation import Int64s, mix, permute

_BALANCE_STREAM = 2  # keeps the order within a class apart from the order of the positions


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
