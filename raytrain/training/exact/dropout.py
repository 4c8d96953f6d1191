"""Dropout and stochastic depth with random numbers of each sample's own.

torch draws the numbers of a batch from one generator, so that a sample would get other numbers on another number of
workers. ``convert`` turns ``nn.Dropout``, ``nn.Dropout1d`` to ``3d``, torchvision's ``StochasticDepth`` (of rows) and
timm's ``DropPath`` into layers whose random numbers are a function of (seed, step, sample, layer, call, position in
the sample). ``begin`` tells them which samples come next. Only the class of a layer changes, in place, as with batch
norm.

A layer that is called several times for the same samples draws other numbers each time. Losses that compare two
forwards of the same images, such as R-Drop and SimCSE, need that. A forward that checkpointing repeats in the backward
must draw its numbers again, and cannot know which call it repeats. So calls within checkpointing all draw the numbers
of the first one, and so do those in a compiled network, which would be compiled anew for each call.

A loop may give a network several views of its images in one tensor, as in ``network(torch.cat([images, flipped]))``.
Then each row has a key of its sample and its view (:func:`follow_views`).

Dropout within other layers, such as fused attention or ``nn.LSTM``, and in ``torch.nn.functional`` is not changed: its
numbers depend on the number of workers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from raytrain.data.plan.permutation import as_int64, mix, splitmix64

_KEY = 4  # keeps these random numbers apart from others
_BITS = 53


def convert(model: nn.Module) -> nn.Module:
    """Change the dropout layers of ``model`` in place, and return it.

    Layers draw different numbers, because the key of each is its position among all modules.

    Example::

        convert(model)
        begin(model.modules(), samples, seed=0, step=0)  # before model(images)
    """
    for number, layer in enumerate(model.modules()):
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        # Only torchvision's StochasticDepth has a mode. It is left alone in the other one, which drops whole batches.
        if kind in _DRAWN_DIMENSIONS and getattr(layer, "mode", "row") == "row":
            layer.__class__ = _SampledDropout
            converted = cast(_SampledDropout, layer)
            converted.key = as_int64(mix(number))
            converted.keys = converted.row_keys = None
            converted.row_keys_of_shape = {}
            converted.num_calls = 0
            converted.drawn_dimensions = _DRAWN_DIMENSIONS[kind]
    return model


def begin(
    layers: Iterable[nn.Module],
    samples: Tensor | Callable[[], Tensor],
    seed: int,
    step: int,
    *,
    is_new: bool = True,
) -> list[nn.Module]:
    """Have the ``layers`` draw the numbers of ``samples``, int64 (m,), in ``step`` from the next forward on.

    Return the dropout layers among them; others are left alone. If ``samples`` is a function that returns the samples,
    it is only called if a dropout layer is in training mode. Without ``is_new``, a network gets the samples again, and
    the layers go on to count their calls.
    """
    converted = [layer for layer in layers if isinstance(layer, _SampledDropout)]
    if converted and (isinstance(samples, Tensor) or any(layer.training for layer in converted)):
        samples = samples if isinstance(samples, Tensor) else samples()
        keys = splitmix64(mix(seed, step, _KEY), samples) << (64 - _BITS)
        for layer in converted:
            layer.keys = layer.row_keys = keys
            layer.row_keys_of_shape = {}
            layer.num_calls = 0 if is_new else layer.num_calls
    return [*converted]


def has_layers(model: nn.Module) -> bool:
    """Return whether ``model`` has dropout layers that :func:`convert` has changed."""
    return any(isinstance(layer, _SampledDropout) for layer in model.modules())


def follow_views(layers: Iterable[nn.Module], images: Tensor) -> None:
    """Have dropout ``layers`` draw for each row of ``images``, (k m, C, H, W), which their network gets next.

    There may be k views of each of the m samples. They lie m rows apart, as after ``torch.cat``, unless the first two
    rows of each k are equal, as after ``repeat_interleave(k)``: then they lie side by side. The numbers of a sample's
    view are the same in both cases.
    """
    converted = [layer for layer in layers if isinstance(layer, _SampledDropout) and layer.keys is not None]
    if not converted:
        return
    keys = cast(Tensor, converted[0].keys)
    num_views = len(images) // max(len(keys), 1)
    row_keys = keys
    if num_views > 1 and len(images) == num_views * len(keys) and any(layer.training for layer in converted):
        of_other_views = (
            splitmix64(keys ^ as_int64(mix(_KEY, view)), torch.zeros_like(keys)) << (64 - _BITS)
            for view in range(1, num_views)
        )
        by_view = torch.stack([keys, *of_other_views])  # (k, m)
        # Both orders of the keys are made, and the device chooses: torch.equal would have the host wait for it.
        are_side_by_side = (images[::num_views] == images[1::num_views]).all()
        row_keys = torch.where(are_side_by_side, by_view.T.reshape(-1), by_view.reshape(-1))
    for layer in converted:
        layer.row_keys = row_keys


class _SampledDropout(nn.Module):
    """A dropout layer of any kind. Layers get this class from ``convert``, never from a constructor."""

    key: int  # of the layer, an int64
    keys: Tensor | None  # of the samples, int64 (m,); None before the first step
    row_keys: Tensor | None  # of the rows that the network gets, int64 (k m,), for k views of each sample
    row_keys_of_shape: dict[torch.Size, Tensor | None]  # with which inputs of a shape were last computed
    num_calls: int  # calls that have drawn numbers of these samples
    drawn_dimensions: int | None  # see _DRAWN_DIMENSIONS

    def forward(self, input: Tensor) -> Tensor:
        """Return the ``input`` with some elements set to 0, and the others scaled up to keep the mean.

        In evaluation mode, return the ``input`` itself.
        """
        # The rate of zeros is called drop_prob by timm, where it may be None, and p by torch and torchvision.
        options = cast(Any, self)
        rate = options.drop_prob or 0.0 if hasattr(self, "drop_prob") else options.p
        if not self.training or rate == 0:
            return input
        is_kept = self.random_numbers(input) >= rate
        scale = 1 / (1 - rate) if getattr(self, "scale_by_keep", True) and rate < 1 else 1.0
        return input * is_kept.to(input.dtype).mul_(scale)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy and a pickle have: nobody tells a copy which samples come next, so it has none.

        torch's generator draws in it, which the watch of a loop reports.
        """
        return {**vars(self), "keys": None, "row_keys": None, "row_keys_of_shape": {}, "num_calls": 0}

    def random_numbers(self, input: Tensor) -> Tensor:
        """Return uniform random numbers in [0, 1), float64, that broadcast against ``input``, and count the call.

        A sample may have several rows of the input, such as the windows of an image, one after the other. If the first
        dimension is not a multiple of the number of samples, or no samples are known, torch's generator draws.
        """
        key, row_keys = self._key_of_call(), self.row_keys
        # A forward that checkpointing repeats must draw for the same rows, and the network may have got others since.
        if not torch.compiler.is_compiling():
            if torch._C._current_graph_task_id() != -1:  # pyright: ignore
                row_keys = self.row_keys_of_shape.get(input.shape, row_keys)
            self.row_keys_of_shape[input.shape] = row_keys

        # Further dimensions have the size 1, so that all their elements share a number.
        num_dimensions = self.drawn_dimensions or input.ndim
        shape = (*input.shape[:num_dimensions], *[1] * (input.ndim - num_dimensions))
        # A network may join the views of an image before it gets here.
        keys = next((keys for keys in (row_keys, self.keys) if _divides(keys, shape[0])), None)
        if keys is None:
            return torch.rand(shape, dtype=torch.float64, device=input.device)
        # XOR twice changes nothing, but keeps torch.compile from treating arange as an index of too few bits.
        positions = torch.arange(math.prod(shape) // len(keys), device=input.device) ^ key ^ key
        return (splitmix64(keys[:, None] ^ key, positions).double() * 2.0**-_BITS).view(shape)

    def _key_of_call(self) -> int:
        """Return the key of the next call, an int64, and count the call.

        A call that repeats an earlier one in a backward does not count, nor does one within torch.func, which only the
        workers that have images may make. These, and calls in a compiled network, have the key of the first call.
        """
        if torch.compiler.is_compiling():
            return self.key
        is_in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
        if is_in_backward or is_transformed:
            return self.key
        self.num_calls += 1
        return self.key if self.num_calls == 1 or _is_checkpointed() else as_int64(mix(self.key, self.num_calls))


def _divides(keys: Tensor | None, num_rows: int) -> bool:
    """Return whether each of the ``keys`` has as many of ``num_rows`` rows."""
    return keys is not None and len(keys) > 0 and num_rows % len(keys) == 0


def _is_checkpointed() -> bool:
    """Return whether torch.utils.checkpoint computes the current forward, which it may repeat in the backward."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


_DRAWN_DIMENSIONS = {
    "torch.nn.modules.dropout.Dropout": None,
    "torch.nn.modules.dropout.Dropout1d": 2,
    "torch.nn.modules.dropout.Dropout2d": 2,
    "torch.nn.modules.dropout.Dropout3d": 2,
    "torchvision.ops.stochastic_depth.StochasticDepth": 1,
    "timm.layers.drop.DropPath": 1,
}
"""The number of leading dimensions in which each index has a random number of its own; None for all dimensions.

With 2, whole channels are dropped, with 1, whole samples. The keys are names of classes, so that neither torchvision
nor timm has to be imported.
"""
