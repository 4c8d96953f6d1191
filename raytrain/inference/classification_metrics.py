"""Accuracy with its interval, confusions, and metrics of several classes per image. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
_MIN_PROBABILITY = 1e-30  # in a logarithm
_Z = 1.959964  # of a normal distribution, 95 % lie between -z and z
_NUM_RESAMPLES = 2000
_MAX_DRAWN = 10_000_000  # numbers of draws in memory

Interval = tuple[float, float]


@dataclass(frozen=True)
class ClassScore:
    """Images of a class, and those of them that were predicted right. ``accuracy`` is None without images."""

    name: str
    images: int
    right: int
    accuracy: float | None


@dataclass(frozen=True)
class Confusion:
    """Number of images of the class ``truth`` that were predicted to be of the class ``answer``."""

    truth: str
    answer: str
    images: int


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedRun:
    """The run whose best checkpoint was measured, and on what.

    Attributes:
        run: the run's name.
        data: the folder or URL of the images.
        checkpoint: the path of the checkpoint within the run.
        skipped: number of images that could not be read; the metrics leave them out.
        trained_on: number of images that the run was trained on: they have the key or the content of a training image.
            None for images that the run itself held out, and if the run does not store its training images.
        all_compared: False if ``trained_on`` may be too small: files are compared for at most 10 s, and some could not
            be compared. None if ``trained_on`` is.
    """

    run: str
    data: str
    checkpoint: str
    skipped: int
    trained_on: int | None = None
    all_compared: bool | None = None
    metrics: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Metrics that the run's options name besides those of every evaluation, such as top5; None if not known."""

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return plain(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationResult(EvaluatedRun):
    """The metrics of a run's best checkpoint on images of one class each.

    ``accuracy`` and ``loss`` are means over the images, None without images. ``balanced_accuracy`` and ``macro_f1``
    give every class the same weight. Other images of the same kind have an accuracy within ``accuracy_interval`` in 95
    of 100 cases (Wilson's; by resampling groups if the run keeps images together by --group-by).
    """

    images: int
    accuracy: float | None
    balanced_accuracy: float | None
    macro_f1: float | None
    loss: float | None
    classes: tuple[str, ...]
    per_class: tuple[ClassScore, ...]
    confusions: tuple[Confusion, ...]  # the most frequent wrong predictions, at most 10, the most frequent one first
    confusion: Int64s
    """Counts (num_cells, 3) of images: true class, predicted class, images; the right ones too, no cell without any."""
    accuracy_interval: Interval | None = None
    interval_groups: int | None = None
    """How many groups the interval was resampled from; None if it is Wilson's, of single images."""

    @property
    def confusion_matrix(self) -> Int64s:
        """Counts (num_classes, num_classes): row t, column a counts images of class t predicted as class a.

        It takes the memory of num_classes² numbers, most of which are 0 if there are many classes; ``confusion`` has
        only those above 0.
        """
        matrix = np.zeros((len(self.classes), len(self.classes)), np.int64)
        truth, answers, counts = self.confusion.T
        matrix[truth, answers] = counts
        return matrix


def score(truth: Int64s, answers: Int64s, losses: Floats, classes: Sequence[str], **about: Any) -> EvaluationResult:
    """Return the metrics of n predictions of one class per image.

    ``truth`` and ``answers`` (n,) are indices into ``classes``, ``losses`` (n,) are cross entropies, and ``about`` are
    the fields of :class:`EvaluatedRun`.
    """
    # Only pairs of classes that occur are counted: a matrix of 20,000 classes would have 400,000,000 cells.
    num_classes = len(classes)
    pairs, counts = np.unique(truth * num_classes + answers, return_counts=True)
    cells = np.stack([pairs // num_classes, pairs % num_classes, counts], axis=1).astype(np.int64)  # (num_cells, 3)
    right, true, predicted = (
        np.bincount(labels, minlength=num_classes) for labels in (truth[truth == answers], truth, answers)
    )  # (num_classes,) each

    # The most frequent wrong predictions: the largest counts, equal ones in the order of classes.
    wrong = cells[cells[:, 0] != cells[:, 1]]
    most_frequent: list[list[int]] = wrong[np.argsort(-wrong[:, 2], kind="stable")][:_NUM_CONFUSIONS].tolist()

    return EvaluationResult(
        **about,
        images=len(truth),
        accuracy=_ratio(right.sum(), true.sum()),
        balanced_accuracy=balanced_accuracy(right, true) if len(truth) else None,
        macro_f1=macro_f1(right, true, predicted) if len(truth) else None,
        loss=float(losses.mean()) if len(losses) else None,
        classes=tuple(classes),
        per_class=tuple(
            ClassScore(name, int(true[label]), int(right[label]), _ratio(right[label], true[label]))
            for label, name in enumerate(classes)
        ),
        confusions=tuple(Confusion(classes[t], classes[a], count) for t, a, count in most_frequent),
        confusion=cells,
    )


# The interval in which an accuracy lies. The accuracy on n images is a random number: n other images of the same kind
# would give another one. Images of one group, such as those of a patient, are alike, so n of them say less than n
# images of different groups; then whole groups are resampled.


def wilson_interval(num_right: float, num_images: int) -> Interval:
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
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def grouped_interval(is_right: npt.NDArray[np.bool_], groups: npt.NDArray[Any]) -> Interval:
    """Return the 95 % interval of an accuracy whose images belong to groups, by resampling whole groups (Efron 1979).

    Args:
        is_right: (n,), whether each image was predicted right.
        groups: (n,), the name of each image's group.

    The interval has the percentiles of the accuracies of 2,000 data sets, each drawn from the groups with replacement,
    with random numbers that are always the same. With a single group, or if all groups are equally accurate, it would
    have no width: then it is Wilson's interval for as many images as there are groups.
    """
    _, group = np.unique(groups.astype(str), return_inverse=True)
    counts = np.bincount(group)  # (G,)
    right = np.bincount(group, weights=is_right)
    if np.all(right * counts.sum() == counts * right.sum()):
        return wilson_interval(float(right.sum() / counts.sum()) * len(counts), len(counts))

    # The data sets are drawn in parts, because each takes a number for each group.
    random, even = np.random.default_rng(0), np.full(len(counts), 1 / len(counts))
    accuracies: list[npt.NDArray[np.float64]] = []
    at_once = max(1, _MAX_DRAWN // len(counts))
    for start in range(0, _NUM_RESAMPLES, at_once):
        draws = random.multinomial(len(counts), even, min(at_once, _NUM_RESAMPLES - start))
        accuracies.append((draws @ right) / (draws @ counts))
    low, high = np.quantile(np.concatenate(accuracies), [0.025, 0.975])
    return float(low), float(high)


# Several classes per image.


@dataclass(frozen=True)
class LabelScore:
    """Metrics of one class, which ``images`` of the images have; metrics that cannot be computed are None."""

    name: str
    images: int
    average_precision: float | None
    threshold: float
    precision: float | None
    recall: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelEvaluation(EvaluatedRun):
    """The metrics of a run's best checkpoint on images that may have several classes each.

    ``accuracy`` and ``loss`` are means over all pairs of an image and a class. ``accuracy`` and ``macro_f1`` depend on
    the thresholds. All of them are None without images.
    """

    images: int
    accuracy: float | None
    loss: float | None
    mean_average_precision: float | None
    macro_f1: float | None
    per_class: tuple[LabelScore, ...]


def chosen_thresholds(trained: TrainedRun, threshold: Sequence[float] = ()) -> Floats:
    """Return the threshold of each class, (num_classes,): those of the user, or else those of the run.

    Raise UsageError if the user gave thresholds for a run of one class per image, a wrong number of thresholds, or one
    that is not between 0 and 1.
    """
    num_classes = len(trained.classes)
    if threshold and not trained.config.multi_label:
        raise UsageError(f"--threshold is for runs whose images may have several classes; {trained.name!r} is none.")
    if threshold and (len(threshold) not in (1, num_classes) or not all(0 <= value <= 1 for value in threshold)):
        raise UsageError(
            f"--threshold has {len(threshold)} numbers from {min(threshold):g} to {max(threshold):g}; give one, or one "
            f"for each of the {num_classes} classes, from 0 to 1."
        )

    # The run's thresholds are those of its checkpoint: they were chosen when it was evaluated.
    stored = stored_thresholds(trained.store, trained.checkpoint, num_classes)
    return np.broadcast_to(np.array(threshold or stored or DEFAULT_THRESHOLD, np.float64), num_classes)


def predicted_labels(trained: TrainedRun, table: pa.Table, thresholds: Floats) -> pa.Table:
    """Return a table with the labels of each image, joined to one text, and the probability of each class."""
    scores = probabilities_of(table)
    answers = scores >= thresholds

    # The names of an image's classes are joined as in the run's label file.
    separator = trained.config.label_separator or "|"
    labels = string_array([separator.join(compress(trained.classes, row)) for row in answers.tolist()])
    columns = zip(trained.classes, scores.T.astype(np.float32), strict=True)
    score_of = {f"score_{name}": number_array(column) for name, column in columns}
    return pa.table({"labels": labels.cast(pa.string()), **score_of})


def score_labels(trained: TrainedRun, manifest: Manifest, table: pa.Table, thresholds: Floats) -> LabelEvaluation:
    """Return the metrics of predictions for the images of ``manifest``, which may have several classes each."""
    assert manifest.label_sets is not None
    readable = table.filter(table["error"].is_null())

    # All of (n, num_classes): a row for each image that could be read.
    scores = probabilities_of(readable)
    answers = scores >= thresholds
    truth = manifest.label_sets[numbers(readable["truth"])]
    cross_entropies = -np.log(np.where(truth, scores, 1 - scores).clip(min=_MIN_PROBABILITY))

    # All of (num_classes,).
    right, true, predicted = (counts.sum(axis=0) for counts in (answers & truth, truth, answers))
    precisions = average_precisions(scores, truth)
    return LabelEvaluation(
        run=trained.name,
        data=manifest.url,
        checkpoint=trained.checkpoint,
        skipped=len(table) - len(readable),
        images=len(readable),
        accuracy=_known(np.mean(answers == truth)) if len(truth) else None,
        loss=_known(cross_entropies.mean()) if len(truth) else None,
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


def probabilities_of(table: pa.Table) -> Floats:
    """Return the probability of each class, float64 (n, num_classes), in a table of predictions."""
    # The column has lists of one length, of which NumPy takes the values without a copy of each.
    column = table["probabilities"].combine_chunks()  # also of a table without rows, which has no chunks
    return numbers(pa.chunked_array([column.flatten()])).reshape(len(column), column.type.list_size)


def _ratio(part: np.integer[Any], whole: np.integer[Any]) -> float | None:
    return float(part / whole) if whole else None


def _known(value: float | np.floating[Any]) -> float | None:
    return None if np.isnan(value) else float(value)
