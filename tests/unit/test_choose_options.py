"""What the recipe auto chooses from the images, what it says about it, and what stays as it was given."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from raytrain.config import TrainConfig
from raytrain.config.option_marks import Mark
from raytrain.config.options import options_with
from raytrain.errors import UsageError
from raytrain.launch.choose_options import (
    CHOICES,
    Images,
    Network,
    choose_network,
    choose_training,
    close_replaced,
    flag_with_value,
    lines_of_choice,
    with_chosen,
)
from raytrain.launch.resumed_options import resumed_options
from raytrain.recipes import auto

PHOTOGRAPHS = Images(number=3886, classes=5, side=128, is_grey=False, imbalance=1.4, multi_label=False)
CONVNET = Network(batch_norm=True, grouped=True, head=True)
LITE: dict[str, Any] = {"model": "timm:tf_efficientnet_lite0", "weights": "lite.pth"}


def chosen(
    images: Images, network: Network = CONVNET, *, on_cpu: bool = True, replaced: bool = False, **given: Any
) -> tuple[TrainConfig, list[str]]:
    """Return the options that are chosen for such images, and the lines that say so."""
    config = close_replaced(dataclasses.replace(auto(), **given) if replaced else auto(**given))
    of_network = choose_network(config, images)
    config = with_chosen(config, of_network)
    others = choose_training(config, images, network, on_cpu=on_cpu)
    return with_chosen(config, others), lines_of_choice(config, images, {**of_network, **others})


@pytest.mark.parametrize(
    ("images", "given", "expected"),
    [
        # Photographs: ImageNet's weights, the head first, and more epochs the fewer they are.
        ({}, {}, {"model": "efficientnet_b0", "weights": "DEFAULT", "image_size": (128, 128), "epochs": 5}),
        ({}, {}, {"optimizer": "adamw", "schedule": "cosine", "head_epochs": 1, "batch_norm": "frozen"}),
        ({}, {}, {"flip": "random", "translate": 8, "test_views": ("flip",), "label_smoothing": 0.1}),
        ({}, {}, {"channels_last": True, "precision": "float32", "class_weights": None}),
        ({"number": 388}, {}, {"epochs": 21}),
        ({"number": 100_000}, {}, {"epochs": 5}),
        ({"side": 100}, {}, {"image_size": (96, 96), "translate": 6}),
        ({"side": 1500}, {}, {"image_size": (224, 224)}),
        # Small images: the network of CIFAR-10, from scratch, with its rate for its batch.
        ({"side": 32, "number": 50_000}, {}, {"model": "raytrain.models:cifar10_fast", "weights": None}),
        ({"side": 32, "number": 50_000}, {}, {"batch_size": 1024, "learning_rate": 1.5, "epochs": 16}),
        ({"side": 32, "number": 5_000}, {}, {"batch_size": 128, "learning_rate": 0.19, "epochs": 40}),
        ({"side": 32}, {"weights": None}, {"model": "raytrain.models:cifar10_fast", "image_size": (32, 32)}),
        ({"side": 32}, {"model": "resnet18"}, {"model": "resnet18", "weights": None, "optimizer": "sgd"}),
        ({"side": 28, "is_grey": True}, {}, {"flip": "none", "test_views": ()}),
        # What the labels allow: rare classes weigh more, and several classes have no smoothing.
        ({"imbalance": 20.0}, {}, {"class_weights": "balanced"}),
        ({"imbalance": 20.0, "multi_label": True}, {}, {"class_weights": None, "label_smoothing": 0.0}),
        # What is given decides on the rest: a network without weights, another batch, weights of a known network.
        ({}, {"weights": None}, {"weights": None, "optimizer": "sgd", "head_epochs": 0, "batch_norm": "sync"}),
        ({}, {"model": "mine.py:net"}, {"weights": None, "optimizer": "sgd", "epochs": 26}),
        ({}, {"weights": "mine.pt"}, {"model": "resnet18", "weights": "mine.pt", "optimizer": "adamw"}),
        ({}, {"batch_size": 128}, {"batch_size": 128, "learning_rate": 3e-4}),
        ({}, {"epochs": 1}, {"epochs": 1, "head_epochs": 0}),
        ({"side": 32}, {"image_size": (128, 128)}, {"model": "efficientnet_b0", "image_size": (128, 128)}),
        # Another optimizer has a rate of its own, and SGD without momentum cannot look ahead along it.
        ({"side": 32}, {"optimizer": "adamw"}, {"nesterov": False, "learning_rate": 5e-4, "weight_decay": 0.05}),
        ({"side": 32}, {"momentum": 0.0}, {"optimizer": "sgd", "nesterov": False, "momentum": 0.0}),
        ({}, {"weights": None, "optimizer": "lion"}, {"nesterov": False, "weight_decay": 0.05}),
        ({}, {"optimizer": "sgd"}, {"weights": "DEFAULT", "learning_rate": 8e-3, "weight_decay": 5e-4}),
        # Images that must not be mirrored are not measured mirrored, and rare classes are balanced once.
        ({}, {"flip": "none"}, {"test_views": ()}),
        ({"imbalance": 20.0}, {"sampling": "balanced"}, {"class_weights": None}),
        ({}, {"image_size": "96..128"}, {"image_size": "96..128", "translate": 6}),
    ],
)
def test_the_images_decide_on_what_nobody_has_given(
    images: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    config, lines = chosen(PHOTOGRAPHS._replace(**images), **given)
    assert {name: getattr(config, name) for name in expected} == expected
    assert len(lines) <= 5 and not any(
        flag_with_value(name, value) in "\n".join(lines) for name, value in given.items()
    )


def test_gpus_train_longer_and_a_network_without_batch_norm_at_a_lower_rate() -> None:
    assert chosen(PHOTOGRAPHS, on_cpu=False)[0].epochs == 21
    transformer = Network(batch_norm=False, grouped=False, head=True)
    config, _ = chosen(PHOTOGRAPHS, transformer, **LITE)
    assert (config.learning_rate, config.batch_norm, config.precision) == (1e-4, "sync", "auto")


def test_what_is_given_stays_also_if_it_is_the_default() -> None:
    given: dict[str, Any] = {"optimizer": "sgd", "schedule": "constant", "head_epochs": 0, "flip": "none"}
    config, lines = chosen(PHOTOGRAPHS, **given, **LITE)
    assert {name: getattr(config, name) for name in given} == given
    assert not re.search("--(optimizer|schedule|head-epochs|flip|model|weights) ", "\n".join(lines[1:]))


def test_what_code_has_replaced_stays() -> None:
    config = with_chosen(dataclasses.replace(auto(), learning_rate=0.3), {"learning_rate": 0.1, "epochs": 3})
    assert (config.learning_rate, config.epochs) == (0.3, 3)
    small, lines = chosen(PHOTOGRAPHS._replace(side=32), replaced=True, model="resnet50", epochs=7)
    assert (small.model, small.epochs) == ("resnet50", 7)
    assert not re.search("--(model|epochs) ", "\n".join(lines[1:])) and "the given --epochs" in "\n".join(lines)


def test_each_line_has_flags_and_a_reason() -> None:
    _, lines = chosen(PHOTOGRAPHS._replace(imbalance=20.0))
    assert lines[0] == (
        "Chosen for 3,886 training images of 5 classes, about 128 pixels; any flag that you give stays:"
    )
    assert [len(re.findall(r"--[a-z-]+", line)) > 0 and ": " in line for line in lines[1:]] == [True] * 4
    assert "--weights DEFAULT --image-size 128 128 --batch-norm frozen --channels-last" in lines[1]
    assert "--class-weights balanced" in lines[4] and "20 times the images" in lines[4]


_ENOUGH = "these are enough steps for 3,886 images"
_KNOWN = "they are photographs, and the weights know ImageNet's"


@pytest.mark.parametrize(
    ("images", "given", "reasons"),
    [
        ({}, {"head_epochs": 0, "learning_rate": 0.1}, [_KNOWN, "the weights know much", _ENOUGH]),
        (
            {},
            {"weights": None, "learning_rate": 1},
            ["what fits them", "all is to be learned, at a rate that falls to 0"],
        ),
        ({"side": 32}, {"weights": None}, ["what fits them", "all is to be learned: a high rate that falls to 0"]),
        (
            {},
            {"model": "a.py:f", "schedule": "constant"},
            ["no library has weights for this network", "all is to be learned: a high rate"],
        ),
        ({}, {"channels": 1}, ["the weights of ImageNet are for colour images"]),
    ],
)
def test_a_reason_is_not_of_what_was_given(images: dict[str, Any], given: dict[str, Any], reasons: list[str]) -> None:
    _, lines = chosen(PHOTOGRAPHS._replace(**images), **given)
    assert [line.partition(": ")[2] for line in lines[1 : 1 + len(reasons)]] == reasons


def test_a_default_network_is_said_too() -> None:
    _, lines = chosen(PHOTOGRAPHS, weights=None)
    assert lines[1].startswith("  --model resnet18 --image-size 128 128 ")


def test_given_epochs_are_not_said_to_be_enough() -> None:
    _, lines = chosen(PHOTOGRAPHS, epochs=2)
    assert lines[3] == "  --batch-size 32: they suit 3,886 images and the given --epochs"


def test_each_option_that_auto_decides_on_is_in_a_line() -> None:
    assert sorted(name for names in CHOICES.values() for name in names) == sorted(options_with(Mark.CHOSEN_BY_AUTO))
    assert set(auto().open_options) == set(options_with(Mark.CHOSEN_BY_AUTO))


def test_a_resumed_run_keeps_what_was_chosen() -> None:
    before = dataclasses.replace(chosen(PHOTOGRAPHS, **LITE)[0], open_options=())
    config = resumed_options(auto(name="run", resume=True, epochs=9, **LITE), before)
    assert (config.learning_rate, config.head_learning_rate_factor, config.head_epochs) == (1.5e-4, 10, 1)
    assert (config.epochs, config.open_options) == (9, ())


def test_the_head_needs_some_of_the_epochs() -> None:
    with pytest.raises(UsageError, match="--head-epochs is 3 and --epochs 3, which leaves no epoch for all layers"):
        auto(epochs=3, head_epochs=3)
