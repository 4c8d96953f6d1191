"""A step that is computed with swapped images, too, is the same step, and shows a loss that compares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.training.batches.batch import Batch
from raytrain.training.loop_checks.swapped_images import SwappedImages
from raytrain.training.loop_checks.watched_calls import WatchedCalls

NUM = 7


class Remembering(nn.Module):
    """Has random numbers, and buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.last = (
            nn.InstanceNorm1d(3, track_running_stats=True),
            nn.Linear(16, 8),
            nn.Linear(8, 4),
        )
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, pixels: Tensor) -> Tensor:
        features = F.dropout(self.first(self.norm(pixels.flatten(2)).mean(1)), 0.3)
        self.centre.lerp_(features.detach().mean(0).float(), 0.1)
        noise = torch.rand(8, generator=torch.Generator().manual_seed(1))
        return self.last(F.relu(features + noise, inplace=True))


def batch() -> Batch:
    images, labels = torch.randn(NUM, 3, 4, 4), torch.arange(NUM) % 4
    return Batch(images, labels, labels, torch.arange(NUM), 0, 0, NUM, (NUM,))


def step(loss_of: Callable[[nn.Module, Batch], Tensor], *, swaps: bool | None) -> tuple[list[Tensor], list[str]]:
    """Compute a step, and return all numbers that it leaves, and its notes; without a watch if ``swaps`` is None."""
    model, notes = Remembering(), list[str]()
    images = batch()
    torch.manual_seed(3)
    if swaps is None:
        loss_of(model, images).backward()
    else:
        calls = WatchedCalls(notes.append, 2 * NUM, rank=0)
        calls.begin(images, [*model.parameters(), *model.buffers()], swaps=swaps)
        with calls:
            loss_of(model, images).backward()
        calls.end(draws=False)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [*gradients, *model.buffers(), images.images, torch.rand(3)], notes


def entropy(model: nn.Module, images: Any) -> Tensor:
    return F.cross_entropy(model(images.images), images.labels)


def test_nothing_of_the_loop_changes() -> None:
    plain, _ = step(entropy, swaps=None)
    watched, _ = step(entropy, swaps=True)
    assert all(torch.equal(first, second) for first, second in zip(plain, watched, strict=True))


@pytest.mark.parametrize("module", ["torch.distributed.distributed_c10d", "torch._ops._c10d_functional"])
def test_collectives_are_called_once(module: str) -> None:
    """Workers call them together, and some workers may have no variants."""
    calls: list[Tensor] = []

    def all_reduce(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return tensor.clone()

    all_reduce.__module__ = module
    swapped, images = SwappedImages(), batch()
    swapped.begin(images, set())
    swapped.call(all_reduce, "all_reduce", (images.images,), {})
    assert len(calls) == 1


def half(model: nn.Module, images: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(images.images).float(), images.labels)


def spread(model: nn.Module, images: Any) -> Tensor:
    logits = model(images.images).T
    return entropy(model, images) + 0.01 * logits.var(1).sum()


@pytest.mark.parametrize(("loss_of", "compares"), [(entropy, False), (half, False), (spread, True)])
def test_images_that_are_compared_show(loss_of: Callable[[nn.Module, Batch], Tensor], compares: bool) -> None:
    _, notes = step(loss_of, swaps=True)
    assert any("compares the images" in note for note in notes) is compares
    assert step(loss_of, swaps=False)[1] == []
