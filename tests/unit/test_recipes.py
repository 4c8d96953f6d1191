"""The recipes have the options of their documents, and every field can be overridden."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from raytrain.config import TrainConfig
from raytrain.data.labels.hold_out import HELD_OUT_FRACTION
from raytrain.recipes import RECIPES, alexnet_transfer, cifar10, cifar10_fast, custom, digits, digits_lstm, flowers
from raytrain.runs.documents import parse_config
from raytrain.training.networks.model import build_model


def test_cifar10_scales_with_the_workers_as_in_its_document() -> None:
    config = cifar10().scaled_to(num_workers=8)
    assert (config.batch_size, config.learning_rate, config.epochs) == (2048, pytest.approx(0.8), 50)
    assert (config.schedule, config.weight_decay) == ("piecewise:0.1/45ep", 1e-10)
    assert (config.flip, config.translate, config.evaluate_every, config.batch_norm) == ("random", 4, 1, "aggregate")


def test_cifar10_fast_has_the_rates_of_its_paper_for_a_mean_loss() -> None:
    config = cifar10_fast().scaled_to(num_workers=8)
    scale = 1024 * (1 + 1 / (1 - 0.85))  # there the loss is a sum, and weights shrink by 0.0153 a thousand images
    assert config.batch_size == 1024 and config.momentum == 0.85 and config.nesterov
    assert config.learning_rate == pytest.approx(11.5 / scale * 1024)
    assert 1.5 * config.weight_decay == pytest.approx(0.0153 * 1024 / scale, rel=1e-3)
    assert config.warmup_epochs == pytest.approx(0.23 * config.epochs, rel=0.01)


def test_digits_and_flowers_have_the_options_of_their_documents() -> None:
    config = digits().scaled_to(num_workers=4)
    assert (config.batch_size, config.epochs, config.image_size, config.channels) == (512, 20, (28, 28), 1)
    assert (config.learning_rate, config.momentum, config.schedule) == (0.01, 0.9, "constant")
    assert config.validation_fraction is None and HELD_OUT_FRACTION == 0.1
    config = flowers().scaled_to(num_workers=4)
    assert (config.batch_size, config.epochs, config.image_size, config.model) == (512, 100, (100, 100), "resnet50")
    assert (config.learning_rate, config.momentum, config.schedule) == (0.01, 0.9, "constant")
    assert config.validation_fraction is None and HELD_OUT_FRACTION == 0.1


def test_alexnet_transfer_has_the_options_of_its_document() -> None:
    config = alexnet_transfer().scaled_to(num_workers=8)
    assert (config.model, config.weights, config.head_learning_rate_factor) == ("alexnet", "DEFAULT", 20)
    assert (config.batch_size, config.learning_rate) == (2000, pytest.approx(0.01))
    assert config.validation_fraction is None and HELD_OUT_FRACTION == 0.1
    assert config.schedule == "piecewise:0.1/20ep"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_complete_configuration(name: str) -> None:
    config = RECIPES[name]()
    assert config.recipe == name
    assert parse_config(TrainConfig, config.to_json().encode()) == config


@pytest.mark.parametrize("name", ["digits", "digits-lstm", "cifar10", "cifar10-fast"])
def test_the_network_of_a_recipe_takes_its_images(name: str) -> None:
    config = RECIPES[name]()
    model = build_model(config.model, 10, config.channels, config.seed)
    assert model(torch.zeros(2, config.channels, *config.full_image_size)).shape == (2, 10)


@pytest.mark.parametrize("recipe", [digits, digits_lstm, cifar10, cifar10_fast, flowers, alexnet_transfer, custom])
def test_every_field_can_be_overridden(recipe: Any) -> None:
    other = dataclasses.replace(
        TrainConfig(batch_size=3, learning_rate=0.5), recipe="mine", channels=1, epochs=1, translate=1
    )
    assert recipe(**vars(other)) == other
    assert recipe(batch_size=30, learning_rate=0.3).scaled_to(num_workers=2).batch_size == 30
