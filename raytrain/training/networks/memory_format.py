"""Decides for ``--channels-last auto`` whether a network is faster with images whose channels are last in memory.

GPUs convolve in that order, so images in the other order are transposed before and after each convolution. A
transformer, which cuts its images into patches once, gains nothing. A network that calls ``view`` on its features, as
in many tutorials, fails with channels last, so the network is tried with one image, on the CPU.
"""

from __future__ import annotations

import torch
from torch import nn

from raytrain.config import TrainConfig
from raytrain.training.networks.model import model_of

_known_answers: dict[str, bool] = {}  # by the network's options as text: most trials of a sweep have the same ones


def suits_channels_last(config: TrainConfig, num_classes: int) -> bool:
    """Return whether the network that ``config`` names has convolutions, and takes images whose channels are last.

    Convolutions that only cut an image into patches do not count. Returns False if the network cannot be built or
    computed here; the training will raise the error. Answers are kept for this process.

    Example: ``suits_channels_last(recipes.custom(model="resnet50", batch_size=32), num_classes=10)``
    """
    key = repr((config.model, num_classes, config.channels, config.full_image_size, config.model_options))
    if key not in _known_answers:
        _known_answers[key] = _try_channels_last(config, num_classes)
    return _known_answers[key]


def _try_channels_last(config: TrainConfig, num_classes: int) -> bool:
    """Build the network, and return whether it has convolutions, and computes an image whose channels are last."""
    try:
        network = model_of(config, num_classes)
        # Windows of convolutions overlap, being larger than their steps, unlike the patches of a transformer.
        layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
        windows = [pair for layer in layers for pair in zip(layer.kernel_size, layer.stride, strict=True)]
        if not any(size > step for size, step in windows):
            return False
        network.eval().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        image = torch.zeros(1, config.channels, *config.full_image_size)
        with torch.no_grad():
            network(image.contiguous(memory_format=torch.channels_last))
        return True
    except Exception:  # code of the user's own may raise anything
        return False
