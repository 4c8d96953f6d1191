"""Transfer learning: initial weights from a file or a run, frozen layers, and a head that learns faster.

Files of weights differ: they hold a plain state_dict, one inside of a dictionary, or one with other names (see
:mod:`raytrain.training.networks.weight_names`). :func:`initial_weights` finds the tensors and gives them the names of
the network, if it can. :func:`initial_model` then refuses tensors that do not fit, except for those of the head, which
is usually for other classes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.config import TrainConfig
from raytrain.data.labels.listing import first_names
from raytrain.errors import UsageError, did_you_mean, some_of
from raytrain.training.checkpoint import checkpoint_in
from raytrain.training.exact import batchnorm
from raytrain.training.networks.model import build_pretrained, model_of
from raytrain.training.networks.weight_names import named_as_in_network
from raytrain.training.weights_source import (
    DEFAULT,
    SUFFIX,
    check_archive,
    from_safetensors,
    no_state_dict,
    read_weights_file,
)

ALL = "all"  # in place of a layer's name for ``--freeze``: every layer but the head
_WEIGHTS_IN = ("state_dict", "model", "model_state_dict", "model_state", "net", "network", "weights", "params")
"""Where training scripts, timm, torchvision's references and Lightning keep the weights in their files."""
_SCALE_OF_NEW_HEAD = 0.01  # not 0: some heads end with a ReLU, which would give no gradient
_CLASSES_IN = ("classes", "class_names", "class_to_idx")
"""Where training scripts keep the names of the classes beside the weights."""


class GivenWeights(dict[str, Tensor]):
    """Weights from outside, by the names of the network's parameters and buffers, as they are sent to the workers.

    ``name_classes``: their file names the class of each output of the head. ``note`` says how they got these names,
    if some were guessed.
    """

    def __init__(self, weights: Mapping[str, Tensor], name_classes: bool, note: str | None = None) -> None:
        super().__init__(weights)
        self.name_classes = name_classes
        self.note = note


def initial_weights(config: TrainConfig, classes: Sequence[str], first_step: int) -> GivenWeights | None:
    """Return the weights that ``--weights`` names, on the CPU, by the names of the network's parameters and buffers.

    ``DEFAULT`` means the weights that torchvision or timm has for it. A file, an s3:// object or hf://owner/name[/file]
    holds a state_dict, written by torch.save or as safetensors, or is a checkpoint of a run; code in it is never run.
    If a file says that it is for other classes than ``classes``, or for another order of them, its head is left out.
    If its names differ from the network's, it is used only if it is certain which tensor is which.

    Returns None if the seed decides the weights, or a checkpoint does: a run that resumes after ``first_step`` steps
    needs no initial weights. Raises UsageError if there are no such weights, StorageError if they are out of reach.

    Example::

        weights = initial_weights(config, classes, first_step=0)
        model = initial_model(config, len(classes), weights)
    """
    if config.weights is None or first_step:
        return None
    if config.weights == DEFAULT:
        weights = build_pretrained(config.model, config.channels, config.full_image_size).state_dict()
        # Networks are built without an auxiliary classifier here, but the weights of inception_v3 have one.
        plain = {name: value for name, value in weights.items() if not name.startswith("AuxLogits.")}
        return GivenWeights(plain, name_classes=False)
    weights, classes_of_file = _read_weights(config.weights)

    # Find the head in a network with as many outputs as the file has classes: layers are found by their outputs.
    num_outputs = len(classes if classes_of_file is None else classes_of_file)
    model = model_of(config, num_outputs)
    head = _head_weights(model, num_outputs)
    weights, note = named_as_in_network(weights, model.state_dict(), head, f"--weights {config.weights}")
    if classes_of_file not in (None, tuple(classes)):
        weights = {name: value for name, value in weights.items() if name not in head}
    return GivenWeights(weights, name_classes=classes_of_file is not None, note=note)


def _read_weights(location: str) -> tuple[dict[str, Tensor], tuple[str, ...] | None]:
    """Return the weights in the file at ``location``, and the classes that they were trained for, None if unknown."""
    name, data = read_weights_file(location)
    weights: Any
    if name.endswith(SUFFIX):
        weights, classes = from_safetensors(data)
    else:
        try:
            check_archive(data)
        except ValueError as error:
            raise UsageError(
                f"--weights {location} is not read, because {error}; give a whole file that was not compressed."
            ) from None
        try:
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception:  # errors of many kinds, some of which advise to run the code in the file
            content = None
        checkpoint = checkpoint_in(content)
        weights = checkpoint.weights if checkpoint else _find_state_dict(content, location)
        classes = checkpoint.identity.classes if checkpoint else _find_classes(content)
    if not weights or not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise no_state_dict(location)
    return weights, classes


def _find_state_dict(content: Any, location: str) -> dict[str, Tensor]:
    """Return the weights in the ``content`` of another trainer's file, by its own names; empty if there are none.

    They may be nested in dictionaries of usual names. Without such a name, the only dictionary of tensors in one is
    taken, or else the tensors that stand among other values. Raises UsageError if there are several dictionaries.
    """
    # Descend until all values are tensors: a file may hold {"model": {"state_dict": ...}}.
    while isinstance(content, Mapping) and not _holds_only_tensors(content):
        inner = next((content[name] for name in _WEIGHTS_IN if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            state_dicts = {name: value for name, value in content.items() if _holds_only_tensors(value) and value}
            if len(state_dicts) > 1:
                raise UsageError(
                    f"--weights {location} holds {len(state_dicts)} state_dicts, "
                    f"{some_of(list(map(str, state_dicts)))}; save one of them with torch.save."
                )
            tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
            inner = next(iter(state_dicts.values()), tensors)
        content = inner
    if not isinstance(content, Mapping):
        return {}
    return {name: value for name, value in content.items() if name != "n_averaged"}  # of torch's AveragedModel


def _holds_only_tensors(content: Any) -> bool:
    """Return whether ``content`` is a dictionary of tensors and nothing else, as a state_dict is."""
    return isinstance(content, Mapping) and all(isinstance(value, Tensor) for value in content.values())


def _find_classes(content: Any) -> tuple[str, ...] | None:
    """Return the classes that another trainer has written beside the weights, in the order of the outputs, or None.

    They are a list of names, or a dictionary such as torchvision's class_to_idx, from each name to its output.
    """
    for key in _CLASSES_IN:
        classes: Any = content.get(key) if isinstance(content, Mapping) else None
        if isinstance(classes, Mapping) and sorted(map(str, classes.values())) == sorted(map(str, range(len(classes)))):
            by_index = sorted(classes.items(), key=lambda item: int(item[1]))
            classes = [class_name for class_name, _ in by_index]
        if isinstance(classes, (list, tuple)) and classes and all(isinstance(name, str) for name in classes):
            return tuple(classes)
    return None


def notes_on_weights(config: TrainConfig, classes: Sequence[str], weights: Mapping[str, Tensor] | None) -> list[str]:
    """Return notes on a run's initial weights: on guessed names, and on a kept head whose classes nobody has named.

    Without :class:`GivenWeights` there are no notes: the seed or a checkpoint has decided the weights.
    """
    if not isinstance(weights, GivenWeights):
        return []
    notes = [weights.note] if weights.note else []
    if weights.name_classes:
        return notes
    model = model_of(config, len(classes))
    expected = model.state_dict()
    head = _head_weights(model, len(classes))
    if head and all(name in weights and weights[name].shape == expected[name].shape for name in head):
        notes.append(
            f"--weights {config.weights}: the head is kept, since it has {len(classes):,} outputs, one per class, and "
            "the weights do not name their classes: the outputs are taken in this order: "
            f"{first_names(tuple(classes))}. If they were trained in another one, rename the classes so that they sort "
            "like that."
        )
    return notes


def initial_model(config: TrainConfig, num_classes: int, weights: Mapping[str, Tensor] | None) -> nn.Module:
    """Return the network that ``config`` names, with ``weights``, or with weights that depend on the seed if None.

    If the head in ``weights`` has another shape or is missing, the seed decides the head. Raises UsageError with the
    differences if anything else does not match, and what :func:`model_of` raises.
    """
    model = model_of(config, num_classes)
    if weights is None:
        return model
    # The head is new if the weights are for other classes. All other weights must fit, because otherwise the run would
    # train another network than the user believes.
    expected = model.state_dict()
    head = _head_weights(model, num_classes)
    if any(name not in weights or weights[name].shape != expected[name].shape for name in head):
        # A head that learns alone begins near 0, where all classes are equally likely. Otherwise some networks of timm,
        # made for a thousand classes, have a loss of 8 for three classes at first, and need the epoch to unlearn it.
        scale = _SCALE_OF_NEW_HEAD if config.head_epochs else 1
        weights = {**weights, **{name: expected[name] * scale for name in head}}
    if difference := _difference(weights, expected):
        raise UsageError(f"--weights {config.weights} do not fit --model {config.model}: {difference}.")
    model.load_state_dict(weights)
    return model


def _difference(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Return how the names and shapes of ``weights`` differ from ``expected``, with advice, as text; None if equal."""
    missing = [name for name in expected if name not in weights]
    unknown = [name for name in weights if name not in expected]
    reshaped = [name for name, value in expected.items() if name in weights and weights[name].shape != value.shape]
    differences: list[str] = []
    advice = "give weights of the same network"
    if missing:
        differences.append(f"they have no {some_of([f'{name} ({_shape_text(expected[name])})' for name in missing])}")
    if unknown:
        shown = some_of([f"{name} ({_shape_text(weights[name])})" for name in unknown])
        differences.append(f"they have {shown}, which the network lacks")
    if reshaped:
        first, *further = reshaped
        shapes = f"their {first} is {_shape_text(weights[first])}, and the network's is {_shape_text(expected[first])}"
        differences.append(f"{shapes}; the shapes of {some_of(further)} differ, too" if further else shapes)
    if missing and unknown:
        advice += (
            ", or, if it is the same and only the names differ, save them under the network's, such as "
            f'torch.save({{"{missing[0]}": weights["{unknown[0]}"], …}}, FILE)'
        )
    return "; ".join([*differences, advice]) if differences else None


def _shape_text(value: Tensor) -> str:
    """Return the shape of a tensor as text, such as 64×3×7×7."""
    return "×".join(map(str, value.shape)) or "a number"


def _head_weights(model: nn.Module, num_classes: int) -> list[str]:
    """Return the names of the head's parameters and buffers; none if there is no head."""
    heads = find_heads(model, num_classes)
    return [f"{head}.{name}" for head in heads for name in model.get_submodule(head).state_dict()]


def find_heads(model: nn.Module, num_classes: int) -> list[str]:
    """Return the names of the layers that give the logits, whatever the network calls them; empty if there are none.

    Networks of timm say which they are: usually one layer, two if they were distilled. In others it is the last fully
    connected layer or convolution with ``num_classes`` outputs, in the order in which the layers were made.

    Example: ``find_heads(torchvision.models.resnet18(), 1000) == ["fc"]``
    """
    if callable(get_classifier := getattr(model, "get_classifier", None)):
        classifier: Any = get_classifier()
        heads = classifier if isinstance(classifier, tuple) else (classifier,)
        return [name for name, layer in model.named_modules() if any(layer is head for head in heads)]
    names = [
        name
        for name, layer in model.named_modules()
        if (isinstance(layer, nn.Linear) and layer.out_features == num_classes)
        or (isinstance(layer, nn.Conv2d) and layer.out_channels == num_classes)
    ]
    return names[-1:]


def head_parameters(model: nn.Module, num_classes: int, option: str) -> set[Tensor]:
    """Return the parameters of the head, to which ``option`` applies, such as --head-epochs 1.

    Raises UsageError if the network has no head.
    """
    heads = find_heads(model, num_classes)
    if not heads:
        raise UsageError(
            f"{option} is about the head, and the network has no fully connected layer or convolution with "
            f"{num_classes} outputs, one per class; leave it out."
        )
    return {parameter for head in heads for parameter in model.get_submodule(head).parameters()}


def hold_body(model: nn.Module, num_classes: int) -> list[nn.Parameter]:
    """Exclude all layers but the head from training, and return their parameters, which :func:`release` takes.

    Parameters that do not learn anyway are not among them. Layers without parameters of the head are in evaluation mode
    until then, so that batch norm normalises with its running statistics. Raises UsageError if there is no head.
    """
    head = head_parameters(model, num_classes, "--head-epochs")
    held = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in head]
    for parameter in held:
        parameter.requires_grad_(False)
    for layer in model.modules():
        if head.isdisjoint(layer.parameters()):
            layer.train(False)
    return held


def release(model: nn.Module, held: Sequence[nn.Parameter]) -> None:
    """Let the parameters that :func:`hold_body` has returned be trained again, with all layers in training mode.

    They begin without gradients.
    """
    for parameter in held:
        parameter.requires_grad_(True)
        parameter.grad = None
    model.train()


def freeze(model: nn.Module, names: Sequence[str], num_classes: int) -> None:
    """Exclude the layers ``names`` of ``model``, and all layers in them, from training; ``all`` are all but the head.

    Their parameters get no gradient. Their batch norm normalises with its running statistics, which don't change, also
    after ``model.train()``. Raises UsageError if there is no such layer, or if nothing is left to train.

    Example: ``freeze(model, ["conv1", "layer1"], num_classes=10)``
    """
    layers = dict(model.named_modules())
    if ALL in names:
        heads = [layers[head] for head in find_heads(model, num_classes)]
        if not heads:
            raise UsageError(
                "--freeze all leaves the head to train, and the network has no fully connected layer or convolution "
                f"with {num_classes} outputs, one per class; name the layers to freeze."
            )
        layers_of_head = {layer for head in heads for layer in head.modules()}
        model.requires_grad_(False)
        for layer in layers_of_head:
            layer.requires_grad_(True)
        # Batch norm in a layer that contains the head is not frozen with it: the layers in it are visited one by one.
        for layer in model.modules():
            if layers_of_head.isdisjoint(layer.modules()):
                batchnorm.freeze(layer)

    # Freeze the named layers, which may be in the head, too.
    for name in (name for name in names if name != ALL):
        if name not in layers:
            top = ", ".join(child for child, _ in model.named_children())
            raise UsageError(
                f"--freeze {name}: the network has no such layer{did_you_mean(name, layers)}; its top layers are {top}."
            )
        layers[name].requires_grad_(False)
        batchnorm.freeze(layers[name])
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"--freeze {' '.join(names)} leaves no layer to train; freeze fewer of them.")
