"""Mixed precision: torch's autocast around a step, and what a network needs in 16 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def prepare_for_autocast(model: nn.Module, precision: str) -> None:
    """Change ``model`` in place for :func:`mixed_precision`: what it returns in 16 bits becomes float32."""
    if precision in AUTOCAST_DTYPES:
        model.register_forward_hook(_widen)
        for layer in model.modules():
            if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and layer.stride[-1] > 1:
                layer.forward = partial(_convolve, layer.forward, layer.stride[-1])


def mixed_precision(precision: str, device: torch.device) -> torch.autocast:
    """A context in which networks compute in ``precision``; a step of a loop and an evaluation are in it."""
    dtype = AUTOCAST_DTYPES.get(precision)
    # Weights that were cast are not kept: a loop may change the weights before it uses them again.
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False)


def full_precision(device: torch.device) -> torch.autocast:
    """A context without autocast, for what follows a forward: a backward computes in the types of its forward."""
    return torch.autocast(device.type, torch.bfloat16, enabled=False)


def _convolve(forward: Callable[[Tensor], Tensor], stride: int, input: Tensor) -> Tensor:
    """In float32 for maps narrower than the stride, of which torch's CPU kernels give wrong gradients in bfloat16."""
    if input.device.type != "cpu" or input.shape[-1] >= stride:
        return forward(input)
    with full_precision(input.device):
        return forward(input.float())


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
