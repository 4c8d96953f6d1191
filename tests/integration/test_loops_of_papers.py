"""Loops of well-known methods, as people write them: on one and on two workers they end as plain PyTorch does."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ExponentialLR, OneCycleLR, StepLR

from tests.integration.test_loops_of_others import (
    WIDTH,
    Plain,
    check,
    cross_entropy,
    linear,
    seeded,
    sgd,
    small,
)


def mean_teacher(run: Any) -> list[nn.Module]:
    """A teacher that follows its student, and a consistency that grows."""
    student, teacher = run.prepare(small()), run.prepare(small().requires_grad_(False))
    optimizer = sgd(run, student)
    for batch in run.batches(evaluate=dict):
        with torch.no_grad():
            wanted = teacher(batch.images.flip(3)).softmax(1)
        logits = student(batch.images)
        consistency = F.mse_loss(logits.softmax(1), wanted, reduction="sum")
        run.backward(cross_entropy(logits, batch.labels) + min(1.0, batch.step / 5) * consistency)
        run.step(optimizer)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
    return [student, teacher]


def heads(run: Any) -> list[nn.Module]:
    """A body and two heads, each with an optimizer and a schedule of its own."""
    body = run.prepare(seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 8), nn.Tanh())))
    heads = run.prepare(seeded(lambda: nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 2)])))
    optimizers = [
        run.prepare(torch.optim.AdamW(body.parameters(), lr=0.01)),
        run.prepare(torch.optim.SGD(heads[0].parameters(), lr=0.1, momentum=0.9)),
        run.prepare(torch.optim.Adagrad(heads[1].parameters(), lr=0.05)),
    ]
    schedules = [
        run.prepare(OneCycleLR(optimizers[0], 0.02, total_steps=20)),
        run.prepare(CosineAnnealingWarmRestarts(optimizers[1], T_0=3, T_mult=2)),
        run.prepare(ExponentialLR(optimizers[2], 0.9)),
    ]
    for batch in run.batches(evaluate=dict):
        features = body(batch.images)
        one, other = (head(features) for head in heads)
        run.backward(cross_entropy(one, batch.labels) + cross_entropy(other, batch.labels % 2))
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            run.step(optimizer)
            schedule.step()
    return [body, heads]


class Scaled(torch.optim.Optimizer):
    """An optimizer of one's own, whose steps are as long as a part of the weight."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                mean = self.state[each].setdefault("mean", torch.zeros_like(each))
                mean.lerp_(each.grad, 0.1)
                each.add_(mean * (each.norm() + 0.1) / mean.norm().clamp(min=1e-9), alpha=-group["lr"])


def own_optimizer(run: Any) -> list[nn.Module]:
    model = run.prepare(small())
    optimizer = run.prepare(Scaled(model.parameters()))
    for batch in run.batches(evaluate=dict):
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
    return [model]


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 6), nn.BatchNorm1d(6, affine=False))
        self.predict = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 6))

    def forward(self, images: Tensor, other: Tensor) -> Tensor:
        one, two = self.encode(images), self.encode(other)
        agreement = F.cosine_similarity(self.predict(one), two.detach())
        return -(agreement + F.cosine_similarity(self.predict(two), one.detach())).sum() / 2


def stopped_gradients(run: Any) -> list[nn.Module]:
    """Two views of each image, of which each predicts the other, as a constant."""
    model = run.prepare(seeded(Siamese))
    optimizer = sgd(run, model)
    for batch in run.batches(evaluate=dict):
        run.backward(model(batch.images, batch.images.flip(3)))
        run.step(optimizer)
    return [model]


def bootstrap(run: Any) -> list[nn.Module]:
    """An online network that predicts a slow copy of its encoder."""
    online = run.prepare(seeded(Siamese))
    target = run.prepare(copy.deepcopy(online.encode).requires_grad_(False))
    optimizer = sgd(run, online)
    for batch in run.batches(evaluate=dict):
        with torch.no_grad():
            wanted = target(batch.images.flip(2))
        run.backward((2 - 2 * F.cosine_similarity(online.predict(online.encode(batch.images)), wanted)).sum())
        run.step(optimizer)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.encode.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
    return [online, target]


def functional(run: Any) -> list[nn.Module]:
    model = run.prepare(small())
    optimizer = sgd(run, model)
    for batch in run.batches(evaluate=dict):
        moved = {name: 1.01 * each for name, each in model.named_parameters()}
        run.backward(cross_entropy(torch.func.functional_call(model, moved, (batch.images,)), batch.labels))
        run.step(optimizer)
    return [model]


def adversarial(run: Any) -> list[nn.Module]:
    """A backward of the loop's own, for the gradients of the images; those of the weights are cleared."""
    model = run.prepare(linear())
    optimizer = sgd(run, model)
    for batch in run.batches(evaluate=dict):
        images = batch.images.clone().requires_grad_()
        cross_entropy(model(images), batch.labels).backward()
        assert images.grad is not None
        optimizer.zero_grad(set_to_none=batch.step % 2 == 0)
        run.backward(cross_entropy(model(images.detach() + 0.1 * images.grad.sign()), batch.labels))
        run.step(optimizer)
    return [model]


def centred(run: Any) -> list[nn.Module]:
    """A centre of the outputs, which the loop's own collective adds up over the workers between two of batch norm."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    centre = 0.0
    for batch in run.batches(evaluate=dict):
        logits = model(batch.images)
        used = logits[: batch.num_used].detach()
        sums = torch.cat([used.sum(0), used.new_tensor([len(used)])])
        if dist.is_initialized():
            dist.all_reduce(sums)
        centre = 0.9 * centre + 0.1 * sums[:4] / sums[4]
        run.backward(cross_entropy(logits - centre, batch.labels))
        run.step(optimizer)
        if dist.is_initialized():
            dist.barrier()
    return [model]


def epoch_by_epoch(run: Any) -> list[nn.Module]:
    """A loop over epochs, which leaves the batches after each, and a schedule that goes on once an epoch."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    schedule = run.prepare(StepLR(optimizer, 1, 0.1))
    for epoch in range(2):
        first = 6 * epoch if isinstance(run, Plain) else 0  # a run goes on where it is
        for batch in islice(run.batches(evaluate=dict), first, first + 6):
            run.backward(cross_entropy(model(batch.images), batch.labels))
            run.step(optimizer)
        schedule.step()
    return [model]


LOOPS = (
    mean_teacher,
    heads,
    own_optimizer,
    stopped_gradients,
    bootstrap,
    functional,
    adversarial,
    centred,
    epoch_by_epoch,
)


def test_they_end_as_with_plain_pytorch(tmp_path: Path) -> None:
    check(LOOPS, tmp_path)
