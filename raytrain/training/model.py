"""Build the network that ``--model`` names, with weights that depend on the seed or are those of its library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from raytrain.config import TrainConfig
from raytrain.config.network import first_and_full_size, timm_name
from raytrain.config.user_function import load_function
from raytrain.errors import StorageError, UsageError
from raytrain.training.model_names import unknown_classifier
from raytrain.training.timm_models import build_pretrained_timm_model, build_timm_model

_ONE_OUTPUT: dict[str, Any] = {"aux_logits": False, "init_weights": True}
_OPTIONS = {"googlenet": _ONE_OUTPUT, "inception_v3": _ONE_OUTPUT}


def build_model(
    name: str, num_classes: int, channels: int, seed: int, image_size: tuple[int, int] | None = None
) -> nn.Module:
    """A newly initialised network on the CPU: images (B, channels, H, W) -> logits (B, num_classes).

    ``name`` is a classifier of torchvision, ``timm:`` and the name of one of timm's networks, of which some are made
    for one ``image_size``, or ``package.module:function``, a function that is called with the keywords num_classes and
    channels and returns an nn.Module. The same seed gives the same weights, whatever random numbers were drawn before;
    torch's global generator does not change. Raises UsageError if there is no such network.
    """
    in_timm = timm_name(name)
    if in_timm is not None:
        build = partial(build_timm_model, in_timm, num_classes, channels, image_size)
    elif ":" in name:
        build = _own_builder(name, num_classes, channels)
    else:
        build = _builder(name, num_classes, channels)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = build()
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name} returned a {type(model).__name__}; it must return a torch.nn.Module.")
    return model


def build_pretrained(name: str, channels: int, image_size: tuple[int, int] | None) -> nn.Module:
    """The network ``name`` with the weights that its library calls the default, and with the classes of those weights.

    torchvision keeps its downloads below TORCH_HOME, timm below HF_HOME. Raises UsageError if the network is of neither
    library, StorageError if the weights cannot be downloaded.
    """
    in_timm = timm_name(name)
    if in_timm is None and ":" in name:
        raise UsageError(
            f"--weights DEFAULT are torchvision's or timm's, and --model {name} is your own; give a file of its "
            "weights."
        )
    with torch.random.fork_rng(devices=[]):
        if in_timm is not None:
            return build_pretrained_timm_model(in_timm, channels, image_size)
        return _build_pretrained_classifier(name)


@torch.no_grad()
def check_growing_size(model: nn.Module, config: TrainConfig) -> None:
    """Raise UsageError if the network cannot take the images that a growing ``--image-size`` starts with."""
    if not isinstance(config.image_size, str):
        return
    (height, width), _ = first_and_full_size(config.image_size)
    try:
        model.eval()(torch.zeros(1, config.channels, height, width))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"--image-size is {config.image_size}, and --model {config.model} cannot take images of {height}x{width} "
            f"pixels ({reason}); start with larger ones, or give one size."
        ) from None


def _build_pretrained_classifier(name: str) -> nn.Module:
    make = _torchvision_classifier(name)
    try:
        return make(weights="DEFAULT", progress=False)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"torchvision's weights for {name} cannot be downloaded ({error}); save them on a machine with a network "
            "connection with torch.save(model.state_dict(), FILE), and give --weights FILE."
        ) from None


def _own_builder(name: str, num_classes: int, channels: int) -> Callable[[], Any]:
    """The user's function ``package.module:function`` with its arguments."""
    function = load_function("--model", name)
    try:
        inspect.signature(function).bind(num_classes=num_classes, channels=channels)
    except TypeError as error:
        raise UsageError(
            f"--model {name} is called with num_classes and channels, which it does not take: {error}."
        ) from None
    return lambda: function(num_classes=num_classes, channels=channels)


def _builder(name: str, num_classes: int, channels: int) -> Callable[[], nn.Module]:
    """torchvision's function for the classifier ``name`` with its arguments."""
    make = _torchvision_classifier(name)

    def build() -> nn.Module:
        model = make(num_classes=num_classes, **_OPTIONS.get(name, {}))
        return model if channels == 3 else _with_channels(model, channels)

    return build


def _torchvision_classifier(name: str) -> Callable[..., nn.Module]:
    """torchvision's function for the classifier ``name``."""
    from torchvision import models  # deferred: the import takes seconds

    names = models.list_models(module=models)
    if name not in names:
        raise unknown_classifier(name, names)
    return models.get_model_builder(name)


def _with_channels(model: nn.Module, channels: int) -> nn.Module:
    """Replace the first convolution, which takes RGB, by one that takes ``channels``."""
    name, conv = next((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
    parent, _, attribute = name.rpartition(".")
    kept = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    options: dict[str, Any] = {key: getattr(conv, key) for key in kept}
    replacement = nn.Conv2d(channels, conv.out_channels, bias=conv.bias is not None, **options)
    setattr(model.get_submodule(parent), attribute, replacement)
    return model
