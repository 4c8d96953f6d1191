"""A random order, any element in constant time, from counter-based random numbers."""

from __future__ import annotations

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
    """A pseudo-random permutation of ``range(num_samples)``, evaluated at ``positions``.

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
        value[outside] = _feistel(value[outside], key, *(_at(each, outside, value.shape) for each in network))
        outside = outside[value[outside] >= _at(sizes, outside, value.shape)]
    return value.astype(np.int64)


def _rectangle(sizes: UInt64s) -> tuple[UInt64s, UInt64s]:
    """Height and width of a nearly square rectangle with at least as many pairs as there are samples."""
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


def uniform(key: int, samples: Int64s, num_draws: int) -> Floats:
    """Uniform random numbers in [0, 1), float64 (B, num_draws), one for each sample (int64) and draw.

    They depend only on ``key``, the sample and the number of the draw: draw d of sample s is number s·num_draws + d of
    the generator that starts at ``key``.
    """
    return splitmix64(key, samples[:, None] * num_draws + np.arange(num_draws)).astype(np.float64) * 2.0**-53


def splitmix64(key: int | Words, positions: Words) -> Words:
    """53 random bits for each of ``positions``, int64, as an int64 array or tensor of the same shape.

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
    """The signed integer with the same 64 bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted_right(words: Words, bits: int) -> Words:
    """A logical shift: that of int64 copies the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
