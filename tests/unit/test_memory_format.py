"""--channels-last auto: on for networks of convolutions on GPUs, decided once, and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from raytrain import recipes
from raytrain.config import TrainConfig
from raytrain.launch import prepare
from raytrain.launch.prepare import TrainRequest
from raytrain.launch.resumed_options import resumed_options
from raytrain.training.networks.memory_format import suits_channels_last
from raytrain.training.run import Run
from tests.helpers.small_runs import make_images

CONVOLUTIONS = "raytrain.models:cifar10"
SMALL: dict[str, Any] = {
    "image_size": (32, 32),
    "batch_size": 8,
    "learning_rate": 0.1,
    "mean": (0.5,) * 3,
    "std": (0.2,) * 3,
}


class Viewed(nn.Module):
    """As tutorials write it: ``view`` refuses features whose channels come last."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 32 * 32, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).view(len(images), -1))


@pytest.mark.parametrize(
    ("model", "suits"),
    [
        (CONVOLUTIONS, True),
        ("squeezenet1_1", True),
        ("vit_b_16", False),
        ("raytrain.models:digits_lstm", False),
        ("tests.unit.test_memory_format:Viewed", False),
        ("tests.unit.test_memory_format:nothing_there", False),
    ],
)
def test_it_is_for_convolutions_that_take_such_images(model: str, suits: bool) -> None:
    size = (224, 224) if ":" not in model else (28, 28) if "lstm" in model else (32, 32)
    channels = 1 if "lstm" in model else 3
    config = recipes.custom(model=model, channels=channels, image_size=size, batch_size=8, learning_rate=0.1)
    assert suits_channels_last(config, 10) == suits


class Deep(nn.Sequential):
    def __init__(self, num_classes: int, depths: list[int]) -> None:
        super().__init__(*(nn.Conv2d(3, 3, 3, padding=1) for _ in depths), nn.Flatten(), nn.LazyLinear(num_classes))


def test_options_of_the_network_may_be_lists() -> None:
    option = {"model_option": ("depths=[1, 2]",)}
    config = recipes.custom(model="tests.unit.test_memory_format:Deep", batch_size=8, learning_rate=0.1, **option)
    assert suits_channels_last(config, 10)


def with_network_of_options(run: Run) -> None:
    run.prepare(run.build_model())


def with_network_of_its_own(run: Run) -> None:
    run.prepare(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("asked", "device", "loop", "is_on"),
    [
        ("auto", "cuda", None, True),
        ("auto", "cpu", None, False),
        ("auto", "cuda", with_network_of_options, True),
        ("auto", "cuda", with_network_of_its_own, False),
        (False, "cuda", None, False),
        (True, "cpu", None, True),
    ],
)
def test_a_run_writes_down_what_was_decided(
    asked: Any, device: str, loop: Callable[[Run], None] | None, is_on: bool, tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    places = {"data": str(make_images(tmp_path / "images")), "storage": str(tmp_path), "name": "run"}
    wanted = recipes.custom(**places, **SMALL, model=CONVOLUTIONS, workers=1, channels_last=asked)
    with prepare.prepare(prepare.settle_options(wanted), TrainRequest(loop=loop)) as prepared:
        assert prepared.resolve(1, device, lambda device: "float32").channels_last is is_on


@pytest.mark.parametrize(("asked", "kept"), [("auto", True), (False, False)])
def test_a_resumed_run_keeps_it(asked: Any, kept: bool) -> None:
    before = resolved(recipes.custom(**SMALL), channels_last=True)
    assert resumed_options(recipes.custom(**SMALL, channels_last=asked), before).channels_last is kept


def test_old_runs_and_the_recipes_have_what_they_had() -> None:
    assert resolved(recipes.custom(**SMALL)).channels_last is False
    stored = dataclasses.replace(resolved(recipes.cifar10()), device="cuda")
    assert stored.channels_last is True


def resolved(config: TrainConfig, **decided: Any) -> Any:
    return config.resolve(name="run", num_workers=1, device="cpu", mean=(0.5,) * 3, std=(0.2,) * 3, **decided)
