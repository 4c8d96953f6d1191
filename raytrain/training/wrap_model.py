"""Wrap a model with gradient checkpointing, autocast, torch.compile and DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain.config import TrainConfig
from raytrain.training.gradient_checkpointing import checkpoint_gradients

AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def wrap_model(model: nn.Module, config: TrainConfig, device: torch.device, world_size: int) -> nn.Module:
    """Wrap ``model``, which is on ``device`` already, for training on ``world_size`` workers."""
    if config.gradient_checkpointing:
        checkpoint_gradients(model)
    if config.precision in AUTOCAST_DTYPES:
        model.forward = _autocast(model.forward, device.type, AUTOCAST_DTYPES[config.precision])
    if config.compile:
        model.compile()
    if world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    devices = [device] if device.type == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for broadcast_buffers
        return DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True)


def _autocast(forward: Callable[..., Tensor], device_type: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """``forward`` in mixed precision. It returns float32, so that losses are computed in float32."""

    def autocast_forward(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast(device_type, dtype):
            return forward(*args, **kwargs).float()

    return autocast_forward
