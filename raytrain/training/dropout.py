"""Dropout and stochastic depth with random numbers of each sample's own.

``convert`` turns ``nn.Dropout``, ``nn.Dropout1d`` to ``3d``, torchvision's ``StochasticDepth`` (of rows) and timm's
``DropPath`` into layers that draw from (seed, step, sample, layer). ``begin`` tells them which samples come next. Only
the class of a layer changes, in place, as with batch norm. Dropout inside other layers, such as fused attention or
``nn.LSTM``, and that of ``torch.nn.functional`` stay as they are: they draw from torch's generator, other numbers on
another number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from raytrain.data.plan.permutation import as_int64, mix, splitmix64

_KEY = 4  # keeps these random numbers apart from others
_BITS = 53


def convert(model: nn.Module) -> nn.Module:
    """Change the dropout layers of ``model`` in place, numbered by its modules; called twice they draw the same."""
    for number, layer in enumerate(model.modules()):
        kind = _KINDS.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
        if kind is not None and getattr(layer, "mode", "row") == "row":
            layer.__class__ = kind
            converted = cast(_SampledDropout, layer)
            converted.key = as_int64(mix(number))
            converted.keys = None
    return model


def begin(layers: Iterable[nn.Module], samples: Tensor, seed: int, step: int) -> None:
    """Tell the ``layers`` that a forward of ``samples``, int64 (m,), follows in ``step``."""
    converted = [layer for layer in layers if isinstance(layer, _SampledDropout)]
    if converted:
        keys = splitmix64(mix(seed, step, _KEY), samples) << (64 - _BITS)
        for layer in converted:
            layer.keys = keys


class _SampledDropout(nn.Module):
    """The base of all kinds. Layers get their class from ``convert``, never from a constructor."""

    key: int  # of the layer, an int64
    keys: Tensor | None  # int64 (m,), one for each sample; None before the first step

    def forward(self, input: Tensor) -> Tensor:
        """The same shape, with some elements 0 and the others scaled up so that the mean stays."""
        rate = self.rate()
        if not self.training or rate == 0:
            return input
        kept = self.draws(input) >= rate
        scale = 1 / (1 - rate) if self.scales() and rate < 1 else 1.0
        return input * kept.to(input.dtype).mul_(scale)

    def rate(self) -> float:
        return cast(nn.Dropout, self).p

    def scales(self) -> bool:
        return True

    def mask_shape(self, input: Tensor) -> tuple[int, ...]:
        """Which elements are 0 together: they have one random number."""
        return tuple(input.shape)

    def draws(self, input: Tensor) -> Tensor:
        """Uniform random numbers in [0, 1), float64, that broadcast against ``input``.

        Rows of the input that belong to one sample, such as the windows of an image, follow each other. If the first
        dimension is no multiple of the number of samples, torch's generator draws.
        """
        shape = self.mask_shape(input)
        if self.keys is None or shape[0] % len(self.keys):
            return torch.rand(shape, dtype=torch.float64, device=input.device)
        # torch.compile takes arange for an index, with which it computes in too few bits, or fails; but not this.
        positions = torch.arange(math.prod(shape) // len(self.keys), device=input.device) ^ self.key ^ self.key
        return (splitmix64(self.keys[:, None] ^ self.key, positions).double() * 2.0**-_BITS).view(shape)


class _ChannelDropout(_SampledDropout):
    """nn.Dropout1d, 2d and 3d, for inputs with a batch dimension: whole channels become 0."""

    def mask_shape(self, input: Tensor) -> tuple[int, ...]:
        return (*input.shape[:2], *[1] * (input.ndim - 2))


class _RowDropout(_SampledDropout):
    """torchvision's StochasticDepth in mode "row": whole images become 0."""

    def mask_shape(self, input: Tensor) -> tuple[int, ...]:
        return (len(input), *[1] * (input.ndim - 1))


class _DropPath(_RowDropout):
    """timm's DropPath."""

    def rate(self) -> float:
        return cast(Any, self).drop_prob or 0.0

    def scales(self) -> bool:
        return cast(Any, self).scale_by_keep


_KINDS: dict[str, type[_SampledDropout]] = {
    "torch.nn.modules.dropout.Dropout": _SampledDropout,
    "torch.nn.modules.dropout.Dropout1d": _ChannelDropout,
    "torch.nn.modules.dropout.Dropout2d": _ChannelDropout,
    "torch.nn.modules.dropout.Dropout3d": _ChannelDropout,
    "torchvision.ops.stochastic_depth.StochasticDepth": _RowDropout,
    "timm.layers.drop.DropPath": _DropPath,
}
"""By the name of the plain class, so that neither torchvision nor timm is imported."""
