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
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.permutation import Floats, Int64s
from raytrain.errors import UsageError
from raytrain.inference.trained_run import TrainedRun
from raytrain.runs.documents import plain
from raytrain.runs.stored_checkpoints import stored_thresholds
from raytrain.training.metrics.evaluation_metrics import (
    DEFAULT_THRESHOLD,
    average_precisions,
    balanced_accuracy,
    macro_f1,
    mean_of_known,
)

_NUM_CONFUSIONS = 10
_MIN_PROBABILITY = 1e-30  # in a logarithm
_Z = 1.959964  # of a normal distribution, 95 % lie between -z and z
_NUM_RESAMPLES = 2000  # data sets that are drawn for an interval
_MAX_NUMBERS_IN_MEMORY = 10_000_000  # of drawn groups; a data set has one number for each group

Interval = tuple[float, float]
"""The lower and the upper bound of an accuracy, from 0 to 1."""


@dataclass(frozen=True)
class ClassScore:
    """The number of ``images`` of a class, and of those that were predicted ``right``; ``accuracy`` is their ratio.

    The accuracy is None without images.
    """

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
        part: which of the run's own images were measured, ``test`` or ``validation``; None for other images.
        checkpoint: the path of the checkpoint within the run.
        skipped: number of images that could not be read; the metrics leave them out.
        trained_on: number of images that the run was trained on: they have the key or the content of a training image.
            None for images that the run itself held out, and if the run does not store its training images.
        all_compared: False if ``trained_on`` may be too small, because some files were not compared: they are compared
            for at most 10 s. None if ``trained_on`` is.
    """

    run: str
    data: str
    checkpoint: str
    skipped: int
    part: Part | None = None
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

    ``accuracy`` and ``loss`` are means over the images; ``balanced_accuracy`` and ``macro_f1`` give every class the
    same weight. All of them are None without images. ``accuracy_interval`` is the 95 % interval of the accuracy:
    Wilson's, or, if the run keeps images together by --group-by, one by resampling groups.
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
    """(num_cells, 3): true class, predicted class, and the number of images with both, for each pair that occurs.

    Right predictions are among them. Classes are indices into ``classes``.
    """
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


def score(
    truth: Int64s, answers: Int64s, losses: Floats, classes: Sequence[str], **fields_of_run: Any
) -> EvaluationResult:
    """Return the metrics of n predictions of one class per image, without the interval of the accuracy.

    ``truth`` and ``answers`` (n,) are indices into ``classes``, ``losses`` (n,) are cross entropies, and
    ``fields_of_run`` are those of :class:`EvaluatedRun`.
    """
    # Only pairs of classes that occur are counted: a matrix of 20,000 classes would have 400,000,000 cells. A pair is
    # one number, from which both classes can be computed.
    num_classes = len(classes)
    pairs, counts = np.unique(truth * num_classes + answers, return_counts=True)
    cells = np.stack([pairs // num_classes, pairs % num_classes, counts], axis=1).astype(np.int64)  # (num_cells, 3)

    # The numbers of images of each class, of those predicted to be of it, and of those that are both.
    images_of, predicted_as = (np.bincount(labels, minlength=num_classes) for labels in (truth, answers))
    right_of = np.bincount(truth[truth == answers], minlength=num_classes)

    # The most frequent wrong predictions: the largest counts, equal ones in the order of classes.
    wrong = cells[cells[:, 0] != cells[:, 1]]
    most_frequent: list[list[int]] = wrong[np.argsort(-wrong[:, 2], kind="stable")][:_NUM_CONFUSIONS].tolist()

    return EvaluationResult(
        **fields_of_run,
        images=len(truth),
        accuracy=_ratio(right_of.sum(), images_of.sum()),
        balanced_accuracy=balanced_accuracy(right_of, images_of) if len(truth) else None,
        macro_f1=macro_f1(right_of, images_of, predicted_as) if len(truth) else None,
        loss=float(losses.mean()) if len(losses) else None,
        classes=tuple(classes),
        per_class=tuple(
            ClassScore(
                name,
                images=int(images_of[label]),
                right=int(right_of[label]),
                accuracy=_ratio(right_of[label], images_of[label]),
            )
            for label, name in enumerate(classes)
        ),
        confusions=tuple(
            Confusion(truth=classes[label], answer=classes[answer], images=count)
            for label, answer, count in most_frequent
        ),
        confusion=cells,
    )


# The interval in which an accuracy lies. The accuracy on n images is a random number: n other images of the same kind
# would give another one. Images of one group, such as those of a patient, are alike, so n of them say less than n
# images of different groups; then whole groups are resampled.


def wilson_interval(num_right: float, num_images: int) -> Interval:
    """Return the 95 % interval of the accuracy of ``num_right`` of ``num_images`` (Wilson 1927).

    The interval has the true accuracies that are compatible with the measured one: if the true accuracy is at a bound,
    the measured one lies just at the edge of what is measured in 95 of 100 cases. Unlike the interval of the normal
    approximation, this one stays within 0 and 1.

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
    # The numbers of images and of right predictions of each of the G groups.
    _, group = np.unique(groups.astype(str), return_inverse=True)
    counts = np.bincount(group)  # (G,)
    right = np.bincount(group, weights=is_right)  # (G,)
    num_groups = len(counts)

    # If right / counts is the same for all groups, so is the accuracy of any data set drawn from them.
    if np.all(right * counts.sum() == counts * right.sum()):
        return wilson_interval(float(right.sum() / counts.sum()) * num_groups, num_groups)

    # The draws of a data set say how often each group is in it. Only as many data sets are drawn at once as their
    # draws fit into memory.
    random, even = np.random.default_rng(0), np.full(num_groups, 1 / num_groups)
    accuracies: list[npt.NDArray[np.float64]] = []
    num_at_once = max(1, _MAX_NUMBERS_IN_MEMORY // num_groups)
    for start in range(0, _NUM_RESAMPLES, num_at_once):
        draws = random.multinomial(num_groups, even, min(num_at_once, _NUM_RESAMPLES - start))  # (data sets, G)
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


def chosen_thresholds(trained: TrainedRun, threshold: float | Sequence[float] = ()) -> Floats:
    """Return the threshold of each class, (num_classes,): the user's, else that of the run's checkpoint, else 0.5.

    ``threshold`` is what the user gave: one number for all classes, one for each, or none. Raises UsageError if it is
    given for a run of one class per image, has a wrong number of thresholds, or one that is not between 0 and 1.
    """
    num_classes = len(trained.classes)
    wanted = np.asarray(threshold, np.float64).ravel().tolist()
    if wanted and not trained.config.multi_label:
        raise UsageError(f"--threshold is for runs whose images may have several classes; {trained.name!r} is none.")
    if wanted and (len(wanted) not in (1, num_classes) or not all(0 <= value <= 1 for value in wanted)):
        raise UsageError(
            f"--threshold has {len(wanted)} numbers from {min(wanted):g} to {max(wanted):g}; give one, or one "
            f"for each of the {num_classes} classes, from 0 to 1."
        )

    # The checkpoint's thresholds were chosen when it was evaluated; one of a run that was never evaluated has none.
    stored = stored_thresholds(trained.store, trained.checkpoint, num_classes)
    return np.broadcast_to(np.array(wanted or stored or DEFAULT_THRESHOLD, np.float64), num_classes)


def predicted_labels(trained: TrainedRun, table: pa.Table, thresholds: Floats) -> pa.Table:
    """Return a table with the labels of each image, joined to one text, and the probability of each class.

    ``table`` has the predictions of a run whose images may have several classes. The columns are ``labels`` and
    ``score_NAME`` for each class.
    """
    scores = probabilities_of(table)  # (n, num_classes)
    answers = scores >= thresholds

    # The names of an image's classes are joined as in the run's label file.
    separator = trained.config.label_separator or "|"
    labels = string_array([separator.join(compress(trained.classes, row)) for row in answers.tolist()])
    scores_of_class = zip(trained.classes, scores.T.astype(np.float32), strict=True)
    columns = {f"score_{name}": number_array(column) for name, column in scores_of_class}
    return pa.table({"labels": labels.cast(pa.string()), **columns})


def score_labels(trained: TrainedRun, manifest: Manifest, table: pa.Table, thresholds: Floats) -> LabelEvaluation:
    """Return the metrics of the predictions in ``table`` for the images of ``manifest``, each of several classes.

    ``thresholds`` (num_classes,) are the probabilities from which on an image is predicted to have a class.
    """
    assert manifest.label_sets is not None
    readable = table.filter(table["error"].is_null())

    # Arrays (n, num_classes) with a row for each image that could be read.
    scores = probabilities_of(readable)
    answers = scores >= thresholds
    truth = manifest.label_sets[numbers(readable["truth"])]
    cross_entropies = -np.log(np.where(truth, scores, 1 - scores).clip(min=_MIN_PROBABILITY))

    # Arrays (num_classes,): the images that have a class, those predicted to have it, and those that are both.
    images_of, predicted_as, right_of = (is_in.sum(axis=0) for is_in in (truth, answers, answers & truth))
    precisions = average_precisions(scores, truth)
    return LabelEvaluation(
        run=trained.name,
        data=manifest.url,
        checkpoint=trained.checkpoint,
        skipped=len(table) - len(readable),
        images=len(readable),
        accuracy=_none_if_nan(np.mean(answers == truth)) if len(truth) else None,
        loss=_none_if_nan(cross_entropies.mean()) if len(truth) else None,
        mean_average_precision=_none_if_nan(mean_of_known(precisions)),
        macro_f1=_none_if_nan(macro_f1(right_of, images_of, predicted_as)),
        per_class=tuple(
            LabelScore(
                name,
                images=int(images_of[label]),
                average_precision=_none_if_nan(precisions[label]),
                threshold=float(thresholds[label]),
                precision=_ratio(right_of[label], predicted_as[label]),
                recall=_ratio(right_of[label], images_of[label]),
            )
            for label, name in enumerate(trained.classes)
        ),
    )


def probabilities_of(table: pa.Table) -> Floats:
    """Return the probability of each class, float64 (n, num_classes), in a table of predictions."""
    # The column has lists of one length, whose values NumPy takes as one array, without a Python list for each image.
    column = table["probabilities"].combine_chunks()  # not the first chunk: a table without rows has none
    return numbers(pa.chunked_array([column.flatten()])).reshape(len(column), column.type.list_size)


def _ratio(part: np.integer[Any], whole: np.integer[Any]) -> float | None:
    """Return ``part`` / ``whole``; None if ``whole`` is 0."""
    return float(part / whole) if whole else None


def _none_if_nan(value: float | np.floating[Any]) -> float | None:
    """Return ``value`` as a float, or None in place of NaN, which JSON does not have."""
    return None if np.isnan(value) else float(value)
