"""Loops that build, change, average or swap their networks, for commands that use a run afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torchvision.models import resnet18

import raytrain
from raytrain.training.evaluation import evaluate
from raytrain.training.run import Run
from tests.helpers.own_loops import fit, learn

LOOPS = f"{__name__}:"


def trained_by(run: Run, model: nn.Module, evaluate: Callable[[], dict[str, float]] | None = None) -> None:
    fit(run, model, run.prepare(torch.optim.SGD(model.parameters(), lr=0.05)), evaluate=evaluate)


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
            learn(model, optimizer, batch)
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

    trained_by(run, model, measure)


def as_the_options_say(run: Run) -> None:
    trained_by(run, run.prepare(run.build_model()))
