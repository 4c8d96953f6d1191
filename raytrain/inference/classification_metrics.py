"""Metrics of predictions: accuracy, loss, accuracy per class, and which classes are confused. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain.training.evaluation_metrics import balanced_accuracy, macro_f1

Int64s = npt.NDArray[np.int64]

_NUM_CONFUSIONS = 10


@dataclass(frozen=True)
class ClassScore:
    """How many images of a class were predicted right. ``accuracy`` is None without images."""

    name: str
    images: int
    right: int
    accuracy: float | None

    def summary(self) -> dict[str, Any]:
        """The score as plain values."""
        return {"class": self.name, "images": self.images, "right": self.right, "accuracy": self.accuracy}


@dataclass(frozen=True)
class Confusion:
    """How many images of the class ``truth`` were predicted to be of the class ``answer``."""

    truth: str
    answer: str
    images: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Metrics of the predictions for ``images`` images. ``accuracy`` and ``loss`` are means, None without images.

    ``balanced_accuracy`` and ``macro_f1`` give every class the same weight.
    """

    images: int
    accuracy: float | None
    balanced_accuracy: float | None
    macro_f1: float | None
    loss: float | None
    classes: tuple[str, ...]
    per_class: tuple[ClassScore, ...]
    confusions: tuple[Confusion, ...]  # the most frequent wrong predictions, at most 10, the most frequent one first
    confusion_matrix: Int64s  # see :func:`confusion_matrix`

    def summary(self) -> dict[str, Any]:
        """The metrics as plain values."""
        return {
            **vars(self),
            "classes": list(self.classes),
            "per_class": [score.summary() for score in self.per_class],
            "confusions": [asdict(confusion) for confusion in self.confusions],
            "confusion_matrix": self.confusion_matrix.tolist(),
        }


def score(truth: Int64s, answers: Int64s, losses: npt.NDArray[np.float64], classes: Sequence[str]) -> Scores:
    """The metrics of n predictions: true and predicted classes, as indices into ``classes``, and cross entropies."""
    matrix = confusion_matrix(truth, answers, len(classes))
    right, true, predicted = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
    return Scores(
        images=len(truth),
        accuracy=_ratio(matrix.trace(), matrix.sum()),
        balanced_accuracy=balanced_accuracy(right, true) if len(truth) else None,
        macro_f1=macro_f1(right, true, predicted) if len(truth) else None,
        loss=float(losses.mean()) if len(losses) else None,
        classes=tuple(classes),
        per_class=_per_class(matrix, classes),
        confusions=_confusions(matrix, classes),
        confusion_matrix=matrix,
    )


def confusion_matrix(truth: Int64s, answers: Int64s, num_classes: int) -> Int64s:
    """Counts (num_classes, num_classes): row t, column a is how many images of class t were predicted as class a."""
    matrix = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(matrix, (truth, answers), 1)
    return matrix


def _per_class(matrix: Int64s, classes: Sequence[str]) -> tuple[ClassScore, ...]:
    return tuple(
        ClassScore(name, int(row.sum()), int(row[label]), _ratio(row[label], row.sum()))
        for label, (name, row) in enumerate(zip(classes, matrix, strict=True))
    )


def _confusions(matrix: Int64s, classes: Sequence[str]) -> tuple[Confusion, ...]:
    wrong = matrix * (1 - np.eye(len(matrix), dtype=np.int64))
    most_frequent = np.argsort(-wrong, axis=None, kind="stable")[: min(_NUM_CONFUSIONS, np.count_nonzero(wrong))]
    return tuple(
        Confusion(classes[int(truth)], classes[int(answer)], int(wrong[truth, answer]))
        for truth, answer in zip(*np.unravel_index(most_frequent, wrong.shape), strict=True)
    )


def _ratio(part: np.int64, whole: np.int64) -> float | None:
    return float(part / whole) if whole else None
