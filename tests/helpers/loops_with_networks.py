"""Loops that build, change, average or swap their networks, for commands that use a run afterwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18

import raytrain
from raytrain.training.evaluation import evaluate
from raytrain.training.run import Run

LOOPS = f"{__name__}:"


def trained_by(run: Run, model: nn.Module) -> None:
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()


def small(num_classes: int) -> nn.Module:
    body = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*body, nn.LazyLinear(num_classes))


def own(run: Run) -> None:
    trained_by(run, run.prepare(small(run.num_classes)))


def averaged(run: Run) -> None:
    """Is measured with an average of the weights."""
    model = run.prepare(small(run.num_classes))
    average = run.prepare(raytrain.WeightAverage(model, 0.5))
    optimizer = run.prepare(run.build_optimizer(model))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
            average.update(batch.step)


def without_pooling(run: Run) -> None:
    """Has the names and shapes of resnet18, and computes something else."""
    model = resnet18(num_classes=run.num_classes)
    model.maxpool = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    trained_by(run, run.prepare(model))


def swapped(run: Run) -> None:
    """Measures other weights than those that it trains, as optimizers without a schedule do."""
    model = run.prepare(small(run.num_classes))

    def measure() -> dict[str, float]:
        kept = [weight.detach().clone() for weight in model.parameters()]
        for weight in model.parameters():
            weight.mul_(0.5)
        measured = evaluate(run, model)
        for weight, before in zip(model.parameters(), kept, strict=True):
            weight.copy_(before)
        return measured

    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    for epoch in run.epochs(evaluate=measure):
        for batch in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()


def as_the_options_say(run: Run) -> None:
    trained_by(run, run.prepare(run.build_model()))
