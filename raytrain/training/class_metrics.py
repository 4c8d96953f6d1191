"""Metrics that give every class the same weight, however many images it has. Imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

METRICS = ("accuracy", "loss", "balanced_accuracy", "macro_f1")
"""What the built-in evaluation measures."""

Counts = npt.NDArray[np.floating] | npt.NDArray[np.integer]


def balanced_accuracy(right: Counts, truth: Counts) -> float:
    """The mean over the classes that have images of the fraction that was predicted right; NaN without images.

    Args:
        right: images of each class that were predicted right, (C,).
        truth: images of each class, (C,).
    """
    present = truth > 0
    return float((right[present] / truth[present]).mean()) if present.any() else float("nan")


def macro_f1(right: Counts, truth: Counts, predicted: Counts) -> float:
    """The mean F1, 2·right / (truth + predicted), over the classes that occur as truth or prediction; NaN without any.

    Args:
        right, truth: see :func:`balanced_accuracy`.
        predicted: images that were predicted to be of each class, (C,).
    """
    either = truth + predicted
    present = either > 0
    return float((2 * right[present] / either[present]).mean()) if present.any() else float("nan")
