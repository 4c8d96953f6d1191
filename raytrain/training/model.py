"""The network that ``--model`` names: torchvision's, timm's or the user's own, new or with its library's weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from raytrain.config import TrainConfig
from raytrain.config.network import first_and_full_size, timm_name
from raytrain.config.user_code import in_one_sentence, load_function
from raytrain.errors import StorageError, UsageError, did_you_mean
from raytrain.training.model_names import missing, unknown_classifier, unknown_timm_model

if TYPE_CHECKING:
    from timm.models import PretrainedCfg

_ONE_OUTPUT: dict[str, Any] = {"aux_logits": False, "init_weights": True}
_OPTIONS = {"googlenet": _ONE_OUTPUT, "inception_v3": _ONE_OUTPUT}
_CLASSES = ("num_classes", "n_classes", "num_class", "num_labels")  # what people call the argument
_CHANNELS = ("in_channels", "in_chans", "num_channels", "n_channels", "channels")  # the last one may mean other ones
_RESIZE = {"center": "crop", "squash": "stretch", "border": "pad"}  # timm's ``crop_mode`` as ``--resize``


def build_model(
    name: str, num_classes: int, channels: int, seed: int, image_size: tuple[int, int] | None = None
) -> nn.Module:
    """A newly initialised network on the CPU: images (B, channels, H, W) -> logits (B, num_classes).

    ``name`` is a classifier of torchvision, ``timm:`` and the name of one of timm's networks, of which some are made
    for one ``image_size``, or ``package.module:function``, a function or class that returns an nn.Module and is called
    with the keywords num_classes and channels, as far as it takes them. The same seed gives the same weights, whatever
    random numbers were drawn before; torch's global generator does not change. Raises UsageError if there is no such
    network.
    """
    in_timm = timm_name(name)
    if in_timm is not None:
        build = partial(_build_timm, in_timm, num_classes, channels, image_size)
    elif ":" in name:
        build = _own_builder(name, num_classes, channels)
    else:
        build = partial(_build_torchvision, _torchvision_classifier(name), name, num_classes, channels)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = build()
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {name} returned a {type(model).__name__}; it must return a torch.nn.Module.")
        initialise_lazy_layers(model, channels, image_size)
    return model


@torch.no_grad()
def initialise_lazy_layers(model: nn.Module, channels: int, image_size: tuple[int, int] | None) -> None:
    """Give layers such as nn.LazyLinear their shapes, by a forward of an image. Raises UsageError if that fails."""
    if not any(is_lazy(parameter) for parameter in model.parameters()) or image_size is None:
        return
    modes = [(layer, layer.training) for layer in model.modules()]
    try:
        model.eval()(torch.zeros(1, channels, *image_size))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"The network has lazy layers, which an image of {channels}x{image_size[0]}x{image_size[1]} numbers cannot "
            f"initialise ({str(error).partition(chr(10))[0]}); call it once before run.prepare."
        ) from None
    for layer, training in modes:
        layer.training = training


def build_pretrained(name: str, channels: int, image_size: tuple[int, int] | None) -> nn.Module:
    """The network ``name`` with the weights that its library calls the default, and with the classes of those weights.

    torchvision keeps its downloads below TORCH_HOME, timm below HF_HOME. Raises UsageError if the network is of neither
    library, or timm has no weights for it; StorageError if the weights cannot be downloaded.
    """
    in_timm = timm_name(name)
    if in_timm is None and ":" in name:
        raise UsageError(
            f"--weights DEFAULT are torchvision's or timm's, and --model {name} is your own; give a file of its "
            "weights."
        )
    library = "torchvision" if in_timm is None else "timm"
    if in_timm is None:
        make = partial(_torchvision_classifier(name), weights="DEFAULT", progress=False)
    else:
        make = _pretrained_timm(in_timm, channels, image_size)
    try:
        with torch.random.fork_rng(devices=[]):
            return make()
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"{library}'s weights for {in_timm or name} cannot be downloaded ({error}); save them on a machine with a "
            "network connection with torch.save(model.state_dict(), FILE), and give --weights FILE."
        ) from None


def preprocessing(name: str, channels: int) -> dict[str, Any]:
    """Options with which images are as those that timm's weights were trained on; grey ones get the mean colour."""
    pretrained = _find_pretrained(name)
    mean, std = pretrained.mean, pretrained.std
    return {
        "image_size": pretrained.input_size[1:],
        "resize": _RESIZE.get(pretrained.crop_mode, "crop"),
        "crop_fraction": min(pretrained.crop_pct, 1.0),
        "interpolation": pretrained.interpolation,
        "mean": mean if channels == 3 else (sum(mean) / 3,),
        "std": std if channels == 3 else (sum(std) / 3,),
    }


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


def _own_builder(name: str, num_classes: int, channels: int) -> Callable[[], Any]:
    """The user's function or class ``package.module:function`` with its arguments."""
    function = load_function("--model", name)
    if isinstance(function, nn.Module):
        raise UsageError(
            f"--model {name} is a network; name a function or class that makes it, so that --seed decides its weights."
        )
    arguments = _arguments(function, num_classes, channels)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        given = " and ".join(arguments) or "no arguments"
        raise UsageError(f"--model {name} is called with {given}, which is not enough: {error}.") from None
    return in_one_sentence(f"--model {name} cannot be built")(partial(function, **arguments))


def _arguments(function: Callable[..., Any], num_classes: int, channels: int) -> dict[str, int]:
    """What a user's ``function`` is called with: as much as its parameters name, or both if it takes any keywords."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) and len(parameters) == 1:
        return {"num_classes": num_classes, "channels": channels}
    named = [next((name for name in names if name in parameters), None) for names in (_CLASSES, _CHANNELS)]
    return {name: number for name, number in zip(named, (num_classes, channels), strict=True) if name is not None}


def _build_torchvision(make: Callable[..., nn.Module], name: str, num_classes: int, channels: int) -> nn.Module:
    model = make(num_classes=num_classes, **_OPTIONS.get(name, {}))
    return model if channels == 3 else _with_channels(model, channels)


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


def _build_timm(
    name: str, num_classes: int, channels: int, image_size: tuple[int, int] | None = None, **options: Any
) -> nn.Module:
    """timm's network ``name``, newly initialised: images (B, channels, H, W) -> logits (B, num_classes).

    If it takes images of one size only, it is made for ``image_size``, by default its own. ``options`` go to
    ``timm.create_model``. Raises UsageError if timm is missing, or has no such network.
    """
    pretrained = _find_pretrained(name)
    import timm

    if pretrained.fixed_input_size and image_size not in (None, pretrained.input_size[1:]):
        options = {**options, "img_size": image_size}
    try:
        return timm.create_model(name, num_classes=num_classes, in_chans=channels, **options)
    except (AssertionError, ValueError) as error:  # such as an image size that the network cannot have
        raise UsageError(
            f"timm cannot build {name} for --image-size {_shown(image_size)}: {error}; its own size is "
            f"{_shown(pretrained.input_size[1:])}."
        ) from None


def _pretrained_timm(name: str, channels: int, image_size: tuple[int, int] | None) -> Callable[[], nn.Module]:
    pretrained = _find_pretrained(name)
    if not pretrained.has_weights:
        raise UsageError(f"--weights DEFAULT: timm has no weights for {name}; leave --weights out, or give a file.")
    return partial(_build_timm, name, pretrained.num_classes, channels, image_size, pretrained=True)


def _find_pretrained(name: str) -> PretrainedCfg:
    """What timm knows of the weights for its network ``name``, whose tag may be omitted. Raises UsageError."""
    try:
        from timm.models import PretrainedCfg, get_pretrained_cfg, is_model, list_models
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise missing(f"--model timm:{name}", "timm") from None
    architecture, _, tag = name.partition(".")
    if not is_model(architecture):
        raise unknown_timm_model(name, list_models())
    try:
        return get_pretrained_cfg(name) or PretrainedCfg()
    except RuntimeError:
        tags = [each.partition(".")[2] for each in list_models(f"{architecture}.*", include_tags=True)]
        hint = did_you_mean(tag, tags)
        raise UsageError(
            f"--model timm:{name}: timm has no weights {tag} for {architecture}{hint}; it has {', '.join(tags)}."
        ) from None


def _shown(image_size: tuple[int, ...] | None) -> str:
    """A size as it is typed."""
    return " ".join(map(str, image_size or ()))
