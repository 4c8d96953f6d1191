"""Predictions from images and their mirror images."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Network = Callable[[Tensor], Tensor]
"""Normalised images (B, C, H, W) -> logits (B, num_classes)."""


def flip_test(network: Network, images: Tensor) -> Tensor:
    """The mean of the ``network``'s logits for ``images`` and for their mirror images: (B, num_classes).

    It is a mean of logits, not of probabilities, so that whatever takes logits takes it: losses, softmax and sigmoid,
    thresholds, and exported programs.
    """
    return (network(images) + network(images.flip(-1))) / 2
