"""The network that ``--model`` names: torchvision's, timm's or the user's own, new or with its library's weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from raytrain.config import TrainConfig
from raytrain.config.extras import require_package
from raytrain.config.named_functions import load_function
from raytrain.config.network import first_and_full_size, timm_name
from raytrain.config.user_code import in_one_sentence
from raytrain.errors import UsageError, did_you_mean
from raytrain.training.model_names import unknown_classifier, unknown_timm_model
from raytrain.training.weights_source import not_downloaded

if TYPE_CHECKING:
    from timm.models import PretrainedCfg

_ONE_OUTPUT: dict[str, Any] = {"aux_logits": False, "init_weights": True}  # no auxiliary logits beside the others
OPTIONS = {"googlenet": _ONE_OUTPUT, "inception_v3": _ONE_OUTPUT}  # of torchvision's classifiers
# Usual names of the arguments of functions that make networks, the likeliest first.
_CLASSES = ("num_classes", "n_classes", "num_class", "num_labels")
_CHANNELS = ("in_channels", "in_chans", "num_channels", "n_channels", "channels")
_RESIZE = {"center": "crop", "squash": "stretch", "border": "pad"}  # timm's ``crop_mode`` as ``--resize``


def build_model(
    name: str,
    num_classes: int,
    channels: int,
    seed: int,
    image_size: tuple[int, int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return a newly initialised network on the CPU: images (B, channels, H, W) -> logits (B, num_classes).

    ``name`` is one of:

    - a classifier of torchvision,
    - ``timm:`` and the name of one of timm's networks, of which some are made for one ``image_size``,
    - ``package.module:function``, a function or class that returns an nn.Module. It is called with the keywords
      num_classes and channels, as far as it takes them.

    ``options`` are further arguments of the function that makes it, such as ``{"drop_path_rate": 0.1}``. With an
    ``image_size`` (height, width), lazy layers get their shapes, too.

    The same seed gives the same weights, whatever random numbers were drawn before; torch's global generator does not
    change. Raises UsageError if there is no such network, or it does not take the options.

    Example: ``build_model("resnet18", num_classes=10, channels=3, seed=0)``
    """
    # Find the function that makes the network. Modules are imported before the seed is set, since an import may draw
    # random numbers, too.
    in_timm, options = timm_name(name), dict(options or {})
    if in_timm is not None:
        make = partial(_build_timm, in_timm, num_classes, channels, image_size, **options)
    elif ":" in name:
        make = _users_function(name, num_classes, channels, options)
    else:
        make = partial(_torchvision_classifier(name), num_classes=num_classes, **{**OPTIONS.get(name, {}), **options})
    if options and (in_timm is not None or ":" not in name):  # a user's function explains its own errors
        make = partial(_make_with_options, name, options, make)

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = make()
        if not isinstance(model, nn.Module):
            returned = "nothing" if model is None else f"{model!r:.80}"
            raise UsageError(
                f"--model {name} returned {returned}; it must return a network, an object of torch.nn.Module."
            )
        # torchvision's classifiers take RGB: with other images the first convolution is replaced.
        if in_timm is None and ":" not in name and channels != 3:
            path, conv = next((path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
            attributes = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
            as_before: dict[str, Any] = {key: getattr(conv, key) for key in attributes}
            model.set_submodule(path, nn.Conv2d(channels, conv.out_channels, bias=conv.bias is not None, **as_before))
        initialise_lazy_layers(model, channels, image_size)
    return model


def model_of(config: TrainConfig, num_classes: int) -> nn.Module:
    """Return the network that the options name, newly initialised; see :func:`build_model`."""
    size, options = config.full_image_size, config.model_options
    return build_model(config.model, num_classes, config.channels, config.seed, size, options)


def _make_with_options(name: str, options: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Return the result of ``make``, or blame the user's ``options`` if a library cannot build the network ``name``."""
    shown = " ".join(f"{key}={value!r}" for key, value in options.items())
    try:
        return make()
    except UsageError:
        raise
    except Exception as error:  # a wrong value may fail anywhere in a library's code
        unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise UsageError(f"--model {name} cannot be built with --model-option {shown} ({reason}).") from None
        # The class whose __init__ failed is a global variable of the file that called it: name its own parameters.
        namespaces = (frame.f_globals for frame, _ in walk_tb(error.__traceback__))
        kinds = (namespace[unknown[1]] for namespace in namespaces if unknown[1] in namespace)
        known = [parameter for kind in kinds for parameter in inspect.signature(kind).parameters]
        raise UsageError(
            f"--model-option {unknown[2]}: --model {name} has no such argument{did_you_mean(unknown[2], known)}; "
            f"see {unknown[1]} in its library."
        ) from None


def _users_function(name: str, num_classes: int, channels: int, options: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the user's function or class ``name`` with its arguments: a function of none that makes the network.

    The arguments are the two numbers, as far as it takes them, and the ``options``. Raises UsageError if it cannot be
    called with these; what is returned raises one if the user's code fails.
    """
    function = load_function("--model", name)
    if isinstance(function, nn.Module):
        raise UsageError(
            f"--model {name} is a network; name a function or class that makes it, so that --seed decides its weights."
        )
    numbers = network_arguments(function, num_classes, channels)
    if filled_in := sorted(numbers.keys() & options.keys()):
        taken = filled_in[0]
        raise UsageError(f"--model-option {taken}: it is filled in, as {numbers[taken]} here; leave it out.")
    arguments: dict[str, Any] = {**numbers, **options}
    # Wrong arguments would be a TypeError in the user's code, with a traceback.
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        if (unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error))) is not None:
            known = inspect.signature(function).parameters
            raise UsageError(
                f"--model-option {unknown[1]}: {name} has no such parameter{did_you_mean(unknown[1], known)}; it has "
                f"{', '.join(known) or 'none'}."
            ) from None
        shown = " and ".join(arguments) or "no arguments"
        raise UsageError(
            f"--model {name} is called with {shown}, which is not enough: {error}; call its parameters num_classes and "
            "channels, which are filled in, and give others a default."
        ) from None
    return in_one_sentence(f"--model {name} cannot be built")(partial(function, **arguments))


def network_arguments(function: Callable[..., Any], num_classes: int, channels: int) -> dict[str, int]:
    """Return ``num_classes`` and ``channels`` as keyword arguments for ``function``, which makes a network.

    Each number has the first of its usual names that is a parameter of the function, such as ``n_classes``; without
    such a parameter it is left out.

    Example: ``network_arguments(lambda n_classes, width=64: ..., num_classes=10, channels=3) == {"n_classes": 10}``
    """
    # A function of **options only, with no other parameter, gets both.
    parameters = inspect.signature(function).parameters
    if [parameter.kind for parameter in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]:
        return {"num_classes": num_classes, "channels": channels}
    arguments: dict[str, int] = {}
    for usual_names, number in ((_CLASSES, num_classes), (_CHANNELS, channels)):
        name = next((usual for usual in usual_names if usual in parameters), None)
        if name is not None:
            arguments[name] = number
    return arguments


def build_pretrained(name: str, channels: int, image_size: tuple[int, int] | None) -> nn.Module:
    """Return the network ``name`` with the default weights of its library, and with the classes of those weights.

    torchvision keeps its downloads below TORCH_HOME, timm below HF_HOME. Raises UsageError if the network is of neither
    library, or timm has no weights for it; StorageError if the weights cannot be downloaded.

    Example: ``build_pretrained("timm:resnet18.a1_in1k", channels=3, image_size=None)``
    """
    in_timm = timm_name(name)
    if in_timm is not None:
        library = "timm"
        pretrained = _find_pretrained(in_timm)
        if not pretrained.has_weights:
            raise UsageError(
                f"--weights DEFAULT: timm has no weights for {in_timm}; leave --weights out, or give a file."
            )
        make = partial(_build_timm, in_timm, pretrained.num_classes, channels, image_size, pretrained=True)
    elif ":" in name:
        raise UsageError(
            f"--weights DEFAULT are torchvision's or timm's, and --model {name} is your own; give a file of its "
            "weights."
        )
    else:
        library = "torchvision"
        make = partial(_torchvision_classifier(name), weights="DEFAULT", progress=False)
    try:
        with torch.random.fork_rng(devices=[]):
            return make()
    except (OSError, RuntimeError) as error:
        raise not_downloaded(library, in_timm or name, error) from None


def _torchvision_classifier(name: str) -> Callable[..., nn.Module]:
    """Return torchvision's function for the classifier ``name``. Raises UsageError if there is none."""
    from torchvision import models  # deferred: the import takes seconds

    names = models.list_models(module=models)
    if name not in names:
        raise unknown_classifier(name, names)
    return models.get_model_builder(name)


def _build_timm(
    name: str, num_classes: int, channels: int, image_size: tuple[int, int] | None = None, **options: Any
) -> nn.Module:
    """Return timm's network ``name``: images (B, channels, H, W) -> logits (B, num_classes).

    If it takes images of one size only, it is made for ``image_size``, by default its own. ``options`` go to
    ``timm.create_model``. Raises UsageError if timm is missing or has no such network, or if the network cannot have
    this image size; the library's own error if there are options of the user's, which may be to blame.
    """
    pretrained = _find_pretrained(name)
    import timm

    # Only networks made for one size have the keyword.
    if pretrained.fixed_input_size and image_size not in (None, pretrained.input_size[1:]):
        options = {**options, "img_size": image_size}
    try:
        return timm.create_model(name, num_classes=num_classes, in_chans=channels, **options)
    except (AssertionError, ValueError) as error:
        # With an option of the user's, _make_with_options explains the error; without one, only the size is to blame.
        has_users_options = not options.keys() <= {"img_size", "pretrained"}
        if has_users_options:
            raise
        wanted, native = (" ".join(map(str, size or ())) for size in (image_size, pretrained.input_size[1:]))
        raise UsageError(
            f"timm cannot build {name} for --image-size {wanted}: {error}; its own size is {native}."
        ) from None


def timm_arguments(config: TrainConfig, network: nn.Module) -> dict[str, Any]:
    """Return the arguments, besides the number of classes, with which :func:`build_model` made a network of timm.

    Example: ``timm.create_model("resnet18", num_classes=10, **timm_arguments(config, network))``
    """
    pretrained: Any = getattr(network, "pretrained_cfg", {})
    size = config.full_image_size
    has_other_size = pretrained.get("fixed_input_size") and size != tuple(pretrained["input_size"][1:])
    return {"in_chans": config.channels, **({"img_size": size} if has_other_size else {}), **config.model_options}


def _find_pretrained(name: str) -> PretrainedCfg:
    """Return timm's description of the weights for its network ``name``, whose tag (.a1_in1k) may be omitted.

    It is an empty one if timm has no weights for it. Raises UsageError if timm is missing, or has no such network or
    tag.
    """
    require_package(f"--model timm:{name}", "timm", "timm")
    from timm.models import PretrainedCfg, get_pretrained_cfg, is_model, list_models

    architecture, _, tag = name.partition(".")
    if not is_model(architecture):
        raise unknown_timm_model(name, list_models())
    try:
        return get_pretrained_cfg(name) or PretrainedCfg()
    except RuntimeError:
        tags = [tagged.partition(".")[2] for tagged in list_models(f"{architecture}.*", include_tags=True)]
        hint = did_you_mean(tag, tags)
        raise UsageError(
            f"--model timm:{name}: timm has no weights {tag} for {architecture}{hint}; it has {', '.join(tags)}."
        ) from None


def preprocessing_of_weights(name: str, channels: int) -> dict[str, Any]:
    """Return options of a run with which images look as they did when timm trained the weights of its network ``name``.

    These are ``image_size``, ``mean`` and others, by name. Grey images get the mean over the colours. Raises UsageError
    if timm is missing, or has no such network.
    """
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
def initialise_lazy_layers(model: nn.Module, channels: int, image_size: tuple[int, int] | None) -> None:
    """Give layers such as nn.LazyLinear their shapes, by a forward of a black image.

    Nothing happens without such layers, or without an image size. Raises UsageError if the forward fails.
    """
    if not any(is_lazy(parameter) for parameter in model.parameters()) or image_size is None:
        return
    # In evaluation mode, batch norm needs no variance, which a single image may lack, and dropout draws no random
    # numbers. Afterwards, each layer gets its mode back.
    modes = [(layer, layer.training) for layer in model.modules()]
    try:
        parameter = next(model.parameters())  # a lazy one has a type and a device, too
        model.eval()(torch.zeros(1, channels, *image_size, dtype=parameter.dtype, device=parameter.device))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"The network has lazy layers, which an image of {channels}x{image_size[0]}x{image_size[1]} numbers cannot "
            f"initialise ({str(error).partition(chr(10))[0]}); call it once before run.prepare."
        ) from None
    for layer, training in modes:
        layer.training = training


@torch.no_grad()
def check_growing_size(model: nn.Module, config: TrainConfig) -> None:
    """Raise UsageError if the network cannot take the images that a growing ``--image-size`` starts with.

    The network is left in evaluation mode if the size grows.
    """
    if not isinstance(config.image_size, str):  # "128..224" grows
        return
    # A forward without gradients shows it in milliseconds, before the run has read any image.
    (height, width), _ = first_and_full_size(config.image_size)
    try:
        model.eval()(torch.zeros(1, config.channels, height, width))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"--image-size is {config.image_size}, and --model {config.model} cannot take images of {height}x{width} "
            f"pixels ({reason}); start with larger ones, or give one size."
        ) from None
