"""Metrics that ``--metrics``, ``--best`` and ``--until`` name, each image that is held out counted exactly once.

Each worker adds the probabilities of its images. Metrics that are sums (top-k accuracy and the bins of the calibration
error) are joined by one all-reduce. Metrics that depend on the order of all images (AUROC and average precision) need
all probabilities, which are gathered for a few classes at a time. The states of ``torchmetrics`` objects are gathered,
too (:mod:`raytrain.training.metrics.prepared_metrics`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from raytrain.config.user_code import describe
from raytrain.errors import UsageError
from raytrain.training.metrics.evaluation_metrics import (
    NUM_BINS,
    areas_under_roc,
    average_precisions,
    calibration_error,
    check_number_of_classes,
    mean_of_known,
)
from raytrain.training.metrics.prepared_metrics import prepare_metric
from raytrain.training.metrics.step_metrics import logged_fractions
from raytrain.training.metrics.torchmetrics_by_name import build_torchmetric, torchmetrics_of

_CLASSES_AT_A_TIME = 64  # classes for which the probabilities of all images are in memory together
_AREAS = {"auroc": areas_under_roc, "average_precision": average_precisions}  # they depend on the order of all images


class NamedMetrics:
    """Metrics called ``names``, as in ``TrainConfig.named_metrics``, of images that are added batch by batch.

    An image may have several classes if ``multi_label``. The images' probabilities are on the ``device``.

    Raises UsageError for a name that does not fit these classes.

    Example::

        metrics = NamedMetrics(["top5", "auroc"], classes, multi_label=False, device=device)
        metrics.add(logits.softmax(1), labels)
        metrics.values(run.total, run.gather, run.world_size)  # {"top5": 0.93, "auroc": 0.98}
    """

    def __init__(
        self, names: Sequence[str], classes: Sequence[str], *, multi_label: bool, device: torch.device
    ) -> None:
        self._names, self._classes, self._multi_label = names, classes, multi_label
        num_classes = len(classes)
        self._ks = [int(name[3:]) for name in names if re.fullmatch(r"top\d+", name)]
        check_number_of_classes(names, num_classes)
        # The number of images; for each k, those that are right among the k likeliest classes; and for the calibration
        # error three rows of bins: the number of confidences, their sum, and how many of their answers are right.
        self._sums = torch.zeros(1 + len(self._ks) + 3 * NUM_BINS, dtype=torch.float64, device=device)
        # The probabilities and the labels of all batches, if a metric depends on their order; otherwise None.
        self._batches: list[tuple[Tensor, Tensor]] | None = None if _AREAS.keys().isdisjoint(names) else []
        self._objects = {
            named.name: build_torchmetric(*named, num_classes, multi_label=multi_label).to(device)
            for name in names
            if (named := torchmetrics_of(name)) is not None
        }
        for metric in self._objects.values():
            prepare_metric(metric, is_placeholder=bool)  # an evaluation has no placeholders

    def add(self, probabilities: Tensor, truth: Tensor) -> None:
        """Add m images with their ``probabilities``, float64 (m, C), and their labels, ``truth``.

        Labels are int64 (m,), or (m, C) of 0 and 1 if an image may have several classes. Raises UsageError if a metric
        of ``torchmetrics`` cannot measure them.
        """
        if not len(probabilities):
            return
        # Count, and find the confidences whose calibration is measured: of each class, or of the likeliest one.
        self._sums[0] += len(probabilities)
        if self._multi_label:
            confidences, are_right = probabilities.flatten(), truth.flatten().double()
        else:
            # A class is among the k likeliest if fewer than k are likelier. Of equal classes, the first one counts as
            # likelier, as for argmax.
            probability_of_label = probabilities.gather(1, truth[:, None])  # (m, 1)
            is_before = torch.arange(probabilities.shape[1], device=truth.device) < truth[:, None]
            is_likelier = (probabilities > probability_of_label) | ((probabilities == probability_of_label) & is_before)
            rank = is_likelier.sum(1)  # (m,), from 0
            for index, k in enumerate(self._ks, start=1):
                self._sums[index] += (rank < k).sum()
            confidences, are_right = probabilities.max(1).values, (rank == 0).double()
        if "calibration_error" in self._names:
            bins = (confidences * NUM_BINS).long().clamp(max=NUM_BINS - 1)
            rows_of_bins = self._sums[1 + len(self._ks) :].view(3, NUM_BINS)
            for row, values in zip(rows_of_bins, (torch.ones_like(confidences), confidences, are_right), strict=True):
                row.index_add_(0, bins, values)
        if self._batches is not None:
            self._batches.append((probabilities, truth))
        for name, metric in self._objects.items():
            # A binary metric takes the probability of the second class.
            inputs = probabilities[:, 1] if name.startswith("Binary") else probabilities
            try:
                metric.update(inputs, truth.long())
            except Exception as error:
                raise UsageError(
                    f"torchmetrics:{name} cannot measure probabilities of {len(self._classes)} classes "
                    f"({describe(error)}); name another metric."
                ) from error

    def values(
        self, total: Callable[[Tensor], Sequence[float]], gather: Callable[[Tensor], Tensor], world_size: int
    ) -> dict[str, float]:
        """Return the metrics over all workers' images, by name; NaN for one that needs more images.

        Every worker calls this. Metrics of ``torchmetrics`` have the name of their class; if one has several numbers,
        these are metrics of their own. ``total`` and ``gather`` do what ``run.total`` and ``run.gather`` do.
        """
        num_images, *sums = total(self._sums)
        metrics = {
            f"top{k}": sums[index] / num_images if num_images else float("nan") for index, k in enumerate(self._ks)
        }
        if "calibration_error" in self._names:
            metrics["calibration_error"] = calibration_error(np.array(sums[len(self._ks) :]).reshape(3, NUM_BINS))
        metrics |= self._mean_areas(gather)
        fractions = logged_fractions(self._objects, 1, self._classes, world_size)
        metrics |= {name: float(numerator) / float(denominator) for name, (numerator, denominator) in fractions.items()}
        return metrics

    def _mean_areas(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the metrics that depend on the order of all images' probabilities, as means over the classes."""
        if self._batches is None:
            return {}
        # Join this worker's batches, of which there may be none, and gather the labels of all workers.
        num_classes, device = len(self._classes), self._sums.device
        no_scores = torch.zeros(0, num_classes, dtype=torch.float64, device=device)
        no_labels = torch.zeros((0, num_classes) if self._multi_label else 0, dtype=torch.int64, device=device)
        local_scores = torch.cat([no_scores, *(probabilities for probabilities, _ in self._batches)])
        local_truth = torch.cat([no_labels, *(truth.long() for _, truth in self._batches)])
        truth = gather(local_truth).cpu().numpy()

        # Compute the areas for some classes at a time, which limits the memory that the gathered scores need.
        areas: dict[str, list[float]] = {name: [] for name in _AREAS if name in self._names}  # one for each class
        for start in range(0, num_classes, _CLASSES_AT_A_TIME):
            classes = np.arange(start, min(start + _CLASSES_AT_A_TIME, num_classes))
            scores = gather(local_scores[:, start : start + len(classes)].contiguous()).cpu().numpy()
            is_class = truth[:, classes] > 0 if self._multi_label else truth[:, None] == classes
            for name, of_classes in areas.items():
                of_classes.extend(_AREAS[name](scores, is_class).tolist())
        return {name: mean_of_known(np.array(of_classes)) for name, of_classes in areas.items()}
