"""Mixed precision: torch's autocast around a step, and what a network needs in 16 bits.

Autocast computes products in 16 bits, and sums such as losses in float32. A network would return its logits in 16 bits,
which is too imprecise for a loss, so they are converted to float32. Weights stay in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The values of ``--precision`` that are mixed precision, with the type of their products."""


def prepare_for_autocast(model: nn.Module, precision: str) -> None:
    """Change ``model`` in place for :func:`mixed_precision`: tensors that it returns in 16 bits become float32.

    On a CPU, its convolutions with a stride avoid a fault of torch's kernels. In full precision, nothing is changed.

    Example::

        prepare_for_autocast(model, "bfloat16")
        with mixed_precision("bfloat16", device):
            loss = cross_entropy(model(images), labels)
    """
    if precision in AUTOCAST_DTYPES:
        # Hooks are functions of this module, no closures, so that a copy or a pickle of the network keeps them.
        model.register_forward_hook(_widen_output)
        for layer in model.modules():
            if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and layer.stride[-1] > 1:
                layer.forward = partial(_convolve, layer.forward, layer.stride[-1])


def mixed_precision(precision: str, device: torch.device) -> torch.autocast:
    """Return a context in which networks compute in ``precision``, for the steps of a loop and for evaluations.

    A ``precision`` that is not mixed turns autocast off.
    """
    dtype = AUTOCAST_DTYPES.get(precision)
    # Without a cache of cast weights: a loop may change the weights before it uses them again.
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False)


def _convolve(forward: Callable[[Tensor], Tensor], stride: int, input: Tensor) -> Tensor:
    """Compute the convolution ``forward`` of a layer; on a CPU, in float32 if maps are narrower than its ``stride``.

    For such maps, torch's CPU kernels give wrong gradients in bfloat16. The backward needs no such context, since it
    computes in the dtypes of its forward.
    """
    if input.device.type != "cpu" or input.shape[-1] >= stride:
        return forward(input)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return forward(input.float())


def _widen_output(model: nn.Module, inputs: Any, output: Any) -> Any:
    """Return ``output`` with its tensors of 16 bits in float32; anything else in it stays."""
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in AUTOCAST_DTYPES.values() else tensor, output)


def map_tensors(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Return the ``output`` of a network with ``function`` applied to each of its tensors; anything else in it stays.

    Example: ``map_tensors(Tensor.clone, {"logits": logits, "names": ["a", "b"]})``
    """

    def map_leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        # Networks of Hugging Face return dataclasses, in which torch's tree_map does not look for tensors.
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return dataclasses.replace(value, **tree_map(map_leaf, fields))
        return value

    return tree_map(map_leaf, output)
