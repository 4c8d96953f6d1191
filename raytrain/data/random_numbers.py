"""Random numbers that are a function of a key and a sample, the same in any batch and on any worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from raytrain.data.permutation import Int64s

if TYPE_CHECKING:
    from torch import Tensor

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
