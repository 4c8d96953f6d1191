"""How well a classifier answers: from true and answered classes to accuracy, a row for each class, and what it confuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_NUM_CONFUSIONS = 10


def scores(truth: Ints, answers: Ints, losses: npt.NDArray[np.float64], classes: Sequence[str]) -> dict[str, Any]:
    """What an evaluation says of n images.

    Args:
        truth: the true classes (n,), indices into ``classes``.
        answers: the answered ones (n,).
        losses: cross entropy of each image (n,).
        classes: names.

    Returns:
        images (n), accuracy and loss (means, None without images), classes, confusion_matrix (see :func:`confusion_matrix`, as
        lists), per_class (for each class its images, how many answers were right, and accuracy, None without images) and
        confusions (the most frequent wrong answers: truth, answer and images of each).
    """
    matrix = confusion_matrix(truth, answers, len(classes))
    return {
        "images": len(truth),
        "accuracy": _ratio(matrix.trace(), matrix.sum()),
        "loss": float(losses.mean()) if len(losses) else None,
        "classes": list(classes),
        "per_class": _per_class(matrix, classes),
        "confusions": _confusions(matrix, classes),
        "confusion_matrix": matrix.tolist(),
    }


def confusion_matrix(truth: Ints, answers: Ints, num_classes: int) -> Ints:
    """Counts (num_classes, num_classes): in row t and column a, how many images of class t were answered with a."""
    matrix = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(matrix, (truth, answers), 1)
    return matrix


def _per_class(matrix: Ints, classes: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"class": name, "images": int(row.sum()), "right": int(row[label]), "accuracy": _ratio(row[label], row.sum())}
        for label, (name, row) in enumerate(zip(classes, matrix, strict=True))
    ]


def _confusions(matrix: Ints, classes: Sequence[str]) -> list[dict[str, Any]]:
    wrong = matrix * (1 - np.eye(len(matrix), dtype=np.int64))
    most = np.argsort(-wrong, axis=None, kind="stable")[: min(_NUM_CONFUSIONS, np.count_nonzero(wrong))]
    return [
        {"truth": classes[truth], "answer": classes[answer], "images": int(wrong[truth, answer])}
        for truth, answer in zip(*np.unravel_index(most, wrong.shape), strict=True)
    ]


def _ratio(part: np.int64, whole: np.int64) -> float | None:
    return float(part / whole) if whole else None
