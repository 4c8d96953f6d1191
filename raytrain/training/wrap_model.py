"""What the options change in how a network computes: gradient checkpointing, mixed precision and torch.compile."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from raytrain.config import TrainConfig
from raytrain.training.gradient_checkpointing import checkpoint_gradients

AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def apply_options(model: nn.Module, config: TrainConfig) -> None:
    """Change ``model`` in place. Its class stays, and copies of it compute the same way with their own weights."""
    if config.gradient_checkpointing:
        checkpoint_gradients(model)
    if config.precision in AUTOCAST_DTYPES:
        model.register_forward_hook(_widen)
    if config.compile:
        model.compile()


def mixed_precision(config: TrainConfig, device: torch.device) -> torch.autocast:
    """A context in which networks compute in the precision that the options name; a step of a loop is in it."""
    dtype = AUTOCAST_DTYPES.get(config.precision)
    # Weights that were cast are not kept: a loop may change the weights before it uses them again.
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False)


def full_precision(device: torch.device) -> torch.autocast:
    """A context without autocast, for what follows a forward: a backward computes in the types of its forward."""
    return torch.autocast(device.type, torch.bfloat16, enabled=False)


def _widen(model: nn.Module, inputs: Any, output: Any) -> Any:
    """What a network returns in 16 bits becomes float32, so that losses are computed in it; other things stay."""
    return tree_map(_widened, output)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in AUTOCAST_DTYPES.values() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **tree_map(_widened, fields))
    return value
