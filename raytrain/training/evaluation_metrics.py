"""Metrics in which all classes count the same, for one or several classes per image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CLASS_METRICS = ("accuracy", "loss", "balanced_accuracy", "macro_f1")  # what the built-in evaluation measures

Counts = npt.NDArray[np.floating] | npt.NDArray[np.integer]  # (C,), images of each class


def balanced_accuracy(right: Counts, truth: Counts) -> float:
    """The mean over the classes that have images of the fraction predicted right; NaN without images."""
    present = truth > 0
    return float((right[present] / truth[present]).mean()) if present.any() else float("nan")


def macro_f1(right: Counts, truth: Counts, predicted: Counts) -> float:
    """The mean F1, 2·right / (truth + predicted), over the classes that have images; NaN without images."""
    present = truth > 0
    f1 = 2 * right[present] / (truth + predicted)[present]
    return float(f1.mean()) if present.any() else float("nan")


Scores = npt.NDArray[np.float64]
Truth = npt.NDArray[np.bool_]

LABEL_METRICS = ("accuracy", "loss", "mean_average_precision", "macro_f1")
"""What the built-in evaluation of such images measures."""

DEFAULT_THRESHOLD = 0.5


def average_precisions(scores: Scores, truth: Truth) -> Scores:
    """The area below each class's curve of precision over recall, (C,), of (n, C); NaN without images."""
    return np.array([_average_precision(*columns) for columns in zip(scores.T, truth.T, strict=True)])


def best_thresholds(scores: Scores, truth: Truth) -> Scores:
    """The score of each class, halfway to the next lower one, with the highest F1, (C,); 0.5 without images."""
    return np.array([_best_threshold(*columns) for columns in zip(scores.T, truth.T, strict=True)])


def mean_of_known(values: Scores) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _average_precision(scores: Scores, truth: Truth) -> float:
    if not truth.any():
        return float("nan")
    _, num_predicted, num_right = _curve(scores, truth)
    return float((np.diff(num_right, prepend=0) / num_right[-1] * num_right / num_predicted).sum())


def _best_threshold(scores: Scores, truth: Truth) -> float:
    if not truth.any():
        return DEFAULT_THRESHOLD
    thresholds, num_predicted, num_right = _curve(scores, truth)
    best = int(np.argmax(2 * num_right / (num_predicted + truth.sum())))
    return float((thresholds[best] + [*thresholds, 0.0][best + 1]) / 2)


def _curve(scores: Scores, truth: Truth) -> tuple[Scores, Scores, Scores]:
    """Each different score, from the highest, and how many images have it or more, and how many of these are right."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # of each group of equal scores
    return scores[order][last], last + 1.0, np.cumsum(truth[order])[last].astype(np.float64)
