"""Metrics of predictions, for one class per image (accuracy, confusions) or several (thresholds). Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.data.blocks import number_array, numbers, string_array
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.permutation import Floats, Int64s
from raytrain.errors import UsageError
from raytrain.inference.trained_run import TrainedRun
from raytrain.runs.checkpoint_files import stored_thresholds
from raytrain.runs.documents import plain
from raytrain.training.evaluation_metrics import (
    DEFAULT_THRESHOLD,
    average_precisions,
    balanced_accuracy,
    macro_f1,
    mean_of_known,
)

_NUM_CONFUSIONS = 10


@dataclass(frozen=True)
class ClassScore:
    """How many images of a class were predicted right. ``accuracy`` is None without images."""

    name: str
    images: int
    right: int
    accuracy: float | None


@dataclass(frozen=True)
class Confusion:
    """How many images of the class ``truth`` were predicted to be of the class ``answer``."""

    truth: str
    answer: str
    images: int


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedRun:
    """The run whose best checkpoint was measured. ``skipped`` images could not be read and are not in the metrics.

    ``trained_on`` of the images are training images of the run, by their place or their content; it is None for the
    run's own test images, and if that is not known. ``all_compared`` is False if there may be more: the time to read
    files for it was over after 10 s, or they could not be read.
    """

    run: str
    data: str
    checkpoint: str
    skipped: int
    trained_on: int | None = None
    all_compared: bool | None = None

    def summary(self) -> dict[str, Any]:
        """The result as plain values."""
        return plain(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationResult(EvaluatedRun):
    """The metrics of a run's best checkpoint on images of one class each.

    ``accuracy`` and ``loss`` are means over the images, None without images. ``balanced_accuracy`` and ``macro_f1``
    give every class the same weight.
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


def score(truth: Int64s, answers: Int64s, losses: Floats, classes: Sequence[str], **about: Any) -> EvaluationResult:
    """The metrics of n predictions: true and predicted classes, as indices into ``classes``, and cross entropies.

    ``about`` are the fields of :class:`EvaluatedRun`.
    """
    matrix = confusion_matrix(truth, answers, len(classes))
    right, true, predicted = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
    return EvaluationResult(
        **about,
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


def _ratio(part: np.integer[Any], whole: np.integer[Any]) -> float | None:
    return float(part / whole) if whole else None


_MIN_PROBABILITY = 1e-30


@dataclass(frozen=True)
class LabelScore:
    """How well a class is predicted. ``images`` have it; what is not known without such images is None."""

    name: str
    images: int
    average_precision: float | None
    threshold: float
    precision: float | None
    recall: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelEvaluation(EvaluatedRun):
    """The metrics of a run's best checkpoint on images that may have several classes each.

    ``accuracy`` and ``loss`` are over all images and classes; ``accuracy`` and ``macro_f1`` are by the thresholds. What
    is not known without images is None.
    """

    images: int
    accuracy: float | None
    loss: float | None
    mean_average_precision: float | None
    macro_f1: float | None
    per_class: tuple[LabelScore, ...]


def chosen_thresholds(trained: TrainedRun, threshold: Sequence[float] = ()) -> Floats:
    """The threshold of each class, (C,): those that a user gave, or those of the run."""
    num_classes = len(trained.classes)
    if threshold and not trained.config.multi_label:
        raise UsageError(f"--threshold is for runs whose images may have several classes; {trained.name!r} is none.")
    if threshold and (len(threshold) not in (1, num_classes) or not all(0 <= each <= 1 for each in threshold)):
        raise UsageError(
            f"--threshold has {len(threshold)} numbers from {min(threshold):g} to {max(threshold):g}; give one, or one "
            f"for each of the {num_classes} classes, from 0 to 1."
        )
    stored = stored_thresholds(trained.store, trained.checkpoint, num_classes)
    return np.broadcast_to(np.array(threshold or stored or DEFAULT_THRESHOLD, np.float64), num_classes)


def label_columns(trained: TrainedRun, table: pa.Table, thresholds: Floats) -> pa.Table:
    """The labels of each row, and a score for each class."""
    scores, answers = _answers(table, thresholds)
    separator = trained.config.label_separator or "|"
    labels = string_array([separator.join(compress(trained.classes, row)) for row in answers.tolist()])
    columns = zip(trained.classes, scores.T.astype(np.float32), strict=True)
    score_of = {f"score_{name}": number_array(column) for name, column in columns}
    return pa.table({"labels": labels.cast(pa.string()), **score_of})


def score_labels(trained: TrainedRun, manifest: Manifest, table: pa.Table, thresholds: Floats) -> LabelEvaluation:
    """The metrics of predictions for the images of ``manifest``."""
    assert manifest.label_sets is not None
    readable = table.filter(table["error"].is_null())
    scores, answers = _answers(readable, thresholds)
    truth = manifest.label_sets[numbers(readable["truth"])]
    right, true, predicted = (counts.sum(axis=0) for counts in (answers & truth, truth, answers))
    precisions = average_precisions(scores, truth)
    return LabelEvaluation(
        run=trained.name,
        data=manifest.url,
        checkpoint=trained.checkpoint,
        skipped=len(table) - len(readable),
        images=len(readable),
        accuracy=_known(np.mean(answers == truth)) if len(truth) else None,
        loss=_known(_cross_entropy(scores, truth)) if len(truth) else None,
        mean_average_precision=_known(mean_of_known(precisions)),
        macro_f1=_known(macro_f1(right, true, predicted)),
        per_class=tuple(
            LabelScore(
                name,
                int(true[label]),
                _known(precisions[label]),
                float(thresholds[label]),
                _ratio(right[label], predicted[label]),
                _ratio(right[label], true[label]),
            )
            for label, name in enumerate(trained.classes)
        ),
    )


def _answers(table: pa.Table, thresholds: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The probability of each class, (n, C), and whether it reaches its threshold."""
    column = pa.concat_arrays(table["probabilities"].chunks)
    scores = numbers(pa.chunked_array([column.flatten()])).reshape(len(column), column.type.list_size)
    return scores, scores >= thresholds


def _cross_entropy(scores: Floats, truth: npt.NDArray[np.bool_]) -> float:
    """The mean binary cross entropy."""
    return float(-np.log(np.where(truth, scores, 1 - scores).clip(min=_MIN_PROBABILITY)).mean())


def _known(value: float | np.floating[Any]) -> float | None:
    return None if np.isnan(value) else float(value)
