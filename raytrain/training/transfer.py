"""Transfer learning: a network begins with weights from elsewhere, some layers stay as they are, and its head learns faster."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.storage.open import open_store
from raytrain.training import batchnorm
from raytrain.training.checkpoint import identity_of
from raytrain.training.model import build_model, pretrained
from raytrain.training.user_function import hint

DEFAULT = "DEFAULT"


def initial_weights(config: TrainConfig, classes: Sequence[str], first_step: int) -> dict[str, Tensor] | None:
    """What ``--weights`` names, on the CPU, by the names of ``config.model``'s parameters and buffers.

    ``DEFAULT`` are torchvision's own. A file or s3:// object holds a state_dict or is a checkpoint of a run; no code that stands
    in it is run. A checkpoint whose classes are not ``classes`` comes without its head. None where the seed decides, or a
    checkpoint: a run that goes on after ``first_step`` steps needs them no more. Raises UsageError where there are no such
    weights, StorageError where they are out of reach.
    """
    if config.weights is None or first_step:
        return None
    if config.weights == DEFAULT:
        # Built without the auxiliary classifier that inception_v3's weights come with.
        return {name: value for name, value in pretrained(config.model).state_dict().items() if not name.startswith("AuxLogits.")}
    weights, learned = _read(config.weights)
    if learned is None or learned == tuple(classes):
        return weights
    head = _of_head(build_model(config.model, len(learned), config.channels, config.seed), len(learned))
    return {name: value for name, value in weights.items() if name not in head}


def initial_model(config: TrainConfig, num_classes: int, weights: Mapping[str, Tensor] | None) -> nn.Module:
    """The network that ``config`` names, with the weights that its seed decides or, where there are any, with ``weights``.

    A head of another shape, or one that ``weights`` lack, stays as the seed decides. Raises UsageError that names the first
    difference where anything else does not match, and what :func:`build_model` raises.
    """
    model = build_model(config.model, num_classes, config.channels, config.seed)
    if weights is None:
        return model
    own = model.state_dict()
    of_head = _of_head(model, num_classes)
    if any(name not in weights or weights[name].shape != own[name].shape for name in of_head):
        weights = {**weights, **{name: own[name] for name in of_head}}
    if difference := _difference(weights, own):
        raise UsageError(f"--weights {config.weights} do not fit --model {config.model}: {difference}; give weights of the same network.")
    model.load_state_dict(weights)
    return model


def find_head(model: nn.Module, num_classes: int) -> str | None:
    """Name of the layer that gives the logits, whatever the network calls it; None where it has no such layer.

    That is the last fully connected layer or convolution with ``num_classes`` outputs, in the order in which layers were made.
    """
    sizes = {name: _num_outputs(layer) for name, layer in model.named_modules()}
    return next((name for name in reversed(sizes) if sizes[name] == num_classes), None)


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Keep the layers ``names`` of ``model``, with all that is in them, as they are while the rest is trained.

    Their parameters get no gradient, and their batch norm normalises with its running statistics, which stay as they are, also
    after ``model.train()``. Raises UsageError where there is no such layer, or nothing left to train.
    """
    layers = dict(model.named_modules())
    for name in names:
        if name not in layers:
            there_are = ", ".join(child for child, _ in model.named_children())
            raise UsageError(f"--freeze {name}: the network has no such layer{hint(name, list(layers))}; at its top are {there_are}.")
        layers[name].requires_grad_(False)
        batchnorm.freeze(layers[name])
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"--freeze {' '.join(names)} leaves no layer to train; freeze fewer of them.")


def parameter_groups(model: nn.Module, num_classes: int, learning_rate: float, head_factor: float) -> list[dict[str, Any]]:
    """What an optimizer is given: the parameters that learn, those of the head apart where their learning rate is multiplied.

    Raises UsageError where there is no head to be found.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if head_factor == 1:
        return [{"params": learning}]
    head = find_head(model, num_classes)
    if head is None:
        raise UsageError(
            f"--head-learning-rate-factor is {head_factor:g}, and the network has no fully connected layer or convolution with "
            f"{num_classes} outputs, one a class; leave it at 1."
        )
    of_head = {id(parameter) for parameter in model.get_submodule(head).parameters()}
    body = [parameter for parameter in learning if id(parameter) not in of_head]
    fast = [parameter for parameter in learning if id(parameter) in of_head]
    return [group for group in ({"params": body}, {"params": fast, "lr": learning_rate * head_factor}) if group["params"]]


def _read(place: str) -> tuple[dict[str, Tensor], tuple[str, ...] | None]:
    """The weights, and the classes that they were trained for; None where they are not a run's."""
    folder, slash, name = place.rpartition("/")
    try:
        data = open_store(folder + slash or ".").get(name)
    except FileNotFoundError:
        raise UsageError(f"--weights {place}: there is no such file; give {DEFAULT}, a file or an s3:// object.") from None
    content = _loaded(data)
    weights = content["state"].get("model") if isinstance(content.get("state"), dict) else content
    if not weights or not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UsageError(
            f"--weights {place} holds no state_dict (it is damaged, or was saved with code in it, which is never run); "
            "save one with torch.save(model.state_dict(), FILE)."
        )
    return weights, identity_of(content).classes if isinstance(content.get("identity"), dict) else None


def _loaded(data: bytes) -> dict[str, Any]:
    """What a file holds, without running any code that stands in it; nothing where that is no dictionary."""
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # of many kinds, with advice to load it all the same
        return {}
    return content if isinstance(content, dict) else {}


def _difference(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """The first name or shape in which weights differ from those of the network."""
    for name, value in own.items():
        if name not in given:
            return f"they have no {name}"
        if given[name].shape != value.shape:
            return f"their {name} is {_shown(given[name])}, and the network's is {_shown(value)}"
    unknown = next((name for name in given if name not in own), None)
    return unknown and f"they have {unknown}, and the network has not"


def _shown(value: Tensor) -> str:
    return "×".join(map(str, value.shape)) or "a number"


def _of_head(model: nn.Module, num_classes: int) -> list[str]:
    """Names of what the head learns."""
    head = find_head(model, num_classes)
    return [] if head is None else [f"{head}.{name}" for name, _ in model.get_submodule(head).named_parameters()]


def _num_outputs(layer: nn.Module) -> int | None:
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return layer.out_channels if isinstance(layer, nn.Conv2d) else None
