"""A random order that reads few packed shards at a time.

The shards of an epoch are put into random order, one after the other, and this sequence is cut into lanes. A global
batch takes its positions lane after lane. Each lane goes through its shards one window at a time, and samples are
shuffled within a window. So a worker's local batches, contiguous slices of the global batches, come from lanes that no
other worker reads, except for one at each end; and the order does not depend on the number of workers.

With more workers than lanes, several workers read the same shards. But a worker has the windows of all of its lanes
open at once. With 32 lanes, windows of 2 and shards of 1 MiB, photographs are fetched about three times an epoch by one
worker with many tasks, once by 8 workers, and four times by 128, unless a machine keeps them on its disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.data.plan.permutation import Int64s, mix, permute

NUM_LANES = 32
WINDOW_SHARDS = 2
_SHARD_PATH = re.compile(r"shards/\d{6,}-[0-9a-f]{16}\.parquet")  # as pack names them; never outside the folder


@dataclass(frozen=True, eq=False)
class ShardShuffle:
    """The order of samples in packed shards. Samples are numbered shard by shard: 0 is the first of the first shard."""

    shard_sizes: Int64s  # (S,), samples in each shard; none is 0

    def samples(self, positions: Int64s, batch_size: int, key: int | None) -> Int64s:
        """Samples at ``positions`` of an epoch, int64 of the same shape, for global batches of ``batch_size``.

        ``key`` decides the order of shards and of samples; if it is None, the lanes go through the shards unshuffled.
        """
        in_lanes = lane_positions(positions, int(self.shard_sizes.sum()), batch_size)
        return in_lanes if key is None else self._shuffled(in_lanes, key)

    def _shuffled(self, in_lanes: Int64s, key: int) -> Int64s:
        """Samples at positions ``in_lanes`` of the shuffled sequence of all shards."""
        first_samples, shard_starts = _shard_order(self.shard_sizes.tobytes(), key)
        window_starts = np.append(shard_starts[:-1:WINDOW_SHARDS], shard_starts[-1])
        window = np.searchsorted(window_starts, in_lanes, "right") - 1
        starts, sizes = window_starts[window], np.diff(window_starts)[window]
        shuffled = starts + permute(in_lanes - starts, sizes, key=mix(key, 2), tweak=window)
        shard = np.searchsorted(shard_starts, shuffled, "right") - 1
        return first_samples[shard] + shuffled - shard_starts[shard]


def lane_positions(positions: Int64s, num_samples: int, batch_size: int) -> Int64s:
    """Where ``positions`` of an epoch are if its lanes are laid end to end: a permutation of ``range(num_samples)``.

    Lane ``l`` of ``L`` has the columns ``[l*b//L, (l+1)*b//L)`` of each batch of ``b`` samples, and holds them step
    after step.
    """
    num_lanes = min(NUM_LANES, batch_size)
    num_full, last_size = divmod(num_samples, batch_size)
    step, column = np.divmod(positions, batch_size)
    sizes = np.where(step < num_full, batch_size, last_size)
    lane = ((column + 1) * num_lanes - 1) // sizes
    left, right = lane * batch_size // num_lanes, (lane + 1) * batch_size // num_lanes
    lane_start = num_full * left + lane * last_size // num_lanes
    return lane_start + step * (right - left) + column - lane * sizes // num_lanes


@lru_cache(maxsize=4)  # keyed by value: a data task gets a new copy of its plan each time
def _shard_order(shard_sizes: bytes, key: int) -> tuple[Int64s, Int64s]:
    """The shards of an epoch in random order.

    Returns the first sample of each shard, (S,), and where each shard starts in the sequence, (S + 1,).
    """
    sizes = np.frombuffer(shard_sizes, np.int64)
    order = permute(np.arange(len(sizes)), len(sizes), key=mix(key, 1))
    first_samples = np.cumsum(sizes) - sizes
    return first_samples[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order])])


@dataclass(frozen=True, eq=False)
class Packing:
    """The locations of N images in packed shards."""

    shards: tuple[str, ...]
    """Paths relative to the manifest's url."""
    shard: npt.NDArray[np.int32]  # (N,), indices into shards
    row: npt.NDArray[np.int32]  # (N,), from 0 in each shard

    def select(self, indices: npt.NDArray[np.integer]) -> Packing:
        """The locations of the images at ``indices``."""
        return replace(self, shard=self.shard[indices], row=self.row[indices])

    def check(self) -> None:
        """Raise ValueError unless these are locations that ``raytrain pack`` could have written."""
        if bad := [path for path in self.shards if not _SHARD_PATH.fullmatch(path)]:
            raise ValueError(f"{bad[0]!r} is not the path of a shard")
        check_range("shard", self.shard, 0, len(self.shards))
        check_range("row", self.row, 0)
        if (np.diff(self.shard) < 0).any():
            raise ValueError("the shards are not in order")


def read_packing(table: pa.Table, metadata: dict[str, Any]) -> Packing | None:
    """The locations that a stored manifest holds, not checked; None if its images are not packed."""
    if "shards" not in metadata:
        return None
    return Packing(tuple(metadata["shards"]), table["shard"].to_numpy(), table["row"].to_numpy())


def check_range(name: str, values: npt.NDArray[Any], start: int, stop: int = 1 << 62) -> None:
    """Raise ValueError unless all ``values`` of the column ``name`` are integers from ``start`` to ``stop - 1``."""
    if values.dtype.kind != "i" or ((values < start) | (values >= stop)).any():
        raise ValueError(f"a {name} is out of range")
