"""What stands round a network while it trains: mixed precision, compilation, and gradients joined over the workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain.config import TrainConfig

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def wrap(model: nn.Module, config: TrainConfig, device: torch.device, world_size: int) -> nn.Module:
    """``model``, which is on its device, as the configuration wants it trained on ``world_size`` workers."""
    if config.precision in AUTOCAST:
        model.forward = _mixed(model.forward, device.type, AUTOCAST[config.precision])
    if config.compile:
        model.compile()
    if world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    devices = [device] if device.type == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch renames broadcast_buffers, older knows no other name
        return DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True)


def _mixed(forward: Callable[..., Tensor], device_type: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """``forward`` in mixed precision; the losses that follow are computed in float32."""

    def run_mixed(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast(device_type, dtype):
            return forward(*args, **kwargs).float()

    return run_mixed
