"""The built-in evaluation of images that may have several classes each."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from raytrain.training.class_metrics import macro_f1
from raytrain.training.flip_test import Network
from raytrain.training.label_metrics import DEFAULT_THRESHOLD, average_precisions, best_thresholds, mean_of_known
from raytrain.training.run import Run


def evaluate_labels(run: Run, model: Network) -> dict[str, float]:
    """Measure ``model`` on the test images, each image once, and choose the threshold of each class by its F1.

    Returns the accuracy (over all images and classes) and macro F1 of predicting the classes with a probability of at
    least 0.5, the mean binary cross entropy, and the mean average precision. All are NaN if no image could be used.
    """
    num_classes = run.num_classes
    rows = [torch.zeros(0, 2 * num_classes + 1, dtype=torch.float64, device=run.device)]
    for batch in run.test_batches():
        logits = model(batch.images).double()  # (m, C)
        targets = batch.targets.double()  # (m, C), 0 or 1
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1, keepdim=True)
        rows.append(torch.cat([logits.sigmoid(), targets, losses], dim=1))
    scores, truth, losses = np.split(run.gather(torch.cat(rows)), [num_classes, 2 * num_classes], axis=1)
    answers, truth = scores >= DEFAULT_THRESHOLD, truth > 0
    run.thresholds = tuple(best_thresholds(scores, truth).tolist())
    return {
        "accuracy": float((answers == truth).mean()) if len(truth) else float("nan"),
        "loss": float(losses.mean()) if len(losses) else float("nan"),
        "mean_average_precision": mean_of_known(average_precisions(scores, truth)),
        "macro_f1": macro_f1((answers & truth).sum(axis=0), truth.sum(axis=0), answers.sum(axis=0)),
    }
