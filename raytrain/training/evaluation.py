"""The built-in evaluation, for one class or several classes per image, and logits averaged over views of an image."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config.evaluation import TestView
from raytrain.config.user_code import describe, lacks_memory
from raytrain.errors import UsageError, format_count
from raytrain.training.metrics.evaluation_metrics import (
    DEFAULT_THRESHOLD,
    average_precisions,
    balanced_accuracy,
    best_thresholds,
    is_lower_better,
    macro_f1,
    mean_of_known,
    measured_metrics,
)
from raytrain.training.metrics.named_metrics import NamedMetrics
from raytrain.training.networks.loss import check_logits

if TYPE_CHECKING:
    from raytrain.training.run import Run

Network = Callable[[Tensor], Tensor]  # normalised images (B, C, H, W) -> logits (B, num_classes)
_NUM_TRIED = 2  # images; some networks cannot take a batch of one


def evaluate_prepared(run: Run) -> dict[str, float]:
    """Return the metrics of the first network that the loop has prepared, or of its weight average.

    Its logits are averaged over the views of ``--test-views``. Every worker calls this.
    """
    network = with_views(run.models.evaluated, run.config.test_views)
    return evaluate(run, network) if run.label_sets is None else evaluate_labels(run, network)


def evaluate(run: Run, model: Network) -> dict[str, float]:
    """Return accuracy, mean cross entropy, balanced accuracy and macro F1 of ``model`` on the validation images.

    Metrics that ``--metrics``, ``--best`` or ``--until`` name are measured, too. Each image counts once: sums are
    reduced over the workers, not means, and no image is padded or repeated. All metrics are NaN if no image could be
    used. Every worker calls this. The run's gallery gets validation images, too.

    Example::

        for epoch in run.epochs(evaluate=lambda: evaluate(run, model)):
    """
    num_classes = run.num_classes
    loss = torch.zeros(1, dtype=torch.float64, device=run.device)
    # Images by class: of which the prediction is right, that have the class, and that are predicted to have it.
    counts = torch.zeros(3, num_classes, dtype=torch.float64, device=run.device)
    named = _named_metrics(run)
    for batch in run.evaluation_batches():
        logits = model(batch.images)  # (m, C)
        run.show(batch, logits)
        predictions, ones = logits.argmax(dim=1), torch.ones_like(batch.labels, dtype=torch.float64)
        loss += F.cross_entropy(logits, batch.labels, reduction="sum").double()
        counts[0].index_add_(0, predictions, ones * (predictions == batch.labels))  # bincount would wait for the device
        counts[1].index_add_(0, batch.labels, ones)
        counts[2].index_add_(0, predictions, ones)
        if named is not None:
            named.add(logits.double().softmax(dim=1), batch.labels)

    # Add up over the workers by one all-reduce, for whose result the host waits.
    totals = np.array(run.total(torch.cat([loss, counts.flatten()])))
    right, truth, predicted = totals[1:].reshape(3, num_classes)
    count = truth.sum()
    return {
        "accuracy": float(right.sum() / count) if count else float("nan"),
        "loss": float(totals[0] / count) if count else float("nan"),
        "balanced_accuracy": balanced_accuracy(right, truth),
        "macro_f1": macro_f1(right, truth, predicted),
        **({} if named is None else named.values(run.total, run.gather, run.world_size)),
    }


def evaluate_labels(run: Run, model: Network) -> dict[str, float]:
    """Measure ``model`` on the validation images, each image once, and choose the threshold of each class by its F1.

    Returns accuracy (over all images and classes) and macro F1 at a threshold of 0.5, the mean binary cross entropy,
    the mean average precision, and the metrics that the options name. All are NaN if no image could be used. The chosen
    thresholds are set as ``run.thresholds``. Every worker calls this. Raises UsageError for logits of another shape.
    """
    num_classes = run.num_classes
    rows = [torch.zeros(0, 2 * num_classes + 1, dtype=torch.float64, device=run.device)]  # for a worker without images
    named = _named_metrics(run)
    for batch in run.evaluation_batches():
        logits = model(batch.images)  # (m, C)
        check_logits("The evaluation", logits, batch.labels, num_classes)
        logits = logits.double()
        targets = batch.targets.double()  # (m, C), 0 or 1
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1, keepdim=True)
        rows.append(torch.cat([logits.sigmoid(), targets, losses], dim=1))
        if named is not None:
            named.add(logits.sigmoid(), targets)

    # Precisions and thresholds depend on the order of the scores of all images, so every worker gets all rows.
    scores, truth, losses = np.split(run.gather(torch.cat(rows)).cpu().numpy(), [num_classes, 2 * num_classes], axis=1)
    predicted, truth = scores >= DEFAULT_THRESHOLD, truth > 0
    run.thresholds = tuple(best_thresholds(scores, truth).tolist())
    return {
        "accuracy": float((predicted == truth).mean()) if len(truth) else float("nan"),
        "loss": float(losses.mean()) if len(losses) else float("nan"),
        "mean_average_precision": mean_of_known(average_precisions(scores, truth)),
        "macro_f1": macro_f1((predicted & truth).sum(axis=0), truth.sum(axis=0), predicted.sum(axis=0)),
        **({} if named is None else named.values(run.total, run.gather, run.world_size)),
    }


def _named_metrics(run: Run) -> NamedMetrics | None:
    """Return the metrics that the options name besides those of every run; None if they name none."""
    names, multi_label = run.config.named_metrics, run.label_sets is not None
    return NamedMetrics(names, run.classes, multi_label=multi_label, device=run.device) if names else None


def with_views(network: Network, views: Collection[TestView]) -> Network:
    """Return ``network`` with its logits averaged over mirrored (``flip``) or shifted (``shift``) images, or both.

    Without views, ``network`` is returned unchanged.
    """
    flipped = partial(flip_test, network) if "flip" in views else network
    return partial(shift_test, flipped) if "shift" in views else flipped


def flip_test(network: Network, images: Tensor) -> Tensor:
    """Return the mean of the ``network``'s logits for ``images`` and for their mirror images, (B, num_classes).

    ``images`` are normalised, (B, C, H, W). Logits are averaged, not probabilities, so that the mean works wherever
    logits do: in losses, softmax and sigmoid, with thresholds, and in exported programs.

    Example::

        for epoch in run.epochs(evaluate=lambda: evaluate(run, partial(flip_test, model))):
    """
    return (network(images) + network(images.flip(-1))) / 2


def shift_test(network: Network, images: Tensor) -> Tensor:
    """Return the mean of the logits for ``images``, with weight 2, and for two shifted copies, (B, num_classes).

    ``images`` are normalised, (B, C, H, W). One copy is shifted by a pixel up and left, the other down and right, as in
    Jordan 2024; the gap is 0, the mean colour, as that of ``--translate``.

    Example::

        for epoch in run.epochs(evaluate=lambda: evaluate(run, partial(shift_test, model))):
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1))  # (B, C, H + 2, W + 2)
    shifted = network(padded[:, :, 2:, 2:]) + network(padded[:, :, :height, :width])
    return network(images) / 2 + shifted / 4


def check_built_in_evaluation(run: Run) -> None:
    """Raise UsageError if the built-in evaluation will be used, and cannot measure the network that the loop prepares.

    Otherwise that would only be found after an epoch. A copy of the network is tried on two images of the loop's batch,
    so that the network does not change. All networks are in evaluation mode meanwhile, because a replaced ``forward``
    may still call the original.
    """
    has_built_in_evaluation = run.own_evaluation is None and not run.config.is_range_test
    if not has_built_in_evaluation or run.microbatch is None:
        return
    run.config.check_metrics(measured_metrics(run.config))

    # Try the network. Whatever it raises or returns becomes a part of the error's sentence.
    model, images = run.models.evaluated, run.microbatch.images[:_NUM_TRIED]
    try:
        network = copy.deepcopy(model).eval()
    except Exception:  # torch cannot copy weights that were computed
        return
    try:
        with torch.no_grad(), run.models.evaluating():
            logits: object = network(images)
    except Exception as error:
        if lacks_memory(error):  # there is no room for a copy's forward: the run itself may do without
            return
        problem = f"raises {describe(error)}"
    else:
        if not isinstance(logits, Tensor):
            problem = f"returns a {type(logits).__name__}"
        elif logits.shape != (len(images), run.num_classes):
            shape, num_images = tuple(logits.shape), len(images)
            problem = f"returns the shape {shape} for {num_images} images and {format_count(run.num_classes, 'class')}"
        else:
            _try_named_metrics(run, logits)
            return
    raise UsageError(
        f"The run cannot be evaluated by the first network that the loop prepares, which {problem} for images alone; "
        "let it return logits, one row per image and one number per class, or measure in your own way with "
        "run.epochs(evaluate=...)."
    )


def _try_named_metrics(run: Run, logits: Tensor) -> None:
    """Raise UsageError, in the first step, if the metrics that the options name cannot measure such ``logits``.

    Raise it, too, if a metric of ``--best`` or ``--until`` does not say whether a smaller value is better.
    """
    named = _named_metrics(run)
    if named is None:
        return
    labels = torch.arange(len(logits), device=logits.device)  # any classes, since the values are not used
    if run.label_sets is None:
        named.add(logits.double().softmax(dim=1), labels % run.num_classes)
    else:
        named.add(logits.double().sigmoid(), run.label_sets[labels % len(run.label_sets)].double())
    target_metric = run.config.target[0] if run.config.target else None
    for name in (run.config.best_metric, target_metric):
        if name:
            is_lower_better(name, run.config)  # raises UsageError if it is not known
