"""The network and its training loop: change what you like."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import raytrain


def network(num_classes: int) -> nn.Module:
    """A small convolutional network for grey images of any size."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, num_classes),
    )


def train(run: raytrain.Run) -> None:
    """Runs on every worker. What goes through ``run`` makes N workers compute what one would."""
    model = run.prepare(network(run.num_classes))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for batch in run.batches():
        logits = model(batch.images)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        run.backward(loss)
        run.step(optimizer, clip_norm=1.0)
        run.log(loss=loss, correct=(logits.argmax(dim=1) == batch.labels).sum())
