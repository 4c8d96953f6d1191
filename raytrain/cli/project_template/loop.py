"""The network and its training loop: change what you like."""
# pyright: basic

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
    """Train on each worker as on one GPU: N workers compute what one would."""
    model = run.prepare(network(run.num_classes))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    scheduler = run.prepare(run.build_scheduler(optimizer))  # the schedule and warm-up of train.py
    for epoch in run.epochs():
        for batch in epoch:
            logits = model(batch.images)
            loss = F.cross_entropy(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()  # afterwards each gradient is that of the whole global batch
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            run.log(loss=loss, accuracy=(logits.argmax(dim=1) == batch.labels).float().mean())
