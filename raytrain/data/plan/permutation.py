"""Random orders, any element in constant time; one of them reads few packed shards at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Hash integers to 64 bits (splitmix64, Steele, Lea and Flood 2014)."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) * 0xD1342543DE82EF95 & _MASK
        state = (state + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permute(positions: Int64s, num_samples: int | Int64s, *, key: int, tweak: int | Int64s = 0) -> Int64s:
    """Return a pseudo-random permutation of ``range(num_samples)``, evaluated at ``positions``.

    A Feistel network over the pairs ``(left, right)`` of a rectangle just larger than ``num_samples`` (Black and
    Rogaway 2002, the generalised Feistel cipher). A result outside of the range is permuted again until it is inside,
    which happens about once in sqrt(num_samples) results.

    Args:
        positions: int64 (n,).
        num_samples: size of the range, one for all positions or one for each position, (n,).
        key: decides the permutation.
        tweak: distinguishes permutations of one key (Liskov, Rivest and Wagner 2002), one for all positions or one for
            each position, (n,).

    Returns:
        int64 (n,).
    """
    sizes = np.asarray(num_samples, np.uint64)
    network = (*_rectangle(sizes), np.atleast_1d(np.asarray(tweak, np.uint64)) * np.uint64(_GOLDEN))
    value = _feistel(positions.astype(np.uint64), key, *network)
    outside = np.flatnonzero(value >= sizes)
    while outside.size:
        value[outside] = _feistel(value[outside], key, *(_at(part, outside, value.shape) for part in network))
        outside = outside[value[outside] >= _at(sizes, outside, value.shape)]
    return value.astype(np.int64)


def _rectangle(sizes: UInt64s) -> tuple[UInt64s, UInt64s]:
    """Return height and width of a nearly square rectangle with at least as many pairs as there are samples."""
    below = np.maximum(sizes, np.uint64(1)) - np.uint64(1)
    height = np.maximum(np.sqrt(below.astype(np.float64)).astype(np.uint64) + np.uint64(1), np.uint64(2))
    return height, (sizes + height - np.uint64(1)) // height


def _at(values: UInt64s, indices: npt.NDArray[np.intp], shape: tuple[int, ...]) -> UInt64s:
    return np.broadcast_to(values, shape)[indices]


def _feistel(value: UInt64s, key: int, height: UInt64s, width: UInt64s, tweak: UInt64s) -> UInt64s:
    left, right = np.divmod(value, width)
    for round_ in range(0, _ROUNDS, 2):
        left = (left + _hash(right ^ tweak, mix(key, round_))) % height
        right = (right + _hash(left ^ tweak, mix(key, round_ + 1))) % width
    return left * width + right


def _hash(value: UInt64s, key: int) -> UInt64s:
    value = (value ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    # Only the upper half, so that adding a small number cannot overflow 2**64.
    return (value ^ (value >> np.uint64(31))) >> np.uint64(32)


Words = TypeVar("Words", Int64s, "Tensor")
Floats = npt.NDArray[np.float64]


def uniform(key: int, draws: Int64s, count: int) -> Floats:
    """Return ``count`` uniform random numbers in [0, 1) for each of ``draws``, int64 (B,): float64 (B, count).

    They depend only on ``key``, the draw and their index: number i of draw d is number d·count + i of the generator
    that starts at ``key``.
    """
    return splitmix64(key, draws[:, None] * count + np.arange(count)).astype(np.float64) * 2.0**-53


def splitmix64(key: int | Words, positions: Words) -> Words:
    """Return 53 random bits for each of ``positions``, int64, as an int64 array or tensor of the same shape.

    The numbers at these positions of the SplitMix64 generator that starts at ``key``, or of several generators that
    start at an int64 array or tensor of keys, which is broadcast (Steele, Lea and Flood 2014; the
    constants of its mixing function are David Stafford's variant 13). int64 arithmetic wraps like that of uint64.
    """
    start = as_int64(key) if isinstance(key, int) else key
    state = (positions + 1) * as_int64(0x9E3779B97F4A7C15) + start
    state = (state ^ _shifted_right(state, 30)) * as_int64(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted_right(state, 27)) * as_int64(0x94D049BB133111EB)
    return _shifted_right(state ^ _shifted_right(state, 31), 11)


def as_int64(word: int) -> int:
    """Return the signed integer with the same 64 bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted_right(words: Words, bits: int) -> Words:
    """Shift without the sign, which int64's own shift copies."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


NUM_LANES = 32
WINDOW_SHARDS = 2


@dataclass(frozen=True, eq=False)
class ShardShuffle:
    """The order of samples in packed shards. Samples are numbered shard by shard: 0 is the first of the first shard.

    The shards of an epoch are put into random order, one after the other, and this sequence is cut into lanes. A global
    batch takes its positions lane after lane. Each lane goes through its shards one window at a time, and samples are
    shuffled within a window. So a worker's local batches, contiguous slices of the global batches, come from lanes that
    no other worker reads, except for one at each end; and the order does not depend on the number of workers.

    With more workers than lanes, several workers read the same shards. But a worker has the windows of all of its lanes
    open at once. With 32 lanes, windows of 2 and shards of 1 MiB, photographs are fetched about three times an epoch by
    one worker with many tasks, once by 8 workers, and four times by 128, unless a machine keeps them on its disk.
    """

    shard_sizes: Int64s  # (S,), samples in each shard; none is 0

    def samples(self, positions: Int64s, batch_size: int, key: int | None) -> Int64s:
        """Return the samples at ``positions`` of an epoch, int64 of the same shape; unshuffled if ``key`` is None."""
        in_lanes = lane_positions(positions, int(self.shard_sizes.sum()), batch_size)
        return in_lanes if key is None else self._shuffled(in_lanes, key)

    def _shuffled(self, in_lanes: Int64s, key: int) -> Int64s:
        """Return the samples at positions ``in_lanes`` of the shuffled sequence of all shards."""
        first_samples, shard_starts = _shard_order(self.shard_sizes.tobytes(), key)
        window_starts = np.append(shard_starts[:-1:WINDOW_SHARDS], shard_starts[-1])
        window = np.searchsorted(window_starts, in_lanes, "right") - 1
        starts, sizes = window_starts[window], np.diff(window_starts)[window]
        shuffled = starts + permute(in_lanes - starts, sizes, key=mix(key, 2), tweak=window)
        shard = np.searchsorted(shard_starts, shuffled, "right") - 1
        return first_samples[shard] + shuffled - shard_starts[shard]


def lane_positions(positions: Int64s, num_samples: int, batch_size: int) -> Int64s:
    """Return where ``positions`` of an epoch are if its lanes are laid end to end: a permutation of their range.

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
    """Return the first sample of each shard in random order, (S,), and where each starts in that sequence, (S + 1,)."""
    sizes = np.frombuffer(shard_sizes, np.int64)
    order = permute(np.arange(len(sizes)), len(sizes), key=mix(key, 1))
    first_samples = np.cumsum(sizes) - sizes
    return first_samples[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order])])
