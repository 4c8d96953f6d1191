"""The built-in evaluation. Copy it beside a training loop of your own and change what you like."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from raytrain.training.class_metrics import balanced_accuracy, macro_f1
from raytrain.training.flip_test import Network
from raytrain.training.run import Run


def evaluate(run: Run, model: Network) -> dict[str, float]:
    """Accuracy, mean cross entropy, balanced accuracy and macro F1 of ``model`` on the test images, each image once.

    Sums are reduced, never means, and no image is padded or repeated. All are NaN if no image could be used.
    """
    num_classes = run.num_classes
    loss = torch.zeros(1, dtype=torch.float64, device=run.device)
    counts = torch.zeros(3, num_classes, dtype=torch.float64, device=run.device)  # right, truth and predicted images
    for batch in run.test_batches():
        logits = model(batch.images)  # (m, C)
        run.show(batch, logits)
        answers = logits.argmax(dim=1)
        loss += F.cross_entropy(logits, batch.labels, reduction="sum").double()
        for count, labels in zip(counts, (answers[answers == batch.labels], batch.labels, answers), strict=True):
            count += torch.bincount(labels, minlength=num_classes)
    totals = np.array(run.total(torch.cat([loss, counts.flatten()])))
    right, truth, predicted = totals[1:].reshape(3, num_classes)
    count = truth.sum()
    return {
        "accuracy": float(right.sum() / count) if count else float("nan"),
        "loss": float(totals[0] / count) if count else float("nan"),
        "balanced_accuracy": balanced_accuracy(right, truth),
        "macro_f1": macro_f1(right, truth, predicted),
    }
