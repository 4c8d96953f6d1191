"""The reference: a training loop in plain PyTorch, in one process, that imports nothing of raytrain's training code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LocalBatch = tuple[Tensor, Tensor]
"""Images (n, C, H, W) and labels (n,)."""


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Sequence[Sequence[LocalBatch]]],
    rates: Iterable[float],
    label_smoothing: float = 0.0,
) -> list[dict[str, Any]]:
    """Train on global batches, and return the loss, accuracy and number of samples of each step.

    A global batch is a sequence of microbatches, and a microbatch is a sequence of slices, each normalised
    with its own statistics.
    """
    rows = []
    for microbatches, rate in zip(batches, rates, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # An empty batch has gradients of zero.
        count = sum(len(labels) for slices in microbatches for _, labels in slices)
        total = correct = 0.0
        for slices in microbatches:
            for images, labels in slices:
                logits = model(images)
                loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
                (loss / count).backward()
                total, correct = total + loss.item(), correct + (logits.argmax(1) == labels).sum().item()
            for layer in model.modules():
                if isinstance(layer, SliceBatchNorm):
                    layer.join()
        optimizer.step()
        rows.append({"loss": total / max(count, 1), "accuracy": correct / max(count, 1), "count": count})
    return rows


class SliceBatchNorm(nn.BatchNorm2d):
    """Normalises each slice with its own statistics, and combines them as in MATLAB's "Train Network in Parallel with
    Custom Training Loop": mean = Σ m_j·mean_j / M, variance = Σ m_j·[var_j + (mean_j - mean)²] / M.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.noted: list[tuple[int, Tensor, Tensor]] = []

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        values = input.detach().transpose(0, 1).flatten(1)  # (C, values of the slice)
        self.noted.append((values.shape[1], values.mean(1), values.var(1, correction=0)))
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)

    @torch.no_grad()
    def join(self) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        total = sum(count for count, _, _ in self.noted)
        mean = sum(count * mean for count, mean, _ in self.noted) / total
        variance = sum(count * (variance + (own - mean) ** 2) for count, own, variance in self.noted) / total
        assert self.momentum is not None
        self.running_mean += self.momentum * (mean - self.running_mean)
        self.running_var += self.momentum * (variance * total / (total - 1) - self.running_var)
        self.num_batches_tracked += 1
        self.noted = []


def small_net(norm: Callable[[int], nn.Module], channels: int = 3, num_classes: int = 4) -> nn.Module:
    """A small network with convolutions, batch norm and a linear head.

    The convolutions have no bias: before a norm its gradient is only rounding error, which AdamW would amplify.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1, bias=False),
        norm(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1, bias=False),
        norm(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )
