"""Metrics in which all classes count the same, for one or several classes per image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raytrain.config import TrainConfig

CLASS_METRICS = ("accuracy", "loss", "balanced_accuracy", "macro_f1")
"""Metrics of the built-in evaluation if an image has one class."""

LABEL_METRICS = ("accuracy", "loss", "mean_average_precision", "macro_f1")
"""Metrics of the built-in evaluation if an image may have several classes."""


def built_in_metrics(config: TrainConfig) -> tuple[str, ...]:
    """Return the metrics that the built-in evaluation of a run with these options measures."""
    return LABEL_METRICS if config.multi_label else CLASS_METRICS


DEFAULT_THRESHOLD = 0.5

Counts = npt.NDArray[np.floating] | npt.NDArray[np.integer]  # (C,), images of each class
Scores = npt.NDArray[np.float64]
Truth = npt.NDArray[np.bool_]


def balanced_accuracy(right: Counts, truth: Counts) -> float:
    """Return the mean over the classes that have images of the fraction predicted right; NaN without images.

    Example::

        balanced_accuracy(np.array([9, 1]), np.array([10, 2]))  # 0.7
    """
    present = truth > 0
    return float((right[present] / truth[present]).mean()) if present.any() else float("nan")


def macro_f1(right: Counts, truth: Counts, predicted: Counts) -> float:
    """Return the mean F1, 2·right / (truth + predicted), over the classes that have images; NaN without images."""
    present = truth > 0
    f1 = 2 * right[present] / (truth + predicted)[present]
    return float(f1.mean()) if present.any() else float("nan")


def average_precisions(scores: Scores, truth: Truth) -> Scores:
    """Return the area below each class's curve of precision over recall, (C,), of (n, C); NaN without images."""
    areas = np.full(scores.shape[1], np.nan)
    for column in np.flatnonzero(truth.any(axis=0)):
        _, num_predicted, num_right = _curve(scores[:, column], truth[:, column])
        # Each step of the recall counts with the precision at its end.
        areas[column] = (np.diff(num_right, prepend=0) / num_right[-1] * num_right / num_predicted).sum()
    return areas


def best_thresholds(scores: Scores, truth: Truth) -> Scores:
    """Return the score of each class, halfway to the next lower one, with the highest F1, (C,); 0.5 without images."""
    best = np.full(scores.shape[1], DEFAULT_THRESHOLD)
    for column in np.flatnonzero(truth.any(axis=0)):
        thresholds, num_predicted, num_right = _curve(scores[:, column], truth[:, column])
        place = int(np.argmax(2 * num_right / (num_predicted + truth[:, column].sum())))
        best[column] = (thresholds[place] + [*thresholds, 0.0][place + 1]) / 2
    return best


def mean_of_known(values: Scores) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _curve(scores: Scores, truth: Truth) -> tuple[Scores, Scores, Scores]:
    """Return each different score, from the highest; how many images have it or more; and how many of them are right.

    All are (k,) of ``scores`` and ``truth``, (n,), of one class.
    """
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # of each group of equal scores
    return scores[order][last], last + 1.0, np.cumsum(truth[order])[last].astype(np.float64)
