"""The order of samples that lie in packed shards: random, and such that whoever reads a part of it needs few shards.

The shards of an epoch stand in random order, one after the other, and this sequence is cut into lanes. A global batch takes
its positions lane after lane, and each lane goes through its shards a window at a time, in which samples are shuffled. So a
worker's share, a contiguous slice of every batch, comes from lanes that it has to itself, but for one at each end; and the
order knows nothing of workers.

How many lanes? Where there are more workers than lanes, several read the same shards, which speaks for many. But a worker has
the windows of all of its lanes open at once, and each of its data tasks fetches those that its blocks touch, which speaks for
few. With 32 lanes, windows of 2 and shards of 1 MiB, photographs are fetched about three times an epoch by one worker with many
tasks, once by 8 workers, and four times by 128. Small images are fetched by every task; but a million of them is a gigabyte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from raytrain.data.permutation import Int64s, mix, permute

NUM_LANES = 32
WINDOW_SHARDS = 2


@dataclass(frozen=True, eq=False)
class ShardShuffle:
    """The order of samples of which each shard holds a run: sample 0 is the first of the first shard."""

    shard_sizes: Int64s  # (S,), samples in each shard; none is 0

    def samples(self, positions: Int64s, batch_size: int, key: int | None) -> Int64s:
        """Samples at ``positions`` of an epoch, int64 of the same shape, for global batches of ``batch_size``.

        ``key`` decides the order of shards and of samples; without it, the lanes go through the shards as they are.
        """
        places = lay_out(positions, int(self.shard_sizes.sum()), batch_size)
        return places if key is None else self._shuffled(places, key)

    def _shuffled(self, places: Int64s, key: int) -> Int64s:
        """Samples at ``places`` of the sequence of all shards."""
        firsts, starts = _shard_order(self.shard_sizes.tobytes(), key)
        windows = np.append(starts[:-1:WINDOW_SHARDS], starts[-1])
        window = np.searchsorted(windows, places, "right") - 1
        begins, sizes = windows[window], np.diff(windows)[window]
        places = begins + permute(places - begins, sizes, key=mix(key, 2), tweak=window)
        shard = np.searchsorted(starts, places, "right") - 1
        return firsts[shard] + places - starts[shard]


def lay_out(positions: Int64s, num_samples: int, batch_size: int) -> Int64s:
    """Where ``positions`` of an epoch stand when its lanes are laid end to end: a permutation of ``range(num_samples)``.

    Lane ``l`` of ``L`` has the columns ``[l*b//L, (l+1)*b//L)`` of each batch of ``b`` samples, and holds them step after step.
    """
    num_lanes = min(NUM_LANES, batch_size)
    num_full, short = divmod(num_samples, batch_size)
    step, column = np.divmod(positions, batch_size)
    sizes = np.where(step < num_full, batch_size, short)
    lane = ((column + 1) * num_lanes - 1) // sizes
    left, right = lane * batch_size // num_lanes, (lane + 1) * batch_size // num_lanes
    lane_start = num_full * left + lane * short // num_lanes
    return lane_start + step * (right - left) + column - lane * sizes // num_lanes


@lru_cache(maxsize=4)  # by value: a data task gets a copy of its plan each time
def _shard_order(shard_sizes: bytes, key: int) -> tuple[Int64s, Int64s]:
    """The shards of an epoch in random order: the first sample of each, (S,), and where each starts in the sequence, (S + 1,)."""
    sizes = np.frombuffer(shard_sizes, np.int64)
    order = permute(np.arange(len(sizes)), len(sizes), key=mix(key, 1))
    firsts = np.cumsum(sizes) - sizes
    return firsts[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order])])
