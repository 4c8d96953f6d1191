"""Files of weights as other trainers save them, also with other names, are read for `--weights`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.training.networks.transfer import GivenWeights, initial_model, initial_weights, notes_on_weights

Weights = dict[str, Tensor]
CLASSES = ("a", "b", "c")


class Network(nn.Module):
    """A small network with the kinds of layers that others have, too."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv_stem = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.attention = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("query", "key", "value")})
        self.fc = nn.Linear(4, num_classes)


class Wrapped(nn.Module):
    """The same network as a part of another one, with a head of its own."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.model = Network(num_classes)
        self.model.fc = nn.Identity()  # type: ignore[assignment]
        self.head = nn.Linear(4, num_classes)


def options(network: str, folder: Path) -> TrainConfig:
    return TrainConfig(model=f"{__name__}:{network}", weights=str(folder / "weights.pt"), batch_size=1)


def read(content: Any, folder: Path, network: str = "Network") -> GivenWeights:
    """Save ``content``, and return the weights that a run of ``network`` reads from it."""
    torch.save(content, folder / "weights.pt")
    weights = initial_weights(options(network, folder), CLASSES, first_step=0)
    assert weights is not None
    return weights


def prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + name: value for name, value in weights.items()}


@pytest.mark.parametrize(
    "save",
    [
        lambda weights: weights,
        lambda weights: {"state_dict": weights, "epoch": 3, "optimizer": {"state": {}}},
        lambda weights: {"model": weights, "args": {"lr": 0.1}},
        lambda weights: {"model_ema": weights, "epoch": 3},
        lambda weights: {"student": weights, "hyper_parameters": {}, "callbacks": {}},
        lambda weights: {**weights, "args": {}},
        lambda weights: {**weights, "epoch": 3},
        lambda weights: {"model_state_dict": prefixed("module.")(weights)},
        prefixed("module."),
        prefixed("_orig_mod."),
        prefixed("_orig_mod.module."),
        prefixed("module.backbone."),
        lambda weights: {"state_dict": prefixed("model.")(weights), "pytorch-lightning_version": "2.0"},
        lambda weights: {**prefixed("module.")(weights), "n_averaged": torch.tensor(7)},
        lambda weights: {name: value for name, value in weights.items() if "num_batches" not in name},
    ],
)
def test_weights_of_other_trainers_are_read(save: Callable[[Weights], Any], tmp_path: Path) -> None:
    weights = Network(3).state_dict()
    found = read(save(weights), tmp_path)
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    assert found.note is None


def test_a_network_whose_own_names_have_a_usual_prefix_reads_its_own_file(tmp_path: Path) -> None:
    weights = Wrapped(3).state_dict()
    assert read(weights, tmp_path, "Wrapped").keys() == weights.keys()


def test_the_backbone_of_another_network_is_read_and_what_is_left_is_said(tmp_path: Path) -> None:
    weights = Network(1000).state_dict()
    inside = read(weights, tmp_path, "Wrapped")
    assert inside.keys() == {f"model.{name}" for name in weights if "fc" not in name}
    assert inside.note is not None
    assert inside.note.endswith("2 of 14 tensors are not used, as the network has none such: fc.bias, fc.weight.")
    initial_model(options("Wrapped", tmp_path), 3, inside)

    of_lightning = prefixed("model.")(Network(3).state_dict()) | {"loss.weight": torch.ones(3)}
    outside = read({"state_dict": of_lightning}, tmp_path)
    assert outside.keys() == weights.keys()
    assert outside.note is not None
    assert "1 of 15 tensors are not used, as the network has none such: loss.weight." in outside.note


@pytest.mark.parametrize(
    "content",
    [
        {"student": Network(3).state_dict(), "teacher": Network(3).state_dict()},
        {**prefixed("student.")(Network(3).state_dict()), **prefixed("teacher.")(Network(3).state_dict())},
    ],
)
def test_two_sets_of_weights_are_refused(content: Any, tmp_path: Path) -> None:
    sentence = r"holds 2 state_dicts, student, teacher; save one|2 times, with student\., teacher\. before their names"
    with pytest.raises(UsageError, match=sentence):
        read(content, tmp_path)


# Names that have nothing in common with the network's.

OTHER_NAMES = {
    "conv_stem": "stem.0",
    "bn": "stem.1",
    "attention.query": "mix.q_proj",
    "attention.key": "mix.k_proj",
    "attention.value": "mix.v_proj",
    "fc": "classifier",
}


def renamed(names: dict[str, str], num_classes: int = 3) -> Weights:
    """Return weights of the network in the order of ``names``, of layers, under the new ones."""
    weights = Network(num_classes).state_dict()
    named = {}
    for layer, other in names.items():
        named |= {name.replace(layer, other): value for name, value in weights.items() if name.startswith(f"{layer}.")}
    return named


@pytest.mark.parametrize("num_classes", [3, 10])
def test_names_that_differ_are_matched_by_order_and_shape_and_said(num_classes: int, tmp_path: Path) -> None:
    weights = renamed(OTHER_NAMES, num_classes)
    found = read({"state_dict": weights}, tmp_path)
    state = initial_model(options("Network", tmp_path), 3, found).state_dict()
    for (name, value), other in zip(state.items(), weights.values(), strict=True):
        assert torch.equal(value, other) or (num_classes == 10 and name.startswith("fc."))
    (note, *_) = notes_on_weights(options("Network", tmp_path), CLASSES, found)
    number, last = (
        (14, "classifier.bias as fc.bias") if num_classes == 3 else (12, "mix.v_proj.bias as attention.value.bias")
    )
    assert note.endswith(
        f"the names differ, so {number} of the network's 14 tensors are taken by order and shape, from stem.0.weight "
        f"as conv_stem.weight to {last}."
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda _: renamed({name: OTHER_NAMES[name] for name in reversed(OTHER_NAMES)}),  # another order
        lambda _: renamed({**OTHER_NAMES, "attention.query": "mix.key", "attention.key": "mix.query"}),
        lambda weights: dict(sorted(weights.items())),  # as safetensors has them
        lambda weights: {**weights, "stem.0.weight": torch.zeros(4, 3, 5, 5)},  # another shape
        lambda weights: {**weights, "more.weight": torch.zeros(1)},
        lambda weights: {name.replace("stem.1.bias", "stem.1.beta"): value for name, value in weights.items()},
        lambda weights: {name.replace("q_proj.bias", "q.bias"): value for name, value in weights.items()},
    ],
)
def test_names_that_differ_are_left_alone_if_there_is_any_doubt(
    change: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    weights = change(renamed(OTHER_NAMES))
    found = read(weights, tmp_path)
    assert set(found) == set(weights)
    sentence = (
        r"they have no conv_stem\.weight \(4×3×3×3\), bn\.weight \(4\), bn\.bias \(4\) and \d+ more; they have .*, "
        r"which the network lacks; give weights of the same network, or, if it is the same and only the names differ, "
        r'save them under the network\'s, such as torch\.save\(\{"conv_stem\.weight": weights\["'
    )
    with pytest.raises(UsageError, match=sentence):
        initial_model(options("Network", tmp_path), 3, found)


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], {"state_dict": {"a": "b"}}])
def test_files_without_weights_are_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match="holds no state_dict"):
        initial_weights(TrainConfig(weights=str(tmp_path / "weights.pt"), batch_size=1), ("a", "b"), first_step=0)
