"""Choose the options that the user has not given, by the images: those that an expert would begin with.

The recipe ``auto`` leaves options open (``open_options``), and :func:`choose_options` decides on them once
:func:`open_decided` has listed the images. There are three cases:

- **Photographs**, and a network with weights of ImageNet. In the first epoch only the head learns, on features that are
  good already; then all layers learn, at a rate low enough to forget little. Batch norm keeps the statistics of the
  weights, because those of a few hundred small batches are noise, and some networks, such as timm's ``tf_…``, need
  thousands of steps to learn new ones. A few epochs suffice; the fewer images there are, the more epochs are trained.
- **Small images**, below 64 pixels: ImageNet's features are of larger things, so the network of the recipe cifar10-fast
  is trained from scratch.
- **A network without weights**, such as one of the user's own: SGD with a cosine schedule, and many more epochs.

All three aim at a good accuracy in the time that people wait for a first model: minutes on a few cores, or on a GPU.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from raytrain.config import TrainConfig
from raytrain.config.named_functions import names_own_function
from raytrain.config.network import Size, first_and_full_size, timm_name
from raytrain.data.dataset import Dataset, open_dataset
from raytrain.data.images.decode import read_header
from raytrain.data.images.fetch_and_decode import read_contents, require_bytes
from raytrain.data.images.image_format import BadImage
from raytrain.errors import StorageError, flag
from raytrain.launch.gpus import gpus
from raytrain.recipes import auto, cifar10_fast
from raytrain.runs.logs import STARTUP
from raytrain.storage.store import Store
from raytrain.training.weights_source import DEFAULT, check_downloads

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger("raytrain")
_recipe_auto = cache(auto)  # without any choice; each call checks all options anew

PHOTOGRAPH_SIDE = 64
"""Pixels of the shorter side from which on images count as photographs, and features of ImageNet help."""
_PRETRAINED = "efficientnet_b0"  # among torchvision's networks of similar accuracy, one of the fastest on a CPU
_LARGEST_SIDE = 224  # pixels: the size of the images with which its weights were trained
_NUM_MEASURED = 32  # images
_MIN_IMBALANCE = 5.0  # classes are weighted if the largest has at least this many times the images of the smallest
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, with which torchvision's weights were trained
CHOICES = {
    "network": ("model", "weights", "image_size", "batch_norm", "channels_last", "precision"),
    "rates": (
        *("optimizer", "learning_rate", "head_learning_rate_factor", "head_epochs", "schedule", "warmup_epochs"),
        *("momentum", "nesterov", "weight_decay", "decay_norms_and_biases", "ema_decay"),
    ),
    "length": ("epochs", "batch_size", "evaluate_every"),
    "images": ("flip", "translate", "label_smoothing", "class_weights", "test_views"),
}
"""The options with ``Mark.CHOSEN_BY_AUTO``, by subject. Each subject has a line that says what was chosen, and why."""


class Images(NamedTuple):
    """Properties of the images that decide on options."""

    number: int  # how many training images there are
    classes: int
    side: int  # median of the shorter sides, pixels
    is_grey: bool
    imbalance: float  # number of images of the largest class, divided by that of the smallest
    multi_label: bool


class Network(NamedTuple):
    """Properties of the network that decide on options: True if it has layers of this kind."""

    batch_norm: bool
    grouped: bool  # convolutions of groups of channels, such as depthwise ones
    head: bool  # a layer that gives one number per class


def open_decided(
    config: TrainConfig, store: Store, loop: object = None, *, needs_weights: bool = True
) -> tuple[TrainConfig, Dataset]:
    """Return the options with everything that the images and the weights decide, and the images.

    The images are listed, or read from the documents in ``store`` if the run has stored them. With a ``loop`` of the
    user's own, open options keep their defaults: it may train another network in its own way. Raises StorageError if
    the images decide on weights that cannot be downloaded, unless nothing ``needs_weights``.
    """
    if not config.open_options or loop is not None or config.loop is not None:
        config = dataclasses.replace(with_preprocessing_of_weights(config), open_options=())
        return config, open_dataset(config, store)
    data = open_dataset(config, store)
    STARTUP.info("looking at the images …")
    config = with_preprocessing_of_weights(choose_options(config, data, needs_weights=needs_weights))
    return config, data.treated_as(config)


def with_preprocessing_of_weights(config: TrainConfig) -> TrainConfig:
    """Return the options, with the image size, cropping and normalisation of timm's weights if they are left open."""
    name = timm_name(config.model)
    if name is None or config.weights != DEFAULT:
        return config
    from raytrain.training.networks.model import preprocessing_of_weights  # imports torch and timm

    defaults = preprocessing_of_weights(name, config.channels)
    return dataclasses.replace(
        config, **{option: value for option, value in defaults.items() if getattr(config, option) is None}
    )


def choose_options(config: TrainConfig, data: Dataset, *, needs_weights: bool = True) -> TrainConfig:
    """Decide on the open options, and log at most five lines on what was chosen and why; return all options.

    None of the returned options is open. If the network has weights of the library, the mean and the deviation with
    which these were trained are among the options, unless the user gave others.

    Raises UsageError if there is no such network. If the caller ``needs_weights``, raises StorageError if weights that
    were chosen here cannot be downloaded.
    """
    config = close_replaced(config)
    # A cluster may have GPUs that are not known yet, so a run on one is taken as one on GPUs.
    on_cluster = config.address is not None or "RAY_ADDRESS" in os.environ
    on_cpu = config.device == "cpu" or (config.device == "auto" and not on_cluster and not gpus())

    # First the network, which decides on everything else.
    images = measure_images(config, data)
    network_options = choose_network(config, images)
    config = with_chosen(config, network_options)
    chosen_weights = "weights" in network_options and "weights" in config.open_options
    if needs_weights and chosen_weights and config.weights is not None:
        try:
            check_downloads(config.model, DEFAULT)
        except StorageError as error:
            raise StorageError(
                f"Photographs are best learned from weights of ImageNet, and {str(error).rstrip('.')}, with --model; "
                "or give --weights none to begin with random ones."
            ) from None

    # Then how it is trained.
    network = look_at_network(config, images)
    training_options = choose_training(config, images, network, on_cpu=on_cpu)
    for line in lines_of_choice(config, images, {**network_options, **training_options}):
        _log.warning("%s", line)
    config = dataclasses.replace(with_chosen(config, training_options), open_options=())

    # Images are normalised as those with which the library's weights were trained, unless the user gives a mean or a
    # deviation. Of a network of the user's own, or of grey images, nothing is known.
    has_library_weights = config.weights is not None and not names_own_function(config.model) and config.channels == 3
    if not has_library_weights or config.mean is not None or config.std is not None:
        return config
    mean, std = _MEAN, _STD
    if (name := timm_name(config.model)) is not None:
        from raytrain.training.networks.model import preprocessing_of_weights

        mean, std = (preprocessing_of_weights(name, config.channels)[key] for key in ("mean", "std"))
    return dataclasses.replace(config, mean=mean, std=std)


def measure_images(config: TrainConfig, data: Dataset) -> Images:
    """Return the properties of the training images.

    ``side`` is measured on 32 random ones, by their headers; 224 if none of them can be read.
    """
    counts = data.train.class_counts()
    chosen = data.train.select(np.sort(data.train.random_order(config.seed)[:_NUM_MEASURED]))
    sides: list[int] = []
    for content in read_contents(data.train_store, chosen):
        try:
            header = read_header(require_bytes(content))
        except BadImage:
            continue  # the run itself reports bad images
        sides.append(min(header.width, header.height))
    means = np.array(data.mean)
    return Images(
        number=len(data.train),
        classes=len(data.train.classes),
        side=int(np.median(sides)) if sides else _LARGEST_SIDE,
        is_grey=config.channels == 1 or float(np.ptp(means)) < 1e-4,  # equal channels have equal means
        imbalance=float(counts.max() / max(1, counts.min())),
        multi_label=config.multi_label,
    )


def choose_network(config: TrainConfig, images: Images) -> dict[str, Any]:
    """Return what fits the images: the network, its initial weights and the size of its input, by option.

    Options that the user gave may be among them; :func:`with_chosen` leaves those out.
    """
    model_is_open, weights_are_open = "model" in config.open_options, "weights" in config.open_options
    # Small images need a network of their own. Weights that the user gives are of a network that the user knows, which
    # without --model is the recipe's default. That also learns photographs without weights.
    is_small = config.weights is None and _is_small(config, images)
    if model_is_open and not weights_are_open and not is_small:
        return {"model": config.model, "image_size": config.image_size or _size_for(images)}
    if model_is_open and is_small:
        recipe = cifar10_fast()
        return {"model": recipe.model, "weights": None, "image_size": recipe.image_size}
    chosen: dict[str, Any] = {"image_size": config.image_size or _size_for(images)}
    if model_is_open:
        chosen["model"] = _PRETRAINED
    # The library has weights for photographs. timm fits them to grey images, too, while torchvision's networks get
    # another first layer for grey images, which the weights do not fit.
    model = chosen.get("model", config.model)
    library_fits = not names_own_function(model) and (config.channels == 3 or timm_name(model) is not None)
    has_weights = library_fits and not _is_small(config, images)  # torchvision has some for all of its networks
    if has_weights and (name := timm_name(model)) is not None:
        from timm.models import get_pretrained_cfg

        pretrained = get_pretrained_cfg(name)
        has_weights = pretrained is not None and bool(pretrained.has_weights)
    chosen["weights"] = DEFAULT if has_weights else None
    return chosen


def choose_training(config: TrainConfig, images: Images, network: Network, *, on_cpu: bool) -> dict[str, Any]:
    """Return how the network of ``config`` is best trained: values of all other options that may be open, by option.

    Options that the user gave may be among them; :func:`with_chosen` leaves those out. They are taken into account: the
    learning rate, for instance, fits the batch size that was given.
    """
    chosen: dict[str, Any] = {"channels_last": True}
    # Depthwise convolutions in bfloat16 took 2.4 times as long as in float32, where dense ones took half the time.
    if on_cpu and network.grouped:
        chosen["precision"] = "float32"
    # The learning rate of cifar10-fast is for SGD. With another optimizer, its network is trained like any other.
    is_sgd = _given(config, "optimizer", "sgd") == "sgd"
    if config.model == cifar10_fast().model and config.weights is None and is_sgd:
        chosen |= _small_images(config, images, on_cpu=on_cpu)
    elif config.weights is not None:
        chosen |= _fine_tuning(config, images, network, on_cpu=on_cpu)
    else:
        chosen |= _from_scratch(config, images, network, on_cpu=on_cpu)
    if not _given(config, "momentum", chosen.get("momentum", config.momentum)):
        chosen["nesterov"] = False

    # Grey images may be digits or letters, which are not mirrored; photographs are seldom grey. All images are shifted
    # by up to a sixteenth of their size in the first epoch.
    first_size, _ = first_and_full_size(config.image_size or _size_for(images))
    chosen["flip"] = _given(config, "flip", "none" if images.is_grey else chosen.get("flip", "random"))
    chosen["translate"] = min(first_size) // 16
    if chosen["flip"] != "none":
        chosen["test_views"] = ("flip",)
    if images.multi_label:
        chosen["label_smoothing"] = 0.0
    elif images.imbalance >= _MIN_IMBALANCE and config.sampling == "uniform":  # balanced sampling needs no weights
        chosen["class_weights"] = "balanced"
    return chosen


def _fine_tuning(config: TrainConfig, images: Images, network: Network, *, on_cpu: bool) -> dict[str, Any]:
    """Return the options that train a network with weights: first its head alone, then all layers at a low rate."""
    batch_size = _given_number(config, "batch_size", 32)
    # A CPU gets fewer epochs: 4,000 photographs of 128 pixels take four to five minutes on two cores. With two more
    # epochs, their accuracy was 0.831 instead of 0.815.
    if on_cpu:
        num_epochs = _epochs(images, num_seen=15_000, fewest=4, most=20)
    else:
        num_epochs = _epochs(images, num_seen=100_000, fewest=5, most=20)
    epochs = _given_number(config, "epochs", 1 + num_epochs)  # with one in which the head learns alone
    # With AdamW at 5e-4, the accuracy on the training images fell from 0.75 to 0.58 when all layers began to learn.
    # SGD's rate is that of PyTorch's tutorial on transfer learning, 0.001 for batches of 4.
    optimizer = _given(config, "optimizer", "adamw")
    rate = (1.5e-4 if network.batch_norm else 1e-4) * math.sqrt(batch_size / 32)
    if optimizer == "sgd":
        rate = 0.001 * batch_size / 4
    return {
        "epochs": epochs,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "learning_rate": float(f"{rate:.2g}"),
        "weight_decay": 5e-4 if optimizer == "sgd" else 0.05,
        "decay_norms_and_biases": False,
        "schedule": "cosine",
        "warmup_epochs": 0.5,
        "label_smoothing": 0.1,
        **({"head_epochs": 1 if epochs > 1 else 0, "head_learning_rate_factor": 10.0} if network.head else {}),
        **({"batch_norm": "frozen"} if network.batch_norm else {}),
    }


def _small_images(config: TrainConfig, images: Images, *, on_cpu: bool) -> dict[str, Any]:
    """Return the options of cifar10-fast; with fewer images, batches are smaller and epochs more."""
    recipe = cifar10_fast()
    # The batch size is the power of two with which an epoch has about 50 steps, as in the recipe. The learning rate is
    # proportional to it. The warm-up takes 23 % of the epochs, also as in the recipe.
    batch_size = _given_number(
        config, "batch_size", min(1024, max(64, 2 ** round(math.log2(max(images.number, 1) / 50))))
    )
    names = ("optimizer", "weight_decay", "momentum", "nesterov", "schedule", "label_smoothing", "ema_decay", "flip")
    num_epochs = _epochs(images, num_seen=200_000 if on_cpu else 800_000, fewest=16, most=40)
    epochs = _given_number(config, "epochs", num_epochs)
    return {
        **{name: getattr(recipe, name) for name in names},
        "batch_size": batch_size,
        "learning_rate": float(f"{cast(float, recipe.learning_rate) * batch_size / 1024:.2g}"),
        "epochs": epochs,
        "warmup_epochs": float(f"{0.23 * epochs:.2g}"),
        "evaluate_every": max(1, epochs // 10),
    }


def _from_scratch(config: TrainConfig, images: Images, network: Network, *, on_cpu: bool) -> dict[str, Any]:
    """Return the options of a network with random initial weights."""
    batch_size = _given_number(config, "batch_size", 64)
    num_epochs = _epochs(images, num_seen=100_000 if on_cpu else 1_000_000, fewest=10, most=100)
    epochs = _given_number(config, "epochs", num_epochs)
    optimizer = _given(config, "optimizer", "sgd" if network.batch_norm else "adamw")
    is_sgd = optimizer == "sgd"
    rate = 0.05 * batch_size / 64 if is_sgd else 5e-4 * math.sqrt(batch_size / 64)
    return {
        "epochs": epochs,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "nesterov": is_sgd,
        "learning_rate": float(f"{rate:.2g}"),
        "weight_decay": 5e-4 if is_sgd else 0.05,
        "decay_norms_and_biases": False,
        "schedule": "cosine",
        "warmup_epochs": min(2.0, epochs / 5),
        "label_smoothing": 0.1,
    }


def look_at_network(config: TrainConfig, images: Images) -> Network:
    """Build the network of ``config``, and return its properties. Raises UsageError if there is no such network."""
    import torch

    from raytrain.training.networks.model import build_model
    from raytrain.training.networks.transfer import find_heads

    size = first_and_full_size(config.image_size or _size_for(images))[1]
    model: nn.Module = build_model(
        config.model, images.classes, config.channels, config.seed, size, config.model_options
    )
    layers = list(model.modules())
    return Network(
        batch_norm=any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in layers),  # pyright: ignore
        grouped=any(isinstance(layer, torch.nn.Conv2d) and layer.groups > 1 for layer in layers),
        head=bool(find_heads(model, images.classes)),
    )


def lines_of_choice(config: TrainConfig, images: Images, chosen: Mapping[str, Any]) -> list[str]:
    """Return at most five lines that say which of the open options were ``chosen``, as flags, and why.

    ``config`` has the chosen network already. Values that are the recipe's defaults anyway are left out, but that of
    --model; if all are, there are no lines.
    """
    defaults = _recipe_auto()
    sizes = f"{images.number:,} training images of {images.classes:,} classes, about {images.side} pixels"
    lines = [f"Chosen for {sizes}; any flag that you give stays:"]
    for subject, names in CHOICES.items():
        shown = [
            name
            for name in names
            if name in chosen
            and name in config.open_options
            and (name == "model" or chosen[name] != getattr(defaults, name))
        ]
        if shown:
            flags = " ".join(flag_with_value(name, chosen[name]) for name in shown)
            lines.append(f"  {flags}: {_reason(subject, config, images, shown)}")
    return lines if len(lines) > 1 else []


def _reason(subject: str, config: TrainConfig, images: Images, shown: Collection[str]) -> str:
    """Return why the options ``shown`` of a subject of CHOICES were chosen; options that the user gave have none."""
    match subject:
        case "network":
            if "weights" not in config.open_options:
                return "what fits them" if config.weights is None else "what fits them and the given weights"
            if config.weights is not None:
                return "they are photographs, and the weights know ImageNet's"
            if names_own_function(config.model):
                return "no library has weights for this network"
            if _is_small(config, images):
                return "they are small, and ImageNet's photographs show larger things"
            if config.channels != 3 and timm_name(config.model) is None:
                return "the weights of ImageNet are for colour images"
            return "no library has weights for this network"
        case "rates":
            if config.weights is not None:
                little = " and change little" if "learning_rate" in shown else ""
                has_head = {"head_epochs", "head_learning_rate_factor"} <= set(shown)
                return f"the weights know much{little}" + ("; a new head learns first and faster" if has_head else "")
            rate = ": a high rate" if "learning_rate" in shown else ", at a rate" if "schedule" in shown else ""
            return f"all is to be learned{rate}" + (" that falls to 0" if rate and "schedule" in shown else "")
        case "length":
            if "epochs" in config.open_options:
                return f"these are enough steps for {images.number:,} images"
            return f"they suit {images.number:,} images and the given --epochs"
        case _:
            reason = "a class looks the same after these changes"
            if "class_weights" in shown:
                reason += f", and the largest class has {images.imbalance:.0f} times the images of the smallest"
            return reason


def flag_with_value(name: str, value: object) -> str:
    """Return an option as a user types it.

    Example: ``flag_with_value("image_size", (128, 128)) == "--image-size 128 128"``
    """
    if isinstance(value, bool):
        return flag(name) if value else flag(name).replace("--", "--no-", 1)
    words = value if isinstance(value, tuple) else (f"{value:g}" if isinstance(value, float) else value,)
    return f"{flag(name)} {' '.join(map(str, cast('tuple[Any, ...]', words)))}"


def with_chosen(config: TrainConfig, chosen: Mapping[str, Any]) -> TrainConfig:
    """Return the options with the values of ``chosen`` for those that are open; what the user gave stays."""
    taken = {name: value for name, value in chosen.items() if _is_open(config, name)}
    return dataclasses.replace(config, **taken)


def _is_small(config: TrainConfig, images: Images) -> bool:
    """Return whether the network gets images that are too small for features of photographs.

    The network of the recipe cifar10-fast is made for such images, whatever size they have.
    """
    side = images.side if config.image_size is None else min(config.full_image_size)
    return config.model == cifar10_fast().model or side < PHOTOGRAPH_SIDE


def _size_for(images: Images) -> Size:
    """Return the size of the network's input: the size of the files, rounded down to a multiple of 32, at most 224."""
    side = min(_LARGEST_SIDE, max(32, images.side // 32 * 32))
    return side, side


def _epochs(images: Images, *, num_seen: int, fewest: int, most: int) -> int:
    """Return the number of epochs in which about ``num_seen`` images are seen, from ``fewest`` to ``most``."""
    return min(most, max(fewest, round(num_seen / max(1, images.number))))


def close_replaced(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with only those options open that nobody has given, and that no code has replaced.

    Example: ``"epochs" not in close_replaced(dataclasses.replace(auto(), epochs=3)).open_options``
    """
    left_open = tuple(name for name in config.open_options if _is_open(config, name))
    return dataclasses.replace(config, open_options=left_open)


def _is_open(config: TrainConfig, name: str) -> bool:
    """Return True if the option has no value yet but the recipe's: neither the user nor a sweep has given one."""
    return name in config.open_options and getattr(config, name) == getattr(_recipe_auto(), name)


def _given(config: TrainConfig, name: str, chosen: str | float) -> Any:
    """Return the value that the user or a sweep has given for an option, or ``chosen`` if none has."""
    return chosen if _is_open(config, name) else getattr(config, name)


def _given_number(config: TrainConfig, name: str, chosen: int) -> int:
    """Return the number that was given for an option, such as 32 for 32/worker, or ``chosen`` if none was."""
    return int(str(_given(config, name, chosen)).partition("/")[0])
