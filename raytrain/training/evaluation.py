"""The built-in evaluation. Copy it beside a training loop of your own and change what you like."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from raytrain.training.run import Run


def evaluate(run: Run, model: nn.Module) -> dict[str, float]:
    """Accuracy and mean cross entropy of ``model`` on the test images, each image once over all workers.

    Sums are reduced, never means, and no image is padded or repeated. Both are NaN if no image could be used.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=run.device)  # loss, correct, count
    for batch in run.test_batches():
        logits = model(batch.images)  # (m, C)
        run.show(batch, logits)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        correct = (logits.argmax(dim=1) == batch.labels).sum()
        sums += torch.stack([loss.double(), correct.double(), loss.new_tensor(batch.num_used).double()])
    loss, correct, count = run.total(sums)
    if not count:
        return {"accuracy": float("nan"), "loss": float("nan")}
    return {"accuracy": correct / count, "loss": loss / count}
