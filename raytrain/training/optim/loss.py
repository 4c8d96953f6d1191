"""The loss that the options name: cross entropy, with weights of the classes, smoothed labels, or focused.

If an image may have several classes, it is the mean of their binary cross entropies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import TrainConfig


class Loss:
    """Sums the loss over images, so that it does not depend on how a batch is divided.

    Args:
        class_weights: the weight of each class, (C,); None for equal ones. If an image may have several classes, it is
            the weight of the images that have the class.
    """

    def __init__(self, config: TrainConfig, class_weights: Sequence[float] | None, device: torch.device) -> None:
        self._smoothing = config.label_smoothing
        self._gamma = config.focal_gamma
        self._multi_label = config.multi_label
        self._weights = None if class_weights is None else torch.tensor(class_weights, device=device)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum, (), of the losses of ``logits`` (m, C) with ``targets``: labels (m,), or probabilities (m, C)."""
        weights = None if self._weights is None else self._weights.to(logits.dtype)
        if self._multi_label:
            each = F.binary_cross_entropy_with_logits(
                logits, targets.to(logits.dtype), pos_weight=weights, reduction="none"
            )
            return each.mean(dim=1).sum()
        losses = F.cross_entropy(logits, targets, weights, reduction="none", label_smoothing=self._smoothing)
        if self._gamma:  # Lin et al. 2017
            probabilities = (-F.cross_entropy(logits, targets, reduction="none")).exp()
            losses = losses * (1 - probabilities) ** self._gamma
        return losses.sum()
