"""Predictions from an image and its mirror image or shifted copies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from raytrain.config.evaluation import TestView

Network = Callable[[Tensor], Tensor]
"""Normalised images (B, C, H, W) -> logits (B, num_classes)."""


def flip_test(network: Network, images: Tensor) -> Tensor:
    """The mean of the ``network``'s logits for ``images`` and for their mirror images: (B, num_classes).

    It is a mean of logits, not of probabilities, so that whatever takes logits takes it: losses, softmax and sigmoid,
    thresholds, and exported programs.
    """
    return (network(images) + network(images.flip(-1))) / 2


def with_views(network: Network, views: Collection[TestView]) -> Network:
    """The ``network``, averaged over mirror images (``flip``), over shifted images (``shift``), or over all six."""
    flipped = partial(flip_test, network) if "flip" in views else network
    return partial(shift_test, flipped) if "shift" in views else flipped


def shift_test(network: Network, images: Tensor) -> Tensor:
    """The mean of the ``network``'s logits for ``images``, with weight 2, and for two shifted copies: (B, num_classes).

    One is shifted by a pixel up and left, the other down and right, as in Jordan 2024; the gap is 0, the mean colour,
    as that of ``--translate``.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1))  # (B, C, H + 2, W + 2)
    shifted = network(padded[:, :, 2:, 2:]) + network(padded[:, :, :height, :width])
    return network(images) / 2 + shifted / 4
