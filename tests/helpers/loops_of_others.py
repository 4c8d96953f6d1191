"""Loops of well-known methods as people write them, each once, for a run and for plain PyTorch.

A loop returns what it has trained. :mod:`tests.helpers.loops_beside_torch` compares both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, parametrize
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from tests.helpers.loops_beside_torch import WIDTH, linear, seeded, sgd, small


def steps(run: Any, model: nn.Module, optimizer: Any, loss_of: Callable[[Any], Tensor]) -> list[nn.Module]:
    """The usual loop: ``loss_of`` a batch, its gradients, and a step of the optimizer."""
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
    return [model]


def trained(run: Any, network: nn.Module, edit: Callable[[nn.Module], object] = lambda model: None) -> list[nn.Module]:
    """Another usual loop; ``edit`` changes the network between the backward and the optimizer's step."""
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
    schedule = run.prepare(ReduceLROnPlateau(optimizer, factor=0.1, patience=0))

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

    def loss_of(batch: Any) -> Tensor:
        weights = torch.tensor([1.0, 5.0, 0.5, 2.0], dtype=batch.images.dtype, device=batch.images.device)
        losses = cross_entropy(model(batch.images), batch.labels, weights, reduction="sum")
        return run.mean(losses, weights[batch.labels].sum())

    return steps(run, model, sgd(run, model), loss_of)


def subset(run: Any) -> list[nn.Module]:
    """An optimizer of some weights; the others get gradients that nobody clears."""
    model = run.prepare(small())
    *_, weight, bias = model.parameters()
    optimizer = run.prepare(torch.optim.SGD([weight, bias], lr=0.1))
    return steps(run, model, optimizer, lambda batch: cross_entropy(model(batch.images), batch.labels))


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

    def loss_of(batch: Any) -> Tensor:
        views = batch.images, batch.images.flip(3)
        one, other = (run.gather(F.normalize(model(view))) for view in views)  # (M, 8) each
        return cross_entropy(one @ other.T / 0.2, torch.arange(len(one), device=one.device))

    return steps(run, model, sgd(run, model), loss_of)


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
    slow = run.prepare(copy.deepcopy(model))
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
    return steps(run, model, optimizer, lambda batch: cross_entropy(model(batch.images), batch.labels))


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
    return steps(run, model, sgd(run, model), lambda batch: model(batch.images, batch.images.flip(3)))


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

    def loss_of(batch: Any) -> Tensor:
        moved = {name: 1.01 * weight for name, weight in model.named_parameters()}
        return cross_entropy(torch.func.functional_call(model, moved, (batch.images,)), batch.labels)

    return steps(run, model, sgd(run, model), loss_of)


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

    def loss_of(batch: Any) -> Tensor:
        images = batch.images.clone().requires_grad_()
        logits = model(images)
        (slope,) = torch.autograd.grad(logits.square().sum(), images, create_graph=True)
        penalty = slope.flatten(1).square().sum(1).mean()
        return cross_entropy(logits, batch.labels) + 0.1 * penalty

    return steps(run, model, sgd(run, model), loss_of)


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
        for batch in epoch:
            optimizer.zero_grad()
            number = batch.step % len(epoch) + 1  # one of enumerate would begin again after a resume
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
    gan,
    clipped_critic,
    weight_averaging,
    plateau,
    added_group,
    with_checkpoints,
    with_reentrant_checkpoints,
    edited_gradients,
    accumulated_in_halves,
    scaled,
    weighted_classes,
    subset,
    parametrized,
    modes,
    momentum_contrast,
    contrastive,
    own_batch_norm,
    backward_for_each_head,
    caught,
    looked_ahead,
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
OF_MORE_THAN_ONE_IMAGE = (gan, stopped_gradients, bootstrap)  # plain PyTorch has no BatchNorm1d of one image
