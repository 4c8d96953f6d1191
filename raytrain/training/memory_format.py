"""`--channels-last auto`: whether a network computes faster with images whose channels come last in memory.

GPUs multiply in that order, so convolutions of other images are turned around before and after. A transformer cuts its
images into patches once, and gains nothing. A network that calls ``view`` on features, as many tutorials do, refuses
such images: so it is tried with one, on the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from raytrain.config import TrainConfig
from raytrain.training.model import build_model


def suits_channels_last(config: TrainConfig, num_classes: int) -> bool:
    """Return whether the network that ``config`` names is one of convolutions, and takes images that are channels last.

    Returns False if it cannot be built or computed here: whoever trains it says why.

    Example: ``suits_channels_last(recipes.custom(model="resnet50", batch_size=32), num_classes=10)``
    """
    options = tuple(config.model_options.items())
    return _suits(config.model, num_classes, config.channels, config.full_image_size, options)


@cache  # the trials of a sweep mostly have one network
def _suits(
    model: str, num_classes: int, channels: int, size: tuple[int, int], options: tuple[tuple[str, Any], ...]
) -> bool:
    try:
        network = build_model(model, num_classes, channels, 0, size, dict(options))
        # Windows of convolutions overlap, unlike the patches of a transformer.
        layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
        if not any(size > step for layer in layers for size, step in zip(layer.kernel_size, layer.stride, strict=True)):
            return False
        network.eval().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        with torch.no_grad():
            network(torch.zeros(1, channels, *size).contiguous(memory_format=torch.channels_last))
        return True
    except Exception:  # code of the user's own may raise anything
        return False
