"""Intervals in which an accuracy lies, as measured on few images: of single images, or of groups that belong together.

An accuracy of n images is one draw: other images of the same kind would give another number. Images of one group, such
as those of a patient, are alike, so that they say less than as many images of different ones; then groups are drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_Z = 1.959964  # of a normal distribution, 95 % lie between -z and z
_NUM_RESAMPLES = 2000

Interval = tuple[float, float]


def wilson_interval(num_right: int, num_images: int) -> Interval:
    """Return the 95 % interval of the accuracy of ``num_right`` of ``num_images`` (Wilson 1927).

    The bounds are those true accuracies for which the one that was measured is just likely enough; unlike the interval
    of the normal approximation they stay within 0 and 1.

    >>> [round(bound, 3) for bound in wilson_interval(9, 10)]
    [0.596, 0.982]
    """
    accuracy, z = num_right / num_images, _Z
    centre = accuracy + z**2 / (2 * num_images)
    spread = z * ((accuracy * (1 - accuracy) + z**2 / (4 * num_images)) / num_images) ** 0.5
    scale = 1 + z**2 / num_images
    return (centre - spread) / scale, (centre + spread) / scale


def grouped_interval(is_right: npt.NDArray[np.bool_], groups: npt.NDArray[Any]) -> Interval:
    """Return the 95 % interval of an accuracy whose images belong to groups, by resampling whole groups (Efron 1979).

    Args:
        is_right: (n,), whether each image was predicted right.
        groups: (n,), the name of each image's group.

    The percentiles are of 2,000 data sets that are drawn from the groups with replacement; their random numbers are
    always the same.
    """
    _, group = np.unique(groups.astype(str), return_inverse=True)
    counts = np.bincount(group)  # (G,)
    right = np.bincount(group, weights=is_right)
    draws = np.random.default_rng(0).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), _NUM_RESAMPLES)
    low, high = np.quantile((draws @ right) / (draws @ counts), [0.025, 0.975])
    return float(low), float(high)
