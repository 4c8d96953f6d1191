"""Parts of plain PyTorch loops: networks, losses and a way to compare them on several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

NUM_CLASSES, STEPS, STEPS_PER_EPOCH = 4, 8, 4
Loop = Callable[[Any], None]


def mlp(num_outputs: int = NUM_CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, num_outputs))


class Normed(nn.Module):
    """A network with batch norm, and a layer that no image goes through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, 1, 1), nn.Tanh())
        self.head = nn.Linear(96, NUM_CLASSES)
        self.spare = nn.Linear(2, 2)

    def embed(self, pixels: Tensor) -> Tensor:
        return self.block(self.body(pixels)).flatten(1)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.embed(pixels))


def steps(
    run: Any,
    model: nn.Module,
    optimizer: Any,
    loss_of: Callable[[nn.Module, Any], Tensor],
    *,
    evaluate: Callable[[], dict[str, float]] | None = dict,
) -> None:
    """Train to the end of the run. By default, nothing is measured, because that takes longer than the steps."""
    for epoch in run.epochs(evaluate):
        for batch in epoch:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


def entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels)


def by_steps(loss_of: Callable[[nn.Module, Any], Tensor], make: Callable[[], nn.Module] = Normed) -> Loop:
    def loop(run: Any) -> None:
        model = run.prepare(make())
        steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9)), loss_of)

    return loop
