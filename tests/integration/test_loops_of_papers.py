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
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ExponentialLR, OneCycleLR, StepLR

from tests.helpers.loops_beside_torch import (
    NUM_IMAGES_WITH_EMPTY_SLICES,
    WIDTH,
    check,
    linear,
    seeded,
    sgd,
    small,
)


def mean_teacher(run: Any) -> list[nn.Module]:
    """A teacher that follows its student, and a consistency that grows."""
    student, teacher = run.prepare(small()), run.prepare(small().requires_grad_(False))
    optimizer = sgd(run, student)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            with torch.no_grad():
                wanted = teacher(batch.images.flip(3)).softmax(1)
            logits = student(batch.images)
            consistency = F.mse_loss(logits.softmax(1), wanted)
            loss = cross_entropy(logits, batch.labels) + min(1.0, batch.step / 5) * consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
            run.log(loss=loss, consistency=consistency)
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
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            features = body(batch.images)
            one, other = (head(features) for head in heads)
            for optimizer in optimizers:
                optimizer.zero_grad()
            (cross_entropy(one, batch.labels) + cross_entropy(other, batch.labels % 2)).backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
    return [body, heads]


class Scaled(torch.optim.Optimizer):
    """An optimizer of one's own, whose steps are as long as a part of the weight."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 0.1)
                weight.add_(mean * (weight.norm() + 0.1) / mean.norm().clamp(min=1e-9), alpha=-group["lr"])


def own_optimizer(run: Any) -> list[nn.Module]:
    model = run.prepare(small())
    optimizer = run.prepare(Scaled(model.parameters()))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
    return [model]


class SharpnessAware(torch.optim.Optimizer):
    """Sharpness-aware minimisation, in the usual two steps around an optimizer that it holds."""

    def __init__(self, parameters: Any, radius: float) -> None:
        super().__init__(parameters, {"radius": radius})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def ascend(self) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        for weight in weights:
            self.state[weight]["before"] = weight.clone()
            weight.add_(weight.grad * self.param_groups[0]["radius"] / norm)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.copy_(self.state[weight]["before"])
        self.base.step()
        self.zero_grad()


def sharpness_aware(run: Any) -> list[nn.Module]:
    model = run.prepare(small())
    optimizer = run.prepare(SharpnessAware(model.parameters(), radius=0.05))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.ascend()
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
    return [model]


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 6), nn.BatchNorm1d(6, affine=False))
        self.predict = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 6))

    def forward(self, images: Tensor, other: Tensor) -> Tensor:
        one, two = self.encode(images), self.encode(other)
        agreement = F.cosine_similarity(self.predict(one), two.detach())
        return -(agreement + F.cosine_similarity(self.predict(two), one.detach())).mean() / 2


def stopped_gradients(run: Any) -> list[nn.Module]:
    """Two views of each image, of which each predicts the other, as a constant."""
    model = run.prepare(seeded(Siamese))
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            model(batch.images, batch.images.flip(3)).backward()
            optimizer.step()
    return [model]


def bootstrap(run: Any) -> list[nn.Module]:
    """An online network that predicts a slow copy of its encoder."""
    online = run.prepare(seeded(Siamese))
    target = run.prepare(copy.deepcopy(online.encode).requires_grad_(False))
    optimizer = sgd(run, online)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            with torch.no_grad():
                wanted = target(batch.images.flip(2))
            predicted = online.predict(online.encode(batch.images))
            optimizer.zero_grad()
            (2 - 2 * F.cosine_similarity(predicted, wanted)).mean().backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.encode.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
    return [online, target]


def functional(run: Any) -> list[nn.Module]:
    model = run.prepare(small())
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            moved = {name: 1.01 * weight for name, weight in model.named_parameters()}
            optimizer.zero_grad()
            cross_entropy(torch.func.functional_call(model, moved, (batch.images,)), batch.labels).backward()
            optimizer.step()
    return [model]


def adversarial(run: Any) -> list[nn.Module]:
    """A backward for the gradients of the images; those of the weights are cleared."""
    model = run.prepare(linear())
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            images = batch.images.clone().requires_grad_()
            cross_entropy(model(images), batch.labels).backward()
            assert images.grad is not None
            optimizer.zero_grad(set_to_none=batch.step % 2 == 0)
            cross_entropy(model(images.detach() + 0.1 * images.grad.sign()), batch.labels).backward()
            optimizer.step()
    return [model]


def gradient_penalty(run: Any) -> list[nn.Module]:
    """The slope of the answers to each image is part of the loss."""
    model = run.prepare(seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))))
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            images = batch.images.clone().requires_grad_()
            logits = model(images)
            (slope,) = torch.autograd.grad(logits.square().sum(), images, create_graph=True)
            penalty = slope.flatten(1).square().sum(1).mean()
            optimizer.zero_grad()
            (cross_entropy(logits, batch.labels) + 0.1 * penalty).backward()
            optimizer.step()
    return [model]


def centred(run: Any) -> list[nn.Module]:
    """A centre of the outputs, which the loop's own collective adds up over the workers between two of batch norm."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    centre = 0.0
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            logits = model(batch.images)
            used = logits[: batch.num_used].detach()
            sums = torch.cat([used.sum(0), used.new_tensor([len(used)])])
            if dist.is_initialized():
                dist.all_reduce(sums)
            centre = 0.9 * centre + 0.1 * sums[:4] / sums[4]
            optimizer.zero_grad()
            cross_entropy(logits - centre, batch.labels).backward()
            optimizer.step()
            if dist.is_initialized():
                dist.barrier()
    return [model]


def epoch_by_epoch(run: Any) -> list[nn.Module]:
    """A schedule that goes on once an epoch, and what is done at an epoch's start."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    schedule = run.prepare(StepLR(optimizer, 1, 0.1))
    for epoch in run.epochs(evaluate=dict):
        model.train()
        model[0].requires_grad_(epoch.number > 0)
        for number, batch in enumerate(epoch, start=1):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch.images), batch.labels) * number / len(epoch)
            loss.backward()
            optimizer.step()
        schedule.step()
    return [model]


def in_phases(run: Any) -> list[nn.Module]:
    """A loop for the first epoch, in which the head is trained, and another one for those that follow."""
    model = run.prepare(small())
    *body, weight, bias = model.parameters()
    first = run.prepare(torch.optim.Adam([weight, bias], lr=0.01))
    second = run.prepare(torch.optim.SGD(body, lr=0.1))
    for epoch in islice(run.epochs(evaluate=dict), 1):
        for batch in epoch:
            model.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            first.step()
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            model.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            second.step()
    return [model]


LOOPS = (
    mean_teacher,
    heads,
    own_optimizer,
    sharpness_aware,
    stopped_gradients,
    bootstrap,
    functional,
    adversarial,
    gradient_penalty,
    centred,
    epoch_by_epoch,
    in_phases,
)
_OF_MORE_THAN_ONE_IMAGE = (stopped_gradients, bootstrap)  # plain PyTorch has no BatchNorm1d of one image


def test_they_end_as_with_plain_pytorch(tmp_path: Path) -> None:
    check(LOOPS, tmp_path)


def test_they_end_as_with_plain_pytorch_if_a_worker_has_no_images_in_some_steps(tmp_path: Path) -> None:
    loops = tuple(loop for loop in LOOPS if loop not in _OF_MORE_THAN_ONE_IMAGE)
    check(loops, tmp_path, NUM_IMAGES_WITH_EMPTY_SLICES)
