"""Loops as people write them for plain PyTorch: on one and on two workers they end as plain PyTorch does.

Each loop is written once. Plain PyTorch runs it with ``Plain``, which hands out whole global batches and adds nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from tests.helpers.loops_beside_torch import (
    NUM_IMAGES_WITH_EMPTY_SLICES,
    WIDTH,
    check,
    linear,
    seeded,
    sgd,
    small,
)


def trained(run: Any, network: nn.Module, edit: Callable[[nn.Module], object] = lambda model: None) -> list[nn.Module]:
    """The usual loop; ``edit`` changes the network between the backward and the optimizer's step."""
    model = run.prepare(network)
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            loss = cross_entropy(model(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            edit(model)
            optimizer.step()
            run.log(loss=loss.item())
    return [model]


def gan(run: Any) -> list[nn.Module]:
    """Two networks and two losses; the critic has batch norm, and sees real and made images apart."""
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))  # noqa: E731
    critic = run.prepare(seeded(make))
    generator = run.prepare(seeded(lambda: nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())))
    judges, makes = (run.prepare(torch.optim.Adam(model.parameters(), lr=0.01)) for model in (critic, generator))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            noise = batch.images.flatten(1)[:, :4]
            made = generator(noise)
            judged = (F.softplus(-critic(batch.images)) + F.softplus(critic(made.detach()))).mean()
            judges.zero_grad()
            judged.backward()
            judges.step()
            fooled = F.softplus(-critic(generator(noise))).mean()
            makes.zero_grad()
            fooled.backward()
            makes.step()
            run.log(judged=judged, fooled=fooled)
    return [critic, generator]


def clipped_critic(run: Any) -> list[nn.Module]:
    """Weights that are clipped after each step."""
    critic = run.prepare(linear(1))
    optimizer = run.prepare(torch.optim.RMSprop(critic.parameters(), lr=0.05))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            (critic(batch.images)[:, 0] * (batch.labels * 2.0 - 3)).mean().backward()
            optimizer.step()
            with torch.no_grad():
                for weight in critic.parameters():
                    weight.clamp_(-0.02, 0.02)
    return [critic]


def weight_averaging(run: Any) -> list[nn.Module]:
    """torch's stochastic weight averaging, with a schedule, and batch norm that is measured anew at the end."""
    model = run.prepare(small())
    average = run.prepare(AveragedModel(model))
    optimizer = sgd(run, model)
    schedule = run.prepare(SWALR(optimizer, swa_lr=0.01, anneal_epochs=3))
    seen = []
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            seen.append(batch.images)
            optimizer.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
            if epoch.number >= 1:
                average.update_parameters(model)
                schedule.step()
    update_bn(seen, average)
    return [model, average]


def plateau(run: Any) -> list[nn.Module]:
    """A rate that falls when the loop's own evaluation gets no better."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    schedule = run.prepare(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0))

    def measure() -> dict[str, float]:
        schedule.step(1.0)
        return {"loss": 1.0}

    for epoch in run.epochs(evaluate=measure):
        for batch in epoch:
            optimizer.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
    return [model, nn.ParameterList([torch.tensor(optimizer.param_groups[0]["lr"])])]


def added_group(run: Any) -> list[nn.Module]:
    """The head alone, then all layers."""
    model = run.prepare(small())
    *body, weight, bias = model.parameters()
    optimizer = run.prepare(torch.optim.SGD([weight, bias], lr=0.1, momentum=0.9))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            if batch.step == 4:
                optimizer.add_param_group({"params": body, "lr": 0.01})
            model.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
    return [model]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        norm = partial(nn.BatchNorm2d, 4, track_running_stats=False)  # plain PyTorch counts a batch twice
        self.block = nn.Sequential(norm(), nn.ReLU(), nn.Conv2d(4, 4, 3), norm())
        self.head = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, images: Tensor) -> Tensor:
        features: Any = checkpoint(self.block, self.stem(images), use_reentrant=self.reentrant)
        return self.head(features.mean((2, 3)))


def with_checkpoints(run: Any) -> list[nn.Module]:
    return trained(run, seeded(lambda: Checkpointed(reentrant=False)))


def with_reentrant_checkpoints(run: Any) -> list[nn.Module]:
    return trained(run, seeded(lambda: Checkpointed(reentrant=True)))


def clipped_by_norm(run: Any) -> list[nn.Module]:
    return trained(run, small(), lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def clipped_by_value(run: Any) -> list[nn.Module]:
    return trained(run, small(), lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))


def edited_gradients(run: Any) -> list[nn.Module]:
    """Gradients that are centred, replaced and taken away by hand."""

    def edit(model: nn.Module) -> None:
        for number, weight in enumerate(model.parameters()):
            assert weight.grad is not None
            weight.grad.sub_(weight.grad.mean())
            if number == 0:
                weight.grad = weight.grad.sign() * 0.01
            if number == 1:
                weight.grad = None

    return trained(run, small(), edit)


def accumulated_in_halves(run: Any) -> list[nn.Module]:
    """Each batch in two halves, of which the second may be empty."""
    model = run.prepare(linear())
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            for pictures, labels in zip(batch.images.tensor_split(2), batch.labels.tensor_split(2), strict=True):
                loss = cross_entropy(model(pictures), labels, reduction="sum") / len(batch.labels)
                loss.backward()
            optimizer.step()
    return [model]


def accumulated_over_batches(run: Any) -> list[nn.Module]:
    """An optimizer that steps after every third batch."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            (cross_entropy(model(batch.images), batch.labels) / 3).backward()
            if batch.step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    return [model]


def scaled(run: Any) -> list[nn.Module]:
    """A scaler around the loss, gradients that are clipped at their own scale, and penalties on the weights."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    scaler = run.prepare(torch.amp.GradScaler(run.device.type, init_scale=1024.0, growth_interval=3))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            penalty = sum(weight.square().sum() for weight in model.parameters())
            loss = cross_entropy(model(batch.images), batch.labels, label_smoothing=0.1) + 0.01 * penalty
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return [model]


def weighted_classes(run: Any) -> list[nn.Module]:
    """A mean over the weights of the labels in place of the images."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            weights = torch.tensor([1.0, 5.0, 0.5, 2.0], dtype=batch.images.dtype, device=batch.images.device)
            losses = cross_entropy(model(batch.images), batch.labels, weights, reduction="sum")
            optimizer.zero_grad()
            run.mean(losses, weights[batch.labels].sum()).backward()
            optimizer.step()
    return [model]


def subset(run: Any) -> list[nn.Module]:
    """An optimizer of some weights; the others get gradients that nobody clears."""
    model = run.prepare(small())
    *_, weight, bias = model.parameters()
    optimizer = run.prepare(torch.optim.SGD([weight, bias], lr=0.1))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
    return [model]


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized(run: Any) -> list[nn.Module]:
    def make() -> nn.Module:
        square = parametrize.register_parametrization  # of a weight
        middle = nn.Linear(8, 8)
        square(middle, "weight", Symmetric())
        first = parametrizations.spectral_norm(nn.Linear(WIDTH, 8))
        return nn.Sequential(nn.Flatten(), first, nn.Tanh(), middle, parametrizations.weight_norm(nn.Linear(8, 4)))

    return trained(run, seeded(make))


def modes(run: Any) -> list[nn.Module]:
    """Evaluation mode in every other step, and a look at the batch in evaluation mode after it."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            model.train(batch.step % 2 == 0)
            optimizer.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                accuracy = (model(batch.images).argmax(1) == batch.labels).float().mean()
            model.train()
            run.log(accuracy=accuracy)
    return [model]


def prepared_teacher(run: Any) -> list[nn.Module]:
    teacher = run.prepare(small()).eval().requires_grad_(False)
    model = run.prepare(linear())
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            wanted = teacher(batch.images).softmax(1)
            optimizer.zero_grad()
            F.kl_div(model(batch.images).log_softmax(1), wanted, reduction="batchmean").backward()
            optimizer.step()
    return [model, teacher]


class Momentum(nn.Module):
    """Momentum contrast: a slow copy of an encoder, and a queue of its newest features."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = linear(8), linear(8).requires_grad_(False)
        self.queue: Tensor
        self.register_buffer("queue", F.normalize(torch.linspace(-1, 1, 16 * 8).view(16, 8)))

    @torch.no_grad()
    def follow(self, keys: Tensor) -> None:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
        self.queue.copy_(torch.cat([keys, self.queue])[:16])


def momentum_contrast(run: Any) -> list[nn.Module]:
    model = run.prepare(Momentum())
    optimizer = run.prepare(torch.optim.SGD(model.query.parameters(), lr=0.1))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            query, key = F.normalize(model.query(batch.images)), F.normalize(model.key(batch.images.flip(3))).detach()
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ model.queue.T.clone()], dim=1) / 0.2
            optimizer.zero_grad()
            cross_entropy(logits, torch.zeros_like(batch.labels)).backward()
            optimizer.step()
            model.follow(run.gather(key))
    return [model]


def contrastive(run: Any) -> list[nn.Module]:
    """Two views of each image, compared with those of all other images of the global batch."""
    model = run.prepare(linear(8))
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            views = batch.images, batch.images.flip(3)
            one, other = (run.gather(F.normalize(model(view))) for view in views)  # (M, 8) each
            numbers = torch.arange(len(one), device=one.device)
            optimizer.zero_grad()
            cross_entropy(one @ other.T / 0.2, numbers).backward()
            optimizer.step()
    return [model]


class OwnNorm(nn.BatchNorm2d):
    """Batch norm with another default and something around it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-3, momentum=0.2)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def own_batch_norm(run: Any) -> list[nn.Module]:
    """A class of batch norm of the loop's own, and torch's, which needs a GPU otherwise."""

    def make() -> nn.Module:
        norm = nn.SyncBatchNorm(4)
        return nn.Sequential(nn.Conv2d(3, 4, 3), OwnNorm(4), nn.Conv2d(4, 4, 3), norm, nn.Flatten(), nn.Linear(64, 4))

    return trained(run, seeded(make))


def backward_for_each_head(run: Any) -> list[nn.Module]:
    """A backward for each loss, which reaches one head, and gradients that are kept while others are computed."""
    body = run.prepare(seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 8), nn.Tanh())))
    heads = run.prepare(seeded(lambda: nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 2)])))
    weights = [*body.parameters(), *heads.parameters()]
    optimizer = run.prepare(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            cross_entropy(heads[0](body(batch.images.flip(3))), batch.labels).backward()
            kept = [weight.grad for weight in weights]
            optimizer.zero_grad()
            for head, labels in zip(heads, (batch.labels, batch.labels % 2), strict=True):
                cross_entropy(head(body(batch.images)), labels).backward()
            for weight, gradient in zip(weights, kept, strict=True):
                weight.grad = weight.grad if gradient is None else weight.grad + 0.3 * gradient
            optimizer.step()
    return [body, heads]


def caught(run: Any) -> list[nn.Module]:
    """An exception of the loop's own, caught by the loop."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            try:
                if batch.step == 3:
                    raise RuntimeError("too large")
                loss = cross_entropy(model(batch.images), batch.labels)
            except RuntimeError:
                loss = cross_entropy(model(batch.images * 0.5), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [model]


def looked_ahead(run: Any) -> list[nn.Module]:
    """Weights that go back half of the way every third step."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    slow = copy.deepcopy(model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
            if batch.step % 3 == 2:
                with torch.no_grad():
                    for old, new in zip(slow.parameters(), model.parameters(), strict=True):
                        old.lerp_(new, 0.5)
                        new.copy_(old)
    return [model]


LOOPS = (
    gan,
    clipped_critic,
    weight_averaging,
    plateau,
    added_group,
    with_checkpoints,
    with_reentrant_checkpoints,
    clipped_by_norm,
    clipped_by_value,
    edited_gradients,
    accumulated_in_halves,
    accumulated_over_batches,
    scaled,
    weighted_classes,
    subset,
    parametrized,
    modes,
    prepared_teacher,
    momentum_contrast,
    contrastive,
    own_batch_norm,
    backward_for_each_head,
    caught,
    looked_ahead,
)
_OF_MORE_THAN_ONE_IMAGE = (gan,)  # plain PyTorch has no BatchNorm1d of one image


def test_they_end_as_with_plain_pytorch(tmp_path: Path) -> None:
    check(LOOPS, tmp_path)


def test_they_end_as_with_plain_pytorch_if_a_worker_has_no_images_in_some_steps(tmp_path: Path) -> None:
    loops = tuple(loop for loop in LOOPS if loop not in _OF_MORE_THAN_ONE_IMAGE)
    check(loops, tmp_path, NUM_IMAGES_WITH_EMPTY_SLICES)
