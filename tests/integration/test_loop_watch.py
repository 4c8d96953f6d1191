"""Loops whose result depends on the number of workers: each is reported in its first steps, with what to write.

The right value of most is tested in test_plain_loops.py, written as the note says.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from raytrain.errors import UsageError
from raytrain.monitor.events import Note
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, config, images, make_run
from tests.helpers.plain_loops import STEPS_PER_EPOCH, Loop, Normed, by_steps, entropy, mlp, steps

WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 2.0], dtype=torch.float64)


def by_features(penalty: Callable[[Tensor, Tensor], Tensor]) -> Loop:
    """A loop with a term that compares the logits (m, C) of images and of their mirror images."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        logits, mirrored = model(batch.images), model(batch.images.flip(3))
        return F.cross_entropy(logits, batch.labels) + 0.01 * penalty(logits, mirrored)

    return by_steps(loss_of, mlp)


def off_diagonal(products: Tensor) -> Tensor:
    return (products - torch.eye(len(products), dtype=products.dtype)).square().sum()


def left_out(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.images), torch.where(batch.labels == 1, -100, batch.labels))


def masked(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels, reduction="none")[batch.labels != 1].mean()


def by_nonzero(model: nn.Module, batch: Any) -> Tensor:
    chosen = (batch.labels != 1).nonzero().flatten()
    return F.cross_entropy(model(batch.images[chosen]), batch.labels[chosen])


def divided_by_their_number(model: nn.Module, batch: Any) -> Tensor:
    chosen = torch.where(batch.labels != 1)[0]
    return F.cross_entropy(model(batch.images), batch.labels, reduction="none")[chosen].sum() / len(chosen)


def of_labelled(model: nn.Module, batch: Any) -> Tensor:
    """As in semi-supervised learning: some images have labels."""
    logits, has_label = model(batch.images), batch.samples % 3 > 0
    return F.cross_entropy(logits[has_label], batch.labels[has_label]) + logits.square().mean()


def balanced(model: nn.Module, batch: Any) -> Tensor:
    """Two losses of equal size: the sum is twice the first one, in value."""
    first, second = entropy(model, batch), model(batch.images).square().mean()
    return first + second * (first / second).detach()


def divided_by_weights(model: nn.Module, batch: Any) -> Tensor:
    losses = WEIGHTS[batch.labels] * F.cross_entropy(model(batch.images), batch.labels, reduction="none")
    return losses.sum() / WEIGHTS[batch.labels].sum()


def centred(run: Any) -> None:
    """As DINO: a mean over the images of the steps before, in a variable of the loop."""
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    centre = torch.zeros(4, dtype=torch.float64)
    for epoch in run.epochs():
        for batch in epoch:
            logits = model(batch.images)
            wanted = (logits.detach() - centre).softmax(1)
            optimizer.zero_grad()
            (-(wanted * logits.log_softmax(1)).sum(1).mean()).backward()
            optimizer.step()
            centre = 0.9 * centre + 0.1 * logits.detach().mean(0)


def queued(run: Any) -> None:
    """As MoCo: features of the steps before, in a variable of the loop."""
    model = run.prepare(mlp(8))
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    keys = F.normalize(torch.linspace(-1, 1, 192, dtype=torch.float64).view(24, 8))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            features = F.normalize(model(batch.images))
            optimizer.zero_grad()
            F.cross_entropy(features @ keys.T, batch.labels).backward()
            optimizer.step()
            keys = torch.cat([features.detach(), keys])[:24]


class Scaled(nn.Module):
    """Keeps the size of the images outside of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.size = mlp(), 1.0

    def forward(self, pixels: Tensor) -> Tensor:
        if self.training:
            self.size = 0.8 * self.size + 0.2 * float(pixels.detach().flatten(1).norm(dim=1).mean())
        return self.net(pixels / self.size)


class TwiceScaled(nn.Module):
    """Has two layers of one class, of which the first alone learns from the images."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.first, self.second = mlp(), Scale(0.2), Scale(0.0)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net(self.second(self.first(pixels)))


class Scale(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.size = rate, 1.0

    def forward(self, pixels: Tensor) -> Tensor:
        self.size += self.rate * (float(pixels.detach().flatten(1).norm(dim=1).mean()) - self.size)
        return pixels / self.size


class NotANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = mlp(), float("nan")

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net(pixels)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.generator = mlp(), torch.Generator().manual_seed(7)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net(pixels + torch.randn(pixels.shape, generator=self.generator, dtype=pixels.dtype))


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, pixels: Tensor) -> Tensor:
        logits = self.net(pixels)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return logits


def hooks_that_multiply(model: Any, batch: Any) -> Tensor:
    """Gradients that are kept, reversed and masked; the norm of one is printed."""
    kept: list[Tensor] = []
    features = model[:3](batch.images)
    features.register_hook(kept.append)
    features.register_hook(lambda gradient: -0.5 * gradient)
    mask = torch.arange(8) < 6
    features.register_hook(lambda gradient: print(float(gradient.norm())) or gradient.clone().mul_(mask) / 2)
    return F.cross_entropy(model[3](features), batch.labels)


def hooks_of_weights(hook: Callable[[Tensor], Tensor | None]) -> Loop:
    """A loop with a ``hook`` of each weight with two dimensions, from before the first batch on."""

    def loop(run: Any) -> None:
        model = run.prepare(mlp())
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.register_hook(hook)
        steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), entropy)

    return loop


def decayed_by_hooks(run: Any) -> None:
    model = run.prepare(mlp())
    for weight in model.parameters():
        weight.register_hook(lambda gradient, weight=weight: gradient.add(0.01 * weight.detach().sign()))
    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), entropy)


class Averaged:
    """A hook of a weight, which adds what it keeps of the gradients before."""

    kept = 0.0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.kept = 0.9 * self.kept + gradient
        return gradient + self.kept


def kept_by_hook() -> nn.Module:
    model: Any = mlp()
    model[1].weight.register_hook(Averaged())
    return model


def of_some_rows(gradient: Tensor) -> Tensor:
    """Keeps the first two rows of a weight as they are, and prunes some of its numbers."""
    kept = gradient.clone()
    kept[:2] = 0
    mask = torch.arange(gradient.shape[1]) % 2 == 0
    return torch.where(mask, kept * 0.5, 0.0).masked_fill(~mask.flip(0), 0)


def hook_by_parts(model: nn.Module, batch: Any) -> Tensor:
    def hook(gradient: Tensor) -> Tensor:
        scaled = 2 * gradient
        scaled[gradient.abs() > gradient.abs().mean()] = 0
        return scaled

    logits = model(batch.images)
    logits.register_hook(hook)
    return F.cross_entropy(logits, batch.labels)


def hardest_by_topk(model: nn.Module, batch: Any) -> Tensor:
    """As many of the four may be in both halves of six images that the watch swaps, which then show nothing."""
    return F.cross_entropy(model(batch.images), batch.labels, reduction="none").topk(4)[0].mean()


TABLE = torch.randn(4, 12, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def by_table(model: nn.Module, batch: Any) -> Tensor:
    """Noise that was drawn before the first batch, for each place in a batch."""
    noise = 0.3 * TABLE[batch.step % 4, : len(batch.images)]
    return F.cross_entropy(model(batch.images + noise), batch.labels)


def weighted_by(weights_of: Callable[[int], Tensor]) -> Loop:
    """A loop with ``weights_of`` a number of images, by their places."""
    return by_steps(lambda m, b: (losses_of(m, b) * weights_of(len(b.labels))).mean(), mlp)


def free_adversarial(run: Any) -> None:
    """Changes of images that a loop keeps by their places, as free adversarial training does."""
    model, change = run.prepare(mlp()), torch.zeros(12, 3, 8, 8, dtype=torch.float64)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        added = change[: len(batch.images)].clone().requires_grad_()
        loss = F.cross_entropy(model(batch.images + added), batch.labels)
        (slope,) = torch.autograd.grad(loss, added, retain_graph=True)
        change[: len(batch.images)] += 0.1 * slope.sign()
        return loss

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


def part_by_part(model: Any, batch: Any) -> Tensor:
    """Features that are written into new tensors: two images at once, and those of a class."""
    written = torch.zeros(len(batch.images), 8, dtype=torch.float64)
    for first in range(0, len(batch.images), 2):
        written[first : first + 2] = model[:3](batch.images[first : first + 2])
    doubled = torch.zeros_like(written)
    doubled[batch.labels < 2] = written[batch.labels < 2]
    return F.cross_entropy(model[3](written + doubled), batch.labels)


def buffer_of_images(write: Callable[[Tensor, Tensor], object]) -> Loop:
    """Images in a buffer that the loop makes once, and that it can ``write`` anew in each step."""

    def loop(run: Any) -> None:
        model, buffer = run.prepare(mlp()), torch.empty(64, 3, 8, 8, dtype=torch.float64).fill_(run.rank)

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            write(buffer, batch.images)
            return F.cross_entropy(model(buffer[: len(batch.images)]), batch.labels)

        steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)

    return loop


def write_padded(buffer: Tensor, images: Tensor) -> None:
    buffer.zero_()
    buffer[: len(images), :, 1:] = images[:, :, :-1]


def shaped_as_a_bias(run: Any) -> None:
    """A factor for each image, of which a worker of two has as many as there are numbers in a bias."""
    generator = torch.Generator().manual_seed(3)
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Tanh(), nn.Linear(6, 4)))

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        factors = torch.rand(len(batch.labels), generator=generator, dtype=torch.float64)
        return (losses_of(model, batch) * (factors + 0.5)).mean()

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


class Between(nn.Module):
    """A network with a function ``between`` its layers of features (n, 8)."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh())
        self.between, self.last = between, nn.Linear(8, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.last(self.between(self.first(pixels)))


def with_layer(make: Callable[[], nn.Module], apply: Callable[[Any, Tensor], Tensor]) -> Loop:
    """A loop with a network that has the layer of ``make`` between its own, which ``apply`` calls with features."""

    def network() -> nn.Module:
        layer = make()
        network = Between(lambda features: apply(layer, features))
        network.layer = layer
        return network

    return by_steps(entropy, network)


def spread_of_transposed(features: Tensor) -> Tensor:
    turned = features.T
    return ((turned - turned.mean(1, keepdim=True)) / turned.var(1, keepdim=True).add(0.1).sqrt()).T


class Centring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        return features - features.square().mean(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def numpys_generator(run: Any) -> None:
    generator = np.random.default_rng(3)
    model = run.prepare(mlp())

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        factors = torch.from_numpy(generator.beta(1, 1, len(batch.images)))
        return F.cross_entropy(model(batch.images * factors[:, None, None, None]), batch.labels)

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


def late_hook(run: Any) -> None:
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            if batch.step == 5:
                model[1].weight.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))
            optimizer.zero_grad()
            entropy(model, batch).backward()
            optimizer.step()


def invariant(model: nn.Module, batch: Any) -> Tensor:
    """Invariant risk: the gradient of the mean loss for a scale of the logits, squared."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(model(batch.images) * scale, batch.labels)
    (gradient,) = torch.autograd.grad(loss, [scale], create_graph=True)
    return loss + gradient.square()


def after_a_step(model: nn.Module, batch: Any) -> Tensor:
    """The loss of the weights that a step would give, as in meta-learning."""
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(entropy(model, batch), [*weights.values()], create_graph=True)
    moved = {name: weight - 0.1 * gradient for (name, weight), gradient in zip(weights.items(), gradients, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, moved, (batch.images.flip(3),)), batch.labels)


def penalised_slope(model: nn.Module, batch: Any) -> Tensor:
    """A penalty on the gradient of the mean loss for the images, whose size depends on their number."""
    pixels = batch.images.clone().requires_grad_()
    loss = F.cross_entropy(model(pixels), batch.labels)
    (slope,) = torch.autograd.grad(loss, pixels, create_graph=True)
    return loss + 20 * slope.square().flatten(1).sum(1).mean()


def moved_by_gradient(model: nn.Module, batch: Any) -> Tensor:
    pixels = batch.images.clone().requires_grad_()
    entropy(model, SimpleNamespace(images=pixels, labels=batch.labels)).backward()
    model.zero_grad()
    return F.cross_entropy(model(batch.images + 5 * pixels.grad), batch.labels)


def attacked(model: nn.Module, batch: Any) -> Tensor:
    """By signs and directions of gradients, which do not depend on the number of images."""
    change, loss = torch.zeros_like(batch.images), torch.zeros((), dtype=torch.float64)
    for scaled in (
        torch.sign,
        lambda slope: slope / slope.flatten(1).norm(dim=1)[:, None, None, None],
        lambda slope: slope * (0.5 / (slope.flatten(1).norm(dim=1) + 1e-12)).view(-1, 1, 1, 1),
        lambda slope: F.normalize(slope.flatten(1)).view_as(slope),
        lambda slope: (slope.abs() >= slope.abs().flatten(1).median(1).values[:, None, None, None]).double(),
    ):
        change.requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(batch.images + change), batch.labels), change)
        change = change.detach() + 0.1 * scaled(slope)
        loss = loss + F.cross_entropy(model(batch.images + change), batch.labels) / 5
    return loss


def moved_by_gathered(run: Any, *, create_graph: bool = False) -> None:
    """The loss after a step along the gradients of a loss of all workers' logits."""
    model = run.prepare(mlp())

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        weights = dict(model.named_parameters())
        loss = F.cross_entropy(run.gather(model(batch.images)), run.gather(batch.labels))
        gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=create_graph)
        moved = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, moved, (batch.images.flip(3),)), batch.labels)

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


def counted(model: nn.Module, batch: Any) -> Tensor:
    weights = 1 / torch.bincount(batch.labels, minlength=4).clamp(min=1)
    return (weights[batch.labels] * F.cross_entropy(model(batch.images), batch.labels, reduction="none")).mean()


def hardest(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch.images), batch.labels, reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()


def several_at_once(run: Any) -> None:
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            logits = model(batch.images)
            optimizer.zero_grad()
            losses = (
                F.cross_entropy(logits, batch.labels),
                F.mse_loss(logits, torch.zeros_like(logits), reduction="sum"),
            )
            torch.autograd.backward(losses)
            optimizer.step()


def four_batches(run: Any) -> None:
    """Losses that are added up over four batches, and the features of these, which are compared."""
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        logits: list[Tensor] = []
        for batch in epoch:
            logits.append(model(batch.images))
            if len(logits) == 4:
                rows = torch.cat(logits)
                optimizer.zero_grad()
                (F.cross_entropy(logits[-1], batch.labels) + (rows @ rows.T).square().mean()).backward()
                optimizer.step()


def by_an_integer(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model, batch) * (1 + (batch.labels == 1).sum().item())


def by_sizes_of_parts(run: Any) -> None:
    """Losses of parts of a batch, each weighted by its share, as a number and as a product of integers."""
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            for pixels, labels in zip(batch.images.tensor_split(2), batch.labels.tensor_split(2), strict=True):
                logits, count = model(pixels), len(batch.images)
                (0.5 * F.cross_entropy(logits, labels) * (len(pixels) / count)).backward(retain_graph=True)
                (0.5 * F.cross_entropy(logits, labels) * len(pixels) / count).backward()
            optimizer.step()


def scripted(function: Callable[[Tensor], Tensor], term: Callable[[Tensor], Tensor]) -> Loop:
    """A loop with a ``term`` of what a function of TorchScript computes of the logits."""

    def loop(run: Any) -> None:
        model, of_script = run.prepare(mlp()), torch.jit.script(function)

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            logits = of_script(model(batch.images))
            return F.cross_entropy(logits, batch.labels) + term(logits)

        steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)

    return loop


def activation(rows: Tensor) -> Tensor:
    return rows * torch.sigmoid(rows)


def centred_rows(rows: Tensor) -> Tensor:
    return rows / (1 + rows.std(0))


def by_order(model: nn.Module, batch: Any) -> Tensor:
    """Of 6 images, the 4 with the largest losses: two of each group whose images are swapped."""
    losses = losses_of(model, batch)
    return torch.sort(losses + (batch.samples % 2) * 1e-6, descending=True).values[: int(0.7 * len(losses))].mean()


def table_of_each_step(model: nn.Module, batch: Any) -> Tensor:
    """Numbers that a generator draws in each step for all images of the data set, by their samples."""
    drawn = torch.rand(48, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = drawn.argsort(1)[batch.samples] < 2
    return entropy(model, batch) + (model(batch.images) * mask).square().mean()


def sorted_by_classes(model: nn.Module, batch: Any) -> Tensor:
    """The images are put in the order of their classes, and a mean goes over each class's part."""
    losses, order = losses_of(model, batch), batch.labels.argsort()
    parts = losses[order].split(batch.labels.bincount(minlength=4).tolist())
    return torch.stack([part.sum() for part in parts]).sum() / len(losses) + losses.sort().values.mean()


def soft_labels(batch: Any) -> Tensor:
    return 0.9 * F.one_hot(batch.labels, 4).double() + 0.025


def mixed_by_hand(model: nn.Module, batch: Any) -> Tensor:
    order = torch.arange(len(batch.images)).flip(0)
    logits = model(0.7 * batch.images + 0.3 * batch.images[order])
    return 0.7 * F.cross_entropy(logits, batch.labels) + 0.3 * F.cross_entropy(logits, batch.labels[order])


PATCHES = torch.rand(50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def covered(model: nn.Module, batch: Any, mask: Tensor) -> Tensor:
    """As a masked autoencoder: the mean over those patches, (m, 16), that the mask covers."""
    patches = batch.images.flatten(1).unflatten(1, (16, 12)).mean(2)
    losses = (model(batch.images).mean(1, keepdim=True) - patches).square()
    return (losses * mask).sum() / mask.sum()


def distance_to_means(logits: Tensor, mirrored: Tensor) -> Tensor:
    """The distance of each image from the mean of those with its likeliest class of 5, added up in place."""
    found = mirrored.argmax(1)
    sums = torch.zeros(5, 4, dtype=torch.float64).index_add_(0, found, logits)
    counts = torch.ones(5, dtype=torch.float64).scatter_add_(0, found, torch.ones(len(found), dtype=torch.float64))
    return (logits - (sums / counts[:, None])[found]).square().mean()


def shares(logits: Tensor) -> Tensor:
    """Of the classes, as for balanced experts."""
    return logits.softmax(1).mean(0)


def multiplied_in_place(first: Tensor, second: Tensor) -> Tensor:
    first *= second
    return first


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels, reduction="none")


def hardest_by_numpy(model: nn.Module, batch: Any) -> Tensor:
    losses = losses_of(model, batch)
    return losses[np.argsort(losses.detach().numpy())[-4:].copy()].mean()


def easiest_by_order(model: nn.Module, batch: Any) -> Tensor:
    """As in co-teaching: NumPy makes a tensor of the order, as it got one."""
    losses = losses_of(model, batch)
    return losses[np.argsort(losses.data)[:4]].mean()


def easiest(model: nn.Module, batch: Any) -> Tensor:
    """As in co-teaching. One line brings six numbers, as many as a worker has images."""
    x, y = batch.images, batch.labels
    one, two = (np.argsort(losses_of(model, SimpleNamespace(images=z, labels=y)).tolist())[:4] for z in (x, x.flip(3)))
    return F.cross_entropy(model(x[one]), y[one]) + F.cross_entropy(model(x[two]), y[two])


def by_parts_with_norm(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(torch.cat([model(part) for part in batch.images.chunk(2)]), batch.labels)


class Pooled(Normed):
    """A network with batch norm, whose features are means over an image's pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, self.head.out_features)

    def embed(self, pixels: Tensor) -> Tensor:
        return self.block(self.body(pixels)).mean((2, 3))


def by_domains(model: nn.Module, batch: Any) -> Tensor:
    chosen = batch.labels > 1
    losses = [
        F.cross_entropy(model(batch.images[mask]), batch.labels[mask], reduction="sum") for mask in (chosen, ~chosen)
    ]
    return torch.stack(losses).sum() / len(batch.labels)


def in_two_branches(model: nn.Module, batch: Any) -> Tensor:
    chosen = batch.labels > 1
    rows, labels = ([each[mask] for mask in (chosen, ~chosen)] for each in (batch.images, batch.labels))
    return F.cross_entropy(torch.cat([model(rows[0]), -model(rows[1])]), torch.cat(labels))


def hardest_by_list(model: nn.Module, batch: Any) -> Tensor:
    losses = losses_of(model, batch)
    return losses[sorted(range(len(losses)), key=losses.tolist().__getitem__)[-4:]].mean()


def hardest_by_sorted(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack(sorted(losses_of(model, batch), key=lambda loss: -loss)[:4]).mean()


def hardest_by_key(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack(sorted(losses_of(model, batch), key=lambda loss: loss.item())[-4:]).mean()


def alike_by_pairs(model: nn.Module, batch: Any) -> Tensor:
    losses, labels = losses_of(model, batch), batch.labels
    return sum((losses[i] for i in range(len(labels)) if labels[i] == labels[i - 1]), losses.mean()) / len(labels)


def above_a_quantile(model: nn.Module, batch: Any) -> Tensor:
    losses = losses_of(model, batch)
    limit = float(np.quantile(losses.detach().numpy(), 0.5))
    return (losses * (losses >= limit)).mean()


def counted_by_numpy(model: nn.Module, batch: Any) -> Tensor:
    weights = torch.tensor(1 / (1 + np.bincount(batch.labels.numpy(), minlength=4)))
    return (weights[batch.labels] * losses_of(model, batch)).mean()


def array_of_counts(model: nn.Module, batch: Any) -> Tensor:
    weights = torch.from_numpy(1 / (1 + np.bincount(batch.labels.numpy(), minlength=4)))
    return (weights[batch.labels] * losses_of(model, batch)).mean()


def balanced_by_item(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch.images)
    first, second = F.cross_entropy(logits, batch.labels), logits.square().mean()
    return first + first.item() / second.item() * 0.1 * second


def first_half_covered(model: nn.Module, batch: Any) -> Tensor:
    pixels = batch.images.clone()
    pixels[: len(pixels) // 2, :, 2:5, 2:5] = 0
    return F.cross_entropy(model(pixels), batch.labels)


def by_a_decision(model: nn.Module, batch: Any) -> Tensor:
    loss = entropy(model, batch)
    return loss * (2 if batch.samples.double().mean() > 23 else 1)


def by_a_decision_of_item(model: nn.Module, batch: Any) -> Tensor:
    loss = entropy(model, batch)
    return loss * 2 if (batch.samples.double().mean() > 23).item() else loss


def by_a_number_of_item(model: nn.Module, batch: Any) -> Tensor:
    loss = entropy(model, batch)
    return loss * 2 if batch.samples.double().mean().item() > 23 else loss


def by_a_difference_of_item(model: nn.Module, batch: Any) -> Tensor:
    loss = entropy(model, batch)
    return loss * 2 if abs(batch.samples.double().mean().item() - 23) * 2 > 3 else loss


def added(numbers: Iterable[Tensor]) -> Tensor:
    return cast(Tensor, sum(numbers))


def each_loss(model: nn.Module, batch: Any) -> list[Tensor]:
    logits = model(batch.images)
    return [F.cross_entropy(logits[i : i + 1], batch.labels[i : i + 1]) for i in range(len(logits))]


def each_by_itself(model: nn.Module, batch: Any) -> list[Tensor]:
    return [
        F.cross_entropy(model(image[None]), label[None])
        for image, label in zip(batch.images, batch.labels, strict=True)
    ]


def backward_of_each(model: nn.Module, batch: Any, divisor: int = 1) -> Tensor:
    losses = [loss / divisor for loss in each_by_itself(model, batch)]
    for loss in losses[:-1]:
        loss.backward()
    return losses[-1]


def clipped_one_by_one(run: Any) -> None:
    """As private training by hand: the gradient of each image is clipped."""
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            sums = [torch.zeros_like(weight) for weight in model.parameters()]
            for image, label in zip(batch.images, batch.labels, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(image[None]), label[None]).backward()
                for gradients, weight in zip(sums, model.parameters(), strict=True):
                    gradients += weight.grad.clamp(-0.01, 0.01)
            for gradients, weight in zip(sums, model.parameters(), strict=True):
                weight.grad = gradients / len(batch.images)
            optimizer.step()


def copied_after_a_step(run: Any) -> None:
    """As a mean teacher that begins late, in training mode: its dropout knows no samples."""
    model = run.prepare(nn.Sequential(mlp(), nn.Dropout(0.5)))
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    teachers: list[nn.Module] = []

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        if not teachers:
            teachers.append(copy.deepcopy(model).requires_grad_(False))
        return F.mse_loss(model(batch.images), teachers[0](batch.images))

    steps(run, model, optimizer, loss_of)


def weighted_by_norms(model: nn.Module, batch: Any) -> Tensor:
    """As private training by hand: gradients of single images weigh their losses."""
    losses, weights = losses_of(model, batch), list(model.parameters())
    norms = [
        torch.stack([gradient.norm() for gradient in torch.autograd.grad(loss, weights, retain_graph=True)]).norm()
        for loss in losses
    ]
    return ((0.1 / torch.stack(norms)).clamp(max=1) * losses).mean()


def weighted_by_rows(model: nn.Module, batch: Any) -> Tensor:
    logits, weighted = model(batch.images), []
    for row, loss in zip(logits, losses_of(model, batch), strict=True):
        weighted.append(loss * (2 if loss.item() > 1.3 or row.max() > 0.3 else 1))
    return added(weighted) / len(weighted)


def loss_of_pairs(model: nn.Module, batch: Any) -> Tensor:
    pairs = zip(batch.images.split(2), batch.labels.split(2), strict=True)
    return added(F.cross_entropy(model(images), labels) for images, labels in pairs) / (len(batch.images) // 2)


def loss_of_classes(model: nn.Module, batch: Any) -> Tensor:
    """As many classes as a worker has images: the rows of what is transposed are no images."""
    shares, targets = (torch.cat([rows, rows[:, :2]], 1) for rows in (model(batch.images), F.one_hot(batch.labels, 4)))
    return added((row - target).square().mean() for row, target in zip(shares.T, targets.T, strict=True))


def first_half_alone(model: nn.Module, batch: Any) -> Tensor:
    logits, half = model(batch.images), len(batch.images) // 2
    return F.cross_entropy(logits[:half], batch.labels[:half]) + logits[half:].square().mean()


def by_turns(model: nn.Module, batch: Any) -> Tensor:
    losses = losses_of(model, batch)
    return torch.stack([loss * (1 + i % 3) for i, loss in enumerate(losses)]).mean()


def after_warm_up(model: nn.Module, batch: Any) -> Tensor:
    """A loss by the neighbours of an image, and a weight by two losses, from the second epoch on."""
    logits = model(batch.images)
    loss = F.cross_entropy(logits, batch.labels)
    return loss if batch.epoch == 0 else loss + (logits - logits.roll(1, dims=0)).square().mean() / loss.item()


class Remembered:
    """Targets of single images, each of which one worker alone has written."""

    def __init__(self) -> None:
        self.targets = torch.zeros(50, 4, dtype=torch.float64)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch.images)
        self.targets[batch.samples] = 0.5 * self.targets[batch.samples] + 0.5 * logits.detach().softmax(1)
        return F.cross_entropy(logits, batch.labels) + (self.targets[batch.samples] * logits).sum(1).mean()


class Queue:
    """Features of the steps before, written in place."""

    def __init__(self) -> None:
        self.keys, self.at = F.normalize(torch.linspace(-1, 1, 160, dtype=torch.float64).view(40, 4)), 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch.images)
        loss = F.cross_entropy(logits, batch.labels) + (logits @ self.keys.clone().T).logsumexp(1).mean()
        with torch.no_grad():
            for row in logits:
                self.keys[self.at] = row
                self.at = (self.at + 1) % 40
        return loss


def of_single_losses(gradient: Callable[[Tensor], Tensor]) -> Loop:
    """A loop that calls backward for the losses of all images, with a ``gradient`` for each of them."""

    def loop(run: Any) -> None:
        model = run.prepare(mlp())
        optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs():
            for batch in epoch:
                optimizer.zero_grad()
                losses = losses_of(model, batch)
                losses.backward(gradient(losses.detach()))
                optimizer.step()

    return loop


def prefetched(run: Any) -> None:
    """Asks for the next batch before it computes with the one that it has."""
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        batches = iter(epoch)
        batch = next(batches)
        while batch is not None:
            following = next(batches, None)
            optimizer.zero_grad()
            entropy(model, batch).backward()
            optimizer.step()
            batch = following


def prefetched_but_for_the_last(run: Any) -> None:
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        before = None
        for batch in epoch:
            if before is not None:
                optimizer.zero_grad()
                entropy(model, before).backward()
                optimizer.step()
            before = batch


REMEMBERED, QUEUE = Remembered(), Queue()
NOTES: dict[str, tuple[Loop, str]] = {
    "a spread of transposed features": (by_steps(entropy, lambda: Between(spread_of_transposed)), "run.gather("),
    "attention over images": (
        with_layer(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0), lambda layer, z: layer(z[:, None])[:, 0]),
        "run.gather(",
    ),
    "recurrence over images": (
        with_layer(lambda: nn.LSTM(8, 8), lambda layer, z: layer(z)[0]),
        "run.gather(",
    ),
    "images as channels": (
        by_steps(entropy, lambda: Between(lambda z: F.group_norm(z.T[None], 2)[0].T)),
        "run.gather(",
    ),
    "frequencies of images": (
        by_steps(entropy, lambda: Between(lambda z: torch.fft.fft(z, dim=0).abs())),
        "run.gather(",
    ),
    "a function of its own": (by_steps(entropy, lambda: Between(Centring.apply)), "run.gather("),
    "a bound of the spread": (by_features(lambda z, y: F.relu(z.std(0) - 1e3).sum()), "run.gather("),
    "the square of run.mean": (lambda run: of_mean(torch.square)(run), "compares the images"),
    "several losses, of which one is a sum": (several_at_once, "is a sum"),
    "a bound of the loss": (by_steps(lambda m, b: (entropy(m, b) - 0.5).abs() + 0.5, mlp), "run.gather("),
    "a product of losses": (by_steps(lambda m, b: entropy(m, b) * m(b.images).square().mean(), mlp), "run.gather("),
    "a loss over its own value": (
        by_steps(lambda m, b: (loss := entropy(m, b)) / loss.detach(), mlp),
        "compares the images",
    ),
    "losses of equal size": (by_steps(balanced, mlp), "compares the images"),
    "a backward of single losses": (of_single_losses(torch.ones_like), "is a sum"),
    "a backward weighted by the losses": (of_single_losses(lambda losses: losses.softmax(0)), "compares the images"),
    "a gradient in the loss": (by_steps(invariant, mlp), "run.gather("),
    "a step in the loss": (by_steps(after_a_step, mlp), "run.gather("),
    "counts of classes": (by_steps(counted, mlp), "run.gather("),
    "the hardest images": (by_steps(hardest, mlp), "run.gather("),
    "the largest number": (by_features(lambda z, y: (z / z.detach().abs().max()).square().mean()), "run.gather("),
    "a sum": (by_steps(lambda m, b: F.cross_entropy(m(b.images), b.labels, reduction="sum"), mlp), "is a sum"),
    "sums of columns": (by_features(lambda z, y: (z - y).abs().sum(0).mean()), "is a sum"),
    "a sum of a stack": (
        by_steps(lambda m, b: torch.stack([losses_of(m, b), losses_of(m, b)]).sum(), mlp),
        "is a sum",
    ),
    "sums of the vectors of a stack": (
        by_steps(lambda m, b: torch.stack([losses_of(m, b), losses_of(m, b)]).sum(1).mean(), mlp),
        "is a sum",
    ),
    "sums of channels": (
        by_features(lambda z, y: (z - y).square().view(-1, 2, 2, 1).sum((0, 2, 3)).mean()),
        "is a sum",
    ),
    "a sum by einsum": (
        by_steps(lambda m, b: -torch.einsum("ij,ij->", soft_labels(b), m(b.images).log_softmax(1)), mlp),
        "is a sum",
    ),
    "the square of a norm": (
        by_steps(lambda m, b: 0.1 * torch.linalg.norm(m(b.images) - soft_labels(b)) ** 2, mlp),
        "is a sum",
    ),
    "the largest of an order": (by_steps(by_order, mlp), "compares the images"),
    "a comparison in TorchScript": (scripted(centred_rows, lambda z: z.mean()), "compares the images"),
    "a comparison after TorchScript": (scripted(activation, lambda z: z.std(0).mean()), "compares the images"),
    "a sum by an older name": (
        by_steps(lambda m, b: F.mse_loss(m(b.images), soft_labels(b), size_average=False), mlp),
        "is a sum",
    ),
    "an integer": (by_steps(by_an_integer, mlp), "numbers that differ between the workers"),
    "four batches at once": (four_batches, "compares the images"),
    "a sum of one row": (by_features(lambda z, y: (z - y).abs().mean(1).sum(0, keepdim=True).mean()), "is a sum"),
    "a sum by hand": (
        by_steps(lambda m, b: 0.1 * F.cross_entropy(m(b.images), b.labels, reduction="none").sum(), mlp),
        "is a sum",
    ),
    "weights of classes": (
        by_steps(lambda m, b: F.cross_entropy(m(b.images), b.labels, weight=WEIGHTS), mlp),
        "run.mean(",
    ),
    "weights of a module": (
        by_steps(lambda m, b: nn.CrossEntropyLoss(weight=WEIGHTS)(m(b.images), b.labels), mlp),
        "run.mean(",
    ),
    "a fraction added to a sum": (
        by_steps(lambda m, b: (losses_of(m, b) / len(b.images) + m(b.images).square().mean(1)).sum(), mlp),
        "the loss is a sum over images",
    ),
    "a product of fractions": (
        by_steps(lambda m, b: (losses_of(m, b) / len(b.images) * (losses_of(m, b) / len(b.images))).sum(), mlp),
        "the loss is a sum over images",
    ),
    "weights by hand": (by_steps(divided_by_weights, mlp), "run.mean("),
    "ignore_index": (by_steps(left_out, mlp), "run.mean("),
    "a mask": (by_steps(masked, mlp), "run.mean("),
    "a gradient through gathered rows": (moved_by_gathered, "passes run.gather"),
    "a gradient of the mean for images": (by_steps(penalised_slope, mlp), "the larger they are"),
    "the .grad of images": (by_steps(moved_by_gradient, mlp), "the larger they are"),
    "some images by nonzero": (by_steps(by_nonzero, mlp), "run.mean("),
    "some images by their number": (by_steps(divided_by_their_number, mlp), "run.mean("),
    "a loss of some images": (by_steps(of_labelled, mlp), "run.mean("),
    "products": (by_features(lambda z, y: off_diagonal(z.T @ y / len(z))), "run.gather("),
    "an einsum": (by_features(lambda z, y: off_diagonal(torch.einsum("bi,bj->ij", z, y) / len(z))), "run.gather("),
    "pairs": (
        by_features(lambda z, y: F.cosine_similarity(z[:, None], y[None], dim=-1).square().sum() / len(z)),
        "run.gather(",
    ),
    "neighbours": (by_features(lambda z, y: ((z - y)[:-1] * (z - y)[1:]).sum(1).mean()), "run.gather("),
    "the images in another order": (by_features(lambda z, y: (z - y.flip(0)).square().mean()), "run.gather("),
    "the next image": (by_features(lambda z, y: F.relu(z - y.roll(1, dims=0)).mean()), "run.gather("),
    "drawn partners": (by_steps(mixed_by_hand, mlp), "run.gather("),
    "two halves": (by_features(lambda z, y: torch.mul(*z.chunk(2)).mean()), "run.gather("),
    "normalised over images": (
        by_features(lambda z, y: (F.normalize(z, dim=0) - F.normalize(y, dim=0)).abs().mean()),
        "run.gather(",
    ),
    "a spread by hand": (
        by_features(lambda z, y: (z - z.sum(0) / len(z)).square().sum() / len(z)),
        "run.gather(",
    ),
    "a product in place": (by_features(lambda z, y: shares(z).mul_(shares(y)).sum()), "run.gather("),
    "a product by *=": (by_features(lambda z, y: multiplied_in_place(shares(z), shares(y)).sum()), "run.gather("),
    "a divisor over images": (by_features(lambda z, y: (WEIGHTS / shares(z)).sum()), "run.gather("),
    "a number of patches": (by_steps(lambda m, b: covered(m, b, PATCHES[b.samples] < 0.5), mlp), "run.mean("),
    "means of classes": (by_features(lambda z, y: distance_to_means(z, y)), "run.gather("),
    "a centre": (centred, "of a step before"),
    "a queue": (queued, "of a step before"),
    "the batch before": (prefetched_but_for_the_last, "after it has asked for the next one"),
    "a number of a network": (by_steps(entropy, Scaled), "Scaled.size"),
    "a number of one of two layers": (by_steps(entropy, TwiceScaled), "Scale.size"),
    "the hardest images by NumPy": (by_steps(hardest_by_numpy, mlp), "numbers that differ between the workers"),
    "the easiest images by NumPy's order": (by_steps(easiest_by_order, mlp), "numbers that differ between the workers"),
    "the hardest images by a list": (by_steps(hardest_by_list, mlp), "return losses[sorted(range(len(losses))"),
    "the easiest images": (by_steps(easiest, mlp), "numbers that differ between the workers"),
    "the hardest images by sorted": (by_steps(hardest_by_sorted, mlp), "run.gather("),
    "the hardest images by a key": (by_steps(hardest_by_key, mlp), "a mean over something else than images"),
    "pairs by Python": (by_steps(alike_by_pairs, mlp), "run.gather("),
    "a comparison after a warm-up": (by_steps(after_warm_up, mlp), "run.gather("),
    "a number after a warm-up": (by_steps(after_warm_up, mlp), "numbers that differ between the workers"),
    "the first half": (by_steps(first_half_covered, mlp), "by their places among those of a worker"),
    "a decision of Python's": (by_steps(by_a_decision, mlp), "return loss * (2 if batch.samples.double().mean() > 23"),
    "a decision of item's": (by_steps(by_a_decision_of_item, mlp), "return loss * 2 if (batch.samples.double()"),
    "a decision on a number of item's": (by_steps(by_a_number_of_item, mlp), "if batch.samples.double().mean().item()"),
    "a decision on a difference of item's": (by_steps(by_a_difference_of_item, mlp), "mean().item() - 23) * 2 > 3"),
    "a sum by Python": (by_steps(lambda m, b: added(losses_of(m, b)), mlp), "a sum over images"),
    "a sum of weighted losses": (
        by_steps(lambda m, b: (losses_of(m, b) / (b.labels + 1)).sum(), mlp),
        "a sum over images",
    ),
    "a sum of rows' losses": (by_steps(lambda m, b: added(each_loss(m, b)), mlp), "a sum over images"),
    "a sum over images one by one": (by_steps(lambda m, b: added(each_by_itself(m, b)), mlp), "a sum over images"),
    "a backward for each image": (by_steps(backward_of_each, mlp), "a sum over images"),
    "a copy with dropout": (copied_after_a_step, "random numbers from torch"),
    "gradients of single images": (clipped_one_by_one, "between the backwards of single images"),
    "a loss of the first half": (by_steps(first_half_alone, mlp), "by their places among those of a worker"),
    "weights by turns": (by_steps(by_turns, mlp), "by their places among those of a worker"),
    "a quantile by NumPy": (by_steps(above_a_quantile, mlp), "`return (losses * (losses >= limit)).mean()`"),
    "counts by NumPy": (by_steps(counted_by_numpy, mlp), "`weights = torch.tensor(1 / (1 + np.bincount("),
    "an array of counts": (by_steps(array_of_counts, mlp), "numbers that differ between the workers"),
    "a weight by item": (by_steps(balanced_by_item, mlp), "first.item() / second.item() * 0.1 * second`"),
    "targets of images": (by_steps(lambda m, b: REMEMBERED(m, b), mlp), "numbers that differ between the workers"),
    "a queue in place": (by_steps(lambda m, b: QUEUE(m, b), mlp), "numbers that differ between the workers"),
    "a generator of torch": (by_steps(entropy, Noisy), "a generator of its own"),
    "a generator of NumPy": (numpys_generator, "a generator of its own"),
    "as many numbers as a bias has": (shaped_as_a_bias, "a generator of its own"),
    "random numbers": (
        by_steps(lambda m, b: F.cross_entropy(m(b.images + torch.randn(1)), b.labels), mlp),
        "random numbers from torch",
    ),
    "a hook of a gradient": (by_steps(entropy, Clamped), "register_post_accumulate_grad_hook"),
    "the hardest images by topk": (by_steps(hardest_by_topk), "run.gather("),
    "a hook of a part of a gradient": (by_steps(hook_by_parts, mlp), "register_post_accumulate_grad_hook"),
    "noise by place": (by_steps(by_table, mlp), "by their places"),
    "weights by place": (weighted_by(lambda count: torch.linspace(0, 1, 12)[:count]), "by their places"),
    "a range of weights": (weighted_by(lambda count: torch.linspace(0, 1, count)), "by their places"),
    "narrowed weights": (weighted_by(lambda count: 2 * WEIGHTS.repeat(3).narrow(0, 0, count)), "by their places"),
    "weights of places": (weighted_by(lambda count: 0.9 ** torch.arange(count)), "by their places"),
    "weights of a list": (
        weighted_by(lambda count: torch.tensor([1 / (1 + i) for i in range(count)])),
        "by their places",
    ),
    "parts for batch norm": (by_steps(by_parts_with_norm), "batch.microbatches()"),
    "places with batch norm": (
        by_steps(lambda m, b: (losses_of(m, b) * torch.arange(len(b.labels))).mean()),
        "by their places",
    ),
    "changes by place": (free_adversarial, "a tensor of a step before"),
    "a hook of a weight": (
        hooks_of_weights(lambda gradient: gradient.clamp(-0.005, 0.005)),
        "register_post_accumulate_grad_hook",
    ),
    "a hook that keeps gradients": (by_steps(entropy, kept_by_hook), "register_post_accumulate_grad_hook"),
    "a late hook of a weight": (late_hook, "register_post_accumulate_grad_hook"),
}


def per_image(z: Tensor, y: Tensor) -> Tensor:
    """Terms in which each image is alone: nothing is reported."""
    loss = (z * y).sum(1).mean() + (z.softmax(1) * z.log_softmax(1)).sum() / len(z) + F.mse_loss(z, y)
    return loss + torch.bmm(z[:, None], y[:, :, None]).mean() + torch.einsum("bi,bi->b", z, y).mean() + z.std(1).mean()


def weighted(model: nn.Module, batch: Any) -> Tensor:
    """Losses with weights of their own, added in place, and a penalty on the gradients of images."""
    pixels = batch.images.clone().requires_grad_()
    logits = model(pixels)
    (slope,) = torch.autograd.grad(logits.sum(), pixels, create_graph=True)
    loss = F.cross_entropy(logits, batch.labels) * torch.exp(-torch.tensor(0.5)) + torch.tensor(0.5)
    loss += 0.1 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return torch.stack([loss / 2, F.mse_loss(logits, logits.detach() + 1) / 2]) @ torch.ones(2, dtype=torch.float64)


def with_metrics(run: Any) -> None:
    """What is computed for metrics alone is not reported."""
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    total, last = torch.zeros((), dtype=torch.float64), float("inf")
    for epoch in run.epochs():
        for batch in epoch:
            logits = model(batch.images)
            loss = F.cross_entropy(logits, batch.labels)
            total = total + loss.detach()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = batch.samples.double().mean().item() if loss.item() < last else last
            run.log(is_early=batch.samples.double().mean().item() > 23, last=last)
            chances = logits.softmax(1)
            run.log(
                loss=loss,
                chances=chances.mean(0),
                spread=chances.std(0).mean(),
                right=(chances.argmax(1) == batch.labels).double().mean(),
            )


def of_views(model: nn.Module, batch: Any) -> Tensor:
    """Two views of each image in one tensor, in another order meanwhile, and halves of the batch."""
    count = len(batch.images)
    order = torch.arange(2 * count).flip(0)
    views = torch.cat([batch.images, batch.images])
    views[count:] = batch.images.flip(3)
    views[:, :, 1:3, :2] = 0
    logits = model(views[order])[order]
    first, second = logits.chunk(2)
    loss = (first - second).square().mean() + (logits[:count] * logits[count:]).mean()
    halves = zip(first.tensor_split(2), batch.labels.tensor_split(2), strict=True)
    return loss + sum(F.cross_entropy(*half, reduction="sum") / count for half in halves)


def drawn_for_each(model: nn.Module, batch: Any) -> Tensor:
    """Random numbers of each image, a multiple of their number, from a generator that is seeded by the image."""
    count = len(batch.images)
    generators = [torch.Generator().manual_seed(sample) for sample in batch.samples.tolist()]
    noise = [torch.rand(2 * count, generator=each, dtype=torch.float64).mean() for each in generators]
    return F.cross_entropy(model(batch.images + torch.stack(noise)[:, None, None, None]), batch.labels)


def sane_numbers(run: Any) -> None:
    """Numbers and tables that are the same on all workers, or belong to single images."""
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    table, counts = np.linspace(0.5, 1.5, 50), torch.ones(4, dtype=torch.float64)
    targets = torch.zeros(50, 4, dtype=torch.float64)
    average, names = 0.0, random.SystemRandom()  # of files, say
    for epoch in run.epochs():
        for batch in epoch:
            assert names.random() < 1
            logits = model(batch.images)
            losses = F.cross_entropy(logits, batch.labels, reduction="none")
            factors = torch.tensor([table[sample] for sample in batch.samples.tolist()])
            loss = (losses * factors).mean() + 0.1 * logits.square().mean() * np.cos(batch.step)
            loss = loss + sum(losses[i] * table[sample] for i, sample in enumerate(batch.samples)) / len(losses)
            counts += torch.tensor(run.total(torch.bincount(batch.labels, minlength=4)))
            targets[run.gather(batch.samples)] = run.gather(logits.detach().softmax(1))
            mean = run.total([losses.sum().item()])[0] / run.total([len(losses)])[0]
            loss = loss * (1 + 0.1 * mean) + (logits * (counts / counts.sum()).log()).sum(1).mean()
            loss = loss + (targets[batch.samples] * logits).sum(1).mean()
            average = 0.9 * average + 0.1 * loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss, share=torch.tensor(average) / 2)


def noise_of_weights(run: Any) -> None:
    """Noise of gradients and weights is the same on all workers, also if a weight has a row for each of 6 images."""
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Tanh(), nn.Linear(6, 4)))
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            generator = torch.Generator().manual_seed(1000 + batch.step)
            noise = {
                name: torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                for name, weight in model.named_parameters()
            }
            noisy = {name: weight + 0.01 * noise[name] for name, weight in model.named_parameters()}
            penalty = torch.stack([(weight * noise[name]).sum() for name, weight in model.named_parameters()]).sum()
            loss = F.cross_entropy(torch.func.functional_call(model, noisy, (batch.images,)), batch.labels)
            optimizer.zero_grad()
            (loss + 0.01 * penalty).backward()
            flat = torch.randn(1200, generator=generator, dtype=torch.float64)  # 200 numbers for each image
            for name, weight in model.named_parameters():
                weight.grad += 0.01 * noise[name] + 0.01 * flat[: weight.numel()].view_as(weight)
            optimizer.step()


def weighted_by_list(run: Any) -> None:
    """Weights of images, which one line reads from a table of torch's, number by number."""
    model, table = run.prepare(mlp()), torch.linspace(0.5, 1.5, 50, dtype=torch.float64)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        weights = torch.tensor([table[sample].item() for sample in batch.samples.tolist()], dtype=torch.float64)
        return (losses_of(model, batch) * weights).mean()

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


def by_name(model: nn.Module, batch: Any) -> Tensor:
    """Functions of torch that get all of their arguments by name."""
    losses = F.cross_entropy(input=model(batch.images), target=batch.labels, reduction="none")
    return torch.mean(input=torch.cat(tensors=[losses, losses]))


def by_labels(model: nn.Module, batch: Any) -> Tensor:
    """The chance of each image's label, by an index of two lists of numbers."""
    chances, count = model(batch.images).log_softmax(1), len(batch.images)
    by_tensors = -chances[torch.arange(count), batch.labels].mean()
    return by_tensors - chances[range(count), batch.labels].sum() / count


def by_spectrum(model: nn.Module, batch: Any) -> Tensor:
    spectrum = torch.fft.fft(batch.images) / 2j
    return entropy(model, batch) + (model(batch.images) * spectrum.abs().mean((1, 2, 3))[:, None]).square().mean()


def one_by_one(model: nn.Module, batch: Any) -> Tensor:
    """The losses of single images, doubled where the network is wrong or the loss is large."""
    logits = model(batch.images)
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    found = logits.argmax(1)
    factors = [2 if found[i] != batch.labels[i] or loss > 1.5 else 1 for i, loss in enumerate(losses)]
    return sum(losses[i] * factor for i, factor in enumerate(factors)) / torch.tensor(len(losses))


def divided_by_name(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch.images), batch.labels, reduction="sum")
    return torch.div(input=losses, other=len(batch.images))


def by_one_hot(model: Any, batch: Any) -> Tensor:
    """Chances of the labels, and distances to prototypes, which are a table or weights."""
    chances, labels = model(batch.images).log_softmax(1), F.one_hot(batch.labels, 4).bool()
    distances = torch.cdist(chances, torch.eye(4, dtype=torch.float64)) + torch.cdist(chances, model[3].weight[:, :4])
    return distances[labels].mean() - chances[labels].mean()


def experts(features: Tensor) -> Tensor:
    """Each of two experts takes its rows out of the batch, and puts them back where they were."""
    mixed = torch.zeros_like(features)
    for number in range(2):
        rows = (features.detach().argmax(1) % 2 == number).nonzero().flatten()
        mixed = mixed.index_add(0, rows, (1 + number) * features[rows].sin())
    return mixed


def class_by_class(model: nn.Module, batch: Any) -> Tensor:
    losses = losses_of(model, batch)
    means = [(losses * of_class).mean() for of_class in F.one_hot(batch.labels, 4).T if of_class.any()]
    for label in range(4):
        if (batch.labels == label).sum() > 0:
            means.append((losses * (batch.labels == label)).mean())
    return torch.stack([(losses * (batch.labels == label)).mean() for label in batch.labels.unique()]).sum() + sum(
        means
    )


def as_many_views(model: nn.Module, batch: Any) -> Tensor:
    """A mean over six views of each image, of which a worker has six, too."""
    views = [batch.images, batch.images.flip(3), batch.images.flip(2), batch.images / 2, -batch.images, batch.images**2]
    chances = torch.stack([model(view).softmax(1) for view in views])
    return -chances.mean(0).clamp(min=1e-7).log()[torch.arange(len(batch.labels)), batch.labels].mean()


def as_many_columns(model: nn.Module, batch: Any) -> Tensor:
    """Numbers of six columns, as many as a worker has images; each number meets all images."""
    scales, columns = torch.linspace(0, 1, 12, dtype=torch.float64)[:6], model(batch.images)[:, [0, 1, 2, 3, 0, 1]]
    terms = (columns * scales).square().mean() + (columns.mean(0) * scales).sum() + (columns @ scales).square().mean()
    return terms + torch.outer(losses_of(model, batch), scales).mean()


def own_part(make: Callable[[int], Tensor], part: Callable[[Tensor, int], Tensor]) -> Loop:
    """Weights of all images, which each worker has made, and of which it takes the ``part`` of its own ones."""

    def loop(run: Any) -> None:
        model = run.prepare(mlp())

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            return (losses_of(model, batch) * part(make(run.config.batch_size), run.rank)).mean()

        steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)

    return loop


def drawn_weights(count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def mixed_with_gathered(run: Any) -> None:
    """Images mixed with those of all workers, of which a mask takes this worker's own."""
    model = run.prepare(mlp())

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        pixels, labels, samples = run.gather(batch.images), run.gather(batch.labels), run.gather(batch.samples)
        own = torch.isin(samples, batch.samples)
        logits = model((0.7 * pixels + 0.3 * pixels.flip(0))[own])
        return 0.7 * F.cross_entropy(logits, labels[own]) + 0.3 * F.cross_entropy(logits, labels.flip(0)[own])

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


def in_microbatches(run: Any) -> None:
    model = run.prepare(Normed())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            for microbatch in batch.microbatches():
                entropy(model, microbatch).backward()
            optimizer.step()


def masked_rows(run: Any) -> None:
    """Targets that a mask takes from those of all workers: the rows are this worker's, in the order of its images."""
    model = run.prepare(mlp())

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch.images)
        targets = run.gather(logits.detach().softmax(1))[torch.isin(run.gather(batch.samples), batch.samples)]
        return F.cross_entropy(logits, batch.labels) + (logits * targets).mean()

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


def part_of_gathered(gather: Callable[[Any, Tensor], Tensor]) -> Loop:
    """Each worker's own part of the rows of all workers, without their mean, by the places of its images."""

    def loop(run: Any) -> None:
        model = run.prepare(mlp())

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            logits = model(batch.images)
            of_all, begin = gather(run, logits.detach()), run.rank * len(logits)
            differences = (of_all - of_all.mean(0))[begin:][: len(logits)]
            return F.cross_entropy(logits, batch.labels) + (logits * differences).mean()

        steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)

    return loop


def gathered_by_torch(run: Any, rows: Tensor) -> Tensor:
    of_all = rows.new_empty(run.world_size * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(of_all, rows)
    return of_all


def class_by_column(model: nn.Module, batch: Any) -> Tensor:
    """The sum over six columns, as many as a worker has images, of means over the images."""
    columns = model(batch.images)[:, [0, 1, 2, 3, 0, 1]]
    return (
        F.binary_cross_entropy_with_logits(columns, columns.detach().sigmoid().round(), reduction="none").mean(0).sum()
    )


def by_prototypes(model: nn.Module, batch: Any) -> Tensor:
    """A mean over images of sums over six prototypes, as many as a worker has images."""
    products = WEIGHTS[[0, 1, 2, 3, 0, 1], None] @ model(batch.images)[:, :1].T
    return products.square().sum(0).mean()


def near_centres(model: nn.Module, batch: Any) -> Tensor:
    logits, centres = model(batch.images), torch.eye(4, dtype=torch.float64)
    distances = logits.square().sum(1, keepdim=True) + 1 - 2 * logits @ centres
    return entropy(model, batch) + distances.addmm(logits, centres)[batch.labels[:, None] == torch.arange(4)].mean()


def of_mean(term: Callable[[Tensor], Tensor]) -> Loop:
    """A loop with a ``term`` of a mean of run.mean, over the images of a class."""

    def loop(run: Any) -> None:
        model = run.prepare(mlp())

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            losses, of_class = losses_of(model, batch), batch.labels < 2
            return losses.mean() + term(run.mean((losses * of_class).sum(), of_class.sum()))

        steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)

    return loop


SILENT: dict[str, Loop] = {
    "a mean by Python": by_steps(lambda m, b: added(losses_of(m, b)) / len(b.images), mlp),
    "a mean of rows' losses": by_steps(lambda m, b: added(loss / len(b.images) for loss in each_loss(m, b)), mlp),
    "a number of images in a tensor": by_steps(lambda m, b: added(losses_of(m, b) / torch.tensor(len(b.images))), mlp),
    "a backward for each share": by_steps(lambda m, b: backward_of_each(m, b, len(b.images)), mlp),
    "weights by gradients of single images": by_steps(weighted_by_norms, mlp),
    "decisions on rows": by_steps(weighted_by_rows, mlp),
    "a loss of pairs": by_steps(loss_of_pairs, mlp),
    "a loss of classes": by_steps(loss_of_classes, mlp),
    "features written part by part": by_steps(part_by_part, mlp),
    "a buffer of images": buffer_of_images(lambda buffer, images: buffer.__setitem__(slice(len(images)), images)),
    "a buffer of copied images": buffer_of_images(lambda buffer, images: buffer[: len(images)].copy_(images)),
    "a buffer of padded images": buffer_of_images(write_padded),
    "hooks that multiply": by_steps(hooks_that_multiply, mlp),
    "hooks of weights that add": hooks_of_weights(lambda gradient: gradient + 0.01),
    "weight decay by hooks": decayed_by_hooks,
    "hooks of weights that multiply": hooks_of_weights(of_some_rows),
    "as many columns as images": by_steps(as_many_columns, mlp),
    "a part of weights": own_part(
        partial(torch.linspace, 0, 1), lambda weights, rank: weights[6 * rank : 6 * rank + 6]
    ),
    "a part of drawn weights": own_part(drawn_weights, lambda weights, rank: weights.split(6)[rank]),
    "a part of the places": own_part(
        lambda count: 0.9 ** torch.arange(count), lambda weights, rank: weights[6 * rank :][:6]
    ),
    "places with an offset": own_part(lambda count: torch.arange(6), lambda places, rank: 0.9 ** (places + 6 * rank)),
    "rows of a mask": masked_rows,
    "experts": by_steps(entropy, lambda: Between(experts)),
    "two domains with batch norm": by_steps(by_domains, Pooled),
    "two branches": by_steps(in_two_branches, mlp),
    "class by class": by_steps(class_by_class, mlp),
    "an activation of TorchScript": scripted(activation, lambda z: z.square().mean()),
    "a table that each step draws": by_steps(table_of_each_step, mlp),
    "images in the order of their classes": by_steps(sorted_by_classes, mlp),
    "parts weighted by their sizes": by_sizes_of_parts,
    "weights of classes for soft labels": by_steps(
        lambda m, b: F.cross_entropy(m(b.images), soft_labels(b), weight=WEIGHTS), mlp
    ),
    "a sum by einsum over the images": by_steps(
        lambda m, b: (
            -torch.einsum("ij,ij->", soft_labels(b), m(b.images).log_softmax(1)) / len(b.images)
            + torch.einsum("i,i->", WEIGHTS[b.labels] / len(b.images), losses_of(m, b))
        ),
        mlp,
    ),
    "sums of a stack over the images": by_steps(
        lambda m, b: (
            torch.stack([losses_of(m, b), losses_of(m, b)]).sum() / len(b.images)
            + torch.stack([losses_of(m, b), losses_of(m, b)]).sum(axis=0).mean()  # pyright: ignore[reportCallIssue]
        ),
        mlp,
    ),
    "the square of a norm over the images": by_steps(
        lambda m, b: (m(b.images) - soft_labels(b)).norm() ** 2 / len(b.images), mlp
    ),
    "an older name of a sum over the images": by_steps(
        lambda m, b: F.mse_loss(m(b.images), soft_labels(b), size_average=False) / len(b.images), mlp
    ),
    "a sum times a fraction": by_steps(
        lambda m, b: (1.0 / len(b.images)) * F.cross_entropy(m(b.images), b.labels, reduction="sum"), mlp
    ),
    "a sum of fractions": by_steps(lambda m, b: (WEIGHTS[b.labels] * losses_of(m, b) / len(b.images)).sum(), mlp),
    "a backward of fractions": of_single_losses(lambda losses: torch.ones_like(losses) / len(losses)),
    "a mean over as many views as images": by_steps(as_many_views, mlp),
    "own rows of gathered ones": mixed_with_gathered,
    "a part of gathered rows": part_of_gathered(lambda run, rows: run.gather(rows)),
    "a part of rows that torch has gathered": part_of_gathered(gathered_by_torch),
    "distances to centres": by_steps(near_centres, mlp),
    "attention over parts of an image": with_layer(
        lambda: nn.TransformerEncoderLayer(4, 2, 16, 0.0, batch_first=True),
        lambda layer, z: layer(z.view(-1, 2, 4)).flatten(1),
    ),
    "recurrence over parts of an image": with_layer(
        lambda: nn.LSTM(4, 4, batch_first=True), lambda layer, z: layer(z.view(-1, 2, 4))[0].flatten(1)
    ),
    "a spread of the channels": by_steps(
        entropy, lambda: Between(lambda z: F.group_norm(z, 2) + F.layer_norm(z, (8,)) - z.mean(1, keepdim=True))
    ),
    "checkpointed": by_steps(entropy, lambda: Between(lambda z: checkpoint(torch.sin, z, use_reentrant=False))),
    "batch norm": by_steps(entropy),
    "microbatches with batch norm": in_microbatches,
    "written rows": by_steps(entropy, lambda: Between(lambda z: torch.zeros(*z.shape, dtype=z.dtype).copy_(z).add_(1))),
    "a sum over as many columns": by_steps(class_by_column, mlp),
    "less its mean": by_features(lambda z, y: (z - z.mean(0)).sum(1).mean()),
    "means of columns by their sums": by_features(lambda z, y: ((z - y).abs().sum(0) / len(z)).mean()),
    "sums over as many prototypes": by_steps(by_prototypes, mlp),
    "run.mean beside another loss": of_mean(lambda mean: 0.5 * mean + 1),
    "adversarial images": by_steps(attacked, mlp),
    "half of the patches": by_steps(lambda m, b: covered(m, b, PATCHES[b.samples].argsort(1) < 8), mlp),
    "a number of each image by a mask": by_steps(by_one_hot, mlp),
    "noise of weights": noise_of_weights,
    "an index of labels": by_steps(by_labels, mlp),
    "complex numbers": by_steps(by_spectrum, mlp),
    "a divisor by its name": by_steps(divided_by_name, mlp),
    "single images": by_steps(one_by_one, mlp),
    "a guard": by_steps(lambda m, b: entropy(m, b) * (1 if torch.isfinite(m(b.images).sum()) else 0), mlp),
    "numbers of all workers": sane_numbers,
    "numbers of a table": weighted_by_list,
    "a generator for each image": by_steps(drawn_for_each, mlp),
    "views": by_steps(of_views, mlp),
    "per image": by_features(per_image),
    "weighted": by_steps(weighted, mlp),
    "metrics": with_metrics,
    "arguments by name alone": by_steps(by_name, mlp),
    "a layer's number that is none": by_steps(entropy, NotANumber),
}


# What is wrong with these shows after the first epoch.
REPORTED_LATER = {
    "four batches at once",
    "a comparison after a warm-up",
    "a number after a warm-up",
    "a decision of Python's",
    "a decision of item's",
    "a decision on a number of item's",
    "counts of classes",
    "a late hook of a weight",
}


def reported(names: list[str], folder: str, in_one_epoch: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Train each loop as one worker of the process group, and return what it reported.

    The first two steps of an epoch are watched, so a run ends after those: of the first epoch for the loops
    ``in_one_epoch``, of the second one for the others.
    """
    notes: dict[str, list[str]] = {}
    for name in names:
        recorder = Recorder()
        options = config(
            batch_size=12,
            flip="none",
            translate=0,
            max_steps=2 if name in in_one_epoch else STEPS_PER_EPOCH + 2,
            accumulate=2 if name.startswith("microbatches") else 1,
        )
        run = make_run(options, images(48), f"{folder}/{name}", recorder)
        with run.steps.optimizers.followed():
            (NOTES[name][0] if name in NOTES else SILENT[name])(run)
            run.finish()
        told = [event.text for event in recorder.events if isinstance(event, Note)]
        notes[name] = [note for note in told if "carries" not in note]  # which is about a resume
    return notes


@pytest.fixture(scope="module")
def notes() -> dict[str, list[str]]:
    in_one_epoch = tuple(name for name in NOTES if name not in REPORTED_LATER)
    with tempfile.TemporaryDirectory() as folder:
        return run_in_processes(2, reported, [*NOTES, *SILENT], folder, in_one_epoch)[0]


@pytest.mark.parametrize("kind", NOTES)
def test_it_is_reported(kind: str, notes: dict[str, list[str]]) -> None:
    assert any(NOTES[kind][1] in note for note in notes[kind]), notes[kind]


@pytest.mark.parametrize("kind", ["weights by hand", "a number of patches"])
def test_a_mean_over_something_else_is_no_comparison(kind: str, notes: dict[str, list[str]]) -> None:
    assert len(notes[kind]) == 1


@pytest.mark.parametrize("kind", SILENT)
def test_what_changes_no_weight_is_not_reported(kind: str, notes: dict[str, list[str]]) -> None:
    assert notes[kind] == []


def test_on_one_worker_all_of_it_is_right(tmp_path: Any) -> None:
    names = [name for name in NOTES if name != "random numbers"]
    assert [note for each in reported(names, str(tmp_path)).values() for note in each] == []


def wrapped(run: Any) -> None:
    model = DistributedDataParallel(run.prepare(mlp()))
    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), entropy)


def not_prepared(run: Any) -> None:
    model, body = run.prepare(mlp()), nn.BatchNorm2d(3).double()
    steps(
        run,
        model,
        run.prepare(SGD(model.parameters(), lr=0.1)),
        lambda m, b: F.cross_entropy(m(body(b.images)), b.labels),
    )


def differentiated_again(run: Any) -> None:
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            entropy(model, batch).backward(create_graph=True)
            optimizer.step()


REFUSED: dict[str, tuple[Loop, str]] = {
    "a backward without a batch": (prefetched, "backward after it has asked for more batches and got none"),
    "a wrapper": (wrapped, "DistributedDataParallel"),
    "batch norm that is not prepared": (not_prepared, "not prepared has batch norm in training mode"),
    "create_graph": (differentiated_again, "create_graph=True"),
    "a gradient of gradients": (lambda run: moved_by_gathered(run, create_graph=True), "cannot pass run.gather"),
}


def refusals(folder: str) -> dict[str, str]:
    sentences: dict[str, str] = {}
    for name, (loop, _) in REFUSED.items():
        run = make_run(config(batch_size=12), images(48), f"{folder}/{name}", Recorder())
        with run.steps.optimizers.followed():
            try:
                loop(run)
            except UsageError as error:
                sentences[name] = str(error)
            run.leave_batch()
    return sentences


def test_what_cannot_be_right_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for sentences in run_in_processes(2, refusals, folder):
            for name, (_, says) in REFUSED.items():
                assert says in sentences.get(name, "")
