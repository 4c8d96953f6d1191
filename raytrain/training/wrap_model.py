"""What the options change in how a network computes: gradient checkpointing, autocast and torch.compile."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from raytrain.config import TrainConfig
from raytrain.training.gradient_checkpointing import checkpoint_gradients

AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_OWN_FORWARD = "_forward_in_full_precision"


def apply_options(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Change ``model``, which is on ``device`` already, in place. Copies of it compute the same way."""
    if config.gradient_checkpointing:
        checkpoint_gradients(model)
    if config.precision in AUTOCAST_DTYPES and _OWN_FORWARD not in vars(model):
        autocast = partial(_autocast_forward, device_type=device.type, dtype=AUTOCAST_DTYPES[config.precision])
        # A method, not a function that knows the network: that of a copy would compute with the original's weights.
        vars(model)[_OWN_FORWARD] = vars(model).get("forward")
        model.forward = MethodType(autocast, model)
    if config.compile:
        model.compile()


def _autocast_forward(model: nn.Module, *args: Any, device_type: str, dtype: torch.dtype, **kwargs: Any) -> Any:
    """The forward in mixed precision. What it returns in 16 bits becomes float32, as losses are computed so."""
    with torch.autocast(device_type, dtype):
        forward = vars(model)[_OWN_FORWARD] or partial(type(model).forward, model)
        output = forward(*args, **kwargs)
    return tree_map_only(Tensor, partial(_widened, dtype=dtype), output)


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.float() if tensor.dtype == dtype else tensor
