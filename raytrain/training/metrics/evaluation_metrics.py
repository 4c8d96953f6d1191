"""Names and formulas of the metrics of evaluations, for one class or several classes per image."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.training.metrics.torchmetrics_by_name import (
    check_torchmetric,
    is_lower_better_to_torchmetrics,
    torchmetrics_of,
)

CLASS_METRICS = ("accuracy", "loss", "balanced_accuracy", "macro_f1")
"""Metrics of the built-in evaluation if an image has one class."""

LABEL_METRICS = ("accuracy", "loss", "mean_average_precision", "macro_f1")
"""Metrics of the built-in evaluation if an image may have several classes."""

NUM_BINS = 15
"""Intervals of the probabilities, for the calibration error."""


def measured_metrics(config: TrainConfig, *, runs_here: bool = True) -> tuple[str, ...]:
    """Return the names of the metrics that the built-in evaluation of a run with these options measures.

    Raises UsageError for a metric that it cannot measure, as far as that can be checked without torch, and for two of
    one name. If the run does not train on this machine (``runs_here``), torchmetrics need not be installed.
    """
    named: list[str] = []
    for name in config.named_metrics:
        if (wanted := torchmetrics_of(name)) is not None:
            if runs_here:
                check_torchmetric(wanted)
            name = wanted.name
        elif config.multi_label and name.startswith("top"):
            raise UsageError(f"{name} is for images of one class, and these may have several; leave it out.")
        if name in named:
            raise UsageError(f"--metrics has two that are called {name}; leave one out.")
        named.append(name)
    return (*(LABEL_METRICS if config.multi_label else CLASS_METRICS), *named)


def check_number_of_classes(names: Iterable[str], num_classes: int) -> None:
    """Raise UsageError if a metric in ``names``, as in ``config.named_metrics``, does not fit the number of classes."""
    for name in names:
        if name.startswith("top") and int(name[3:]) >= num_classes:
            raise UsageError(
                f"{name} is measured of {num_classes} classes, of which each is always among the {name[3:]} likeliest; "
                "give a smaller number, or leave it out."
            )
        if name.startswith("torchmetrics:Binary") and num_classes != 2:
            raise UsageError(
                f"--metrics {name} is for two classes, and there are {num_classes}; take a Multiclass one."
            )


def is_lower_better(name: str, config: TrainConfig) -> bool:
    """Return whether a smaller value of the metric ``name`` is better, as for losses and errors.

    Raises UsageError for a metric of torchmetrics whose class does not say it.

    Example: ``is_lower_better("calibration_error", config)``
    """
    for wanted in filter(None, map(torchmetrics_of, config.named_metrics)):
        if wanted.name == name:
            return is_lower_better_to_torchmetrics(wanted, config.multi_label)
    return "loss" in name or "error" in name


DEFAULT_THRESHOLD = 0.5  # of the probability from which on an image has a class, if it may have several

Counts = npt.NDArray[np.floating] | npt.NDArray[np.integer]  # (C,), images of each class
Scores = npt.NDArray[np.float64]
Truth = npt.NDArray[np.bool_]


def balanced_accuracy(right: Counts, truth: Counts) -> float:
    """Return the mean, over the classes that have images, of the fraction predicted right; NaN without images.

    Example: ``balanced_accuracy(np.array([9, 1]), np.array([10, 2])) == 0.7``
    """
    present = truth > 0
    return float((right[present] / truth[present]).mean()) if present.any() else float("nan")


def macro_f1(right: Counts, truth: Counts, predicted: Counts) -> float:
    """Return the mean F1, 2·right / (truth + predicted), over the classes that have images; NaN without images.

    For each class, ``truth`` counts its images, ``predicted`` the images that are predicted to have it, and ``right``
    the images that both count.
    """
    present = truth > 0
    f1 = 2 * right[present] / (truth + predicted)[present]
    return float(f1.mean()) if present.any() else float("nan")


def average_precisions(scores: Scores, truth: Truth) -> Scores:
    """Return the area under each class's curve of precision over recall, (C,); NaN for classes without images.

    ``scores`` and ``truth`` are (n, C).
    """
    areas = np.full(scores.shape[1], np.nan)
    for column in np.flatnonzero(truth.any(axis=0)):
        _, num_predicted, num_right = _curve(scores[:, column], truth[:, column])
        # Each increase of the recall is multiplied by the precision at its end.
        areas[column] = (np.diff(num_right, prepend=0) / num_right[-1] * num_right / num_predicted).sum()
    return areas


def areas_under_roc(scores: Scores, truth: Truth) -> Scores:
    """Return the area under each class's ROC curve, (C,); NaN for a class that all images have, or none.

    ``scores`` and ``truth`` are (n, C). Equal scores count half, as in Mann and Whitney's U.
    """
    areas = np.full(scores.shape[1], np.nan)
    for column in np.flatnonzero(truth.any(axis=0) & ~truth.all(axis=0)):
        _, num_predicted, num_right = _curve(scores[:, column], truth[:, column])
        num_wrong = num_predicted - num_right
        # Add up trapezoids, one for each different score, whose width is the number of wrong images that it adds.
        heights = num_right - np.diff(num_right, prepend=0) / 2
        areas[column] = (np.diff(num_wrong, prepend=0) * heights).sum() / (num_right[-1] * num_wrong[-1])
    return areas


def calibration_error(bins: Scores) -> float:
    """Return the expected calibration error of Guo et al. 2017; NaN without images.

    It is the mean difference between the probability of predictions and the fraction of them that is right. ``bins`` is
    (3, NUM_BINS): for equal intervals of the probability, the number of predictions, the sum of their probabilities,
    and the number of right ones.
    """
    counts, probabilities, right = bins
    return float(np.abs(probabilities - right).sum() / counts.sum()) if counts.any() else float("nan")


def best_thresholds(scores: Scores, truth: Truth) -> Scores:
    """Return the threshold of each class with the highest F1, (C,); 0.5 for classes without images.

    The threshold lies halfway between the lowest score of a prediction and the next lower one, or 0, so that rounding
    does not matter. ``scores`` and ``truth`` are (n, C).
    """
    best = np.full(scores.shape[1], DEFAULT_THRESHOLD)
    for column in np.flatnonzero(truth.any(axis=0)):
        different_scores, num_predicted, num_right = _curve(scores[:, column], truth[:, column])
        index = int(np.argmax(2 * num_right / (num_predicted + truth[:, column].sum())))
        best[column] = (different_scores[index] + [*different_scores, 0.0][index + 1]) / 2
    return best


def mean_of_known(values: Scores) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _curve(scores: Scores, truth: Truth) -> tuple[Scores, Scores, Scores]:
    """Return the k different scores of a class in falling order, and two counts for each, (k,).

    The counts are the number of images with at least this score, and how many of these have the class. ``scores`` and
    ``truth`` are (n,).
    """
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # of each group of equal scores
    return scores[order][last], last + 1.0, np.cumsum(truth[order])[last].astype(np.float64)
