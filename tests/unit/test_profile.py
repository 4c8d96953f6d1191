"""Where a step's time goes: the arithmetic and the advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain.config import TrainConfig
from raytrain.diagnostics import profile as profile_module
from raytrain.diagnostics.profile import PHASES, Ranges, advice, phase_seconds, profile
from raytrain.errors import StorageError, UsageError
from raytrain.recipes import auto, digits
from raytrain.runs.outcome import TrainResult
from tests.helpers.small_runs import make_images


def test_the_phases_of_a_step_add_up_and_only_all_reduce_that_nothing_hides_counts() -> None:
    ranges = Ranges(
        steps=[(0, 100), (100, 200)],
        waits=[(0, 10), (100, 130)],
        bodies=[(15, 95), (135, 195)],
        backwards=[(40, 80), (160, 190)],
        optimizers=[(80, 90), (190, 194)],
        collectives=[(50, 75), (170, 185)],  # over the workers
        computing=[(15, 60), (135, 180)],
    )
    seconds = phase_seconds(ranges)
    assert {name: round(value * 2e6) for name, value in seconds.items()} == {
        "waiting for data": 40,
        "copy and augmentation": 10,
        "forward": 50,
        "backward": 50,
        "all-reduce": 20,
        "optimizer": 14,
        "other": 16,
    }


def test_several_backwards_of_a_step_leave_the_time_between_them_to_the_forward() -> None:
    ranges = Ranges([(0, 100)], [(0, 10)], [(10, 90)], [(30, 40), (60, 70)], [(70, 80)], [], [])
    seconds = phase_seconds(ranges)
    assert round(seconds["forward"] * 1e6) == 40 and round(seconds["backward"] * 1e6) == 20


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ("waiting for data", "Waiting for data takes 70% of a step: pack"),
        ("all-reduce", "gradients takes 70% of a step: a larger --batch-size"),
        ("copy and augmentation", "augmenting takes 70% of a step"),
        ("optimizer", "The optimizer takes 70% of a step"),
        ("forward", "The network itself takes 75% of a step: try --precision auto and --channels-last"),
    ],
)
def test_the_advice_rests_on_the_largest_share(slow: str, words: str) -> None:
    config = digits(channels_last=False, compile=True, precision="float32")
    assert words in advice({name: 0.70 if name == slow else 0.05 for name in PHASES}, config)


def test_traces_are_refused_where_they_cannot_be_before_it_trains(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"{file} is a file, but should be a folder"):
        profile(digits(data="nowhere"), output=file)
    with pytest.raises(UsageError, match="traces are written into a folder of this machine"):
        profile(digits(data="nowhere"), output="s3://bucket/traces")


@pytest.mark.not_quick  # images are decoded in a process of their own
def test_the_recipe_auto_is_profiled_with_the_options_that_the_images_decide_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (images := tmp_path / "images").mkdir()
    make_images(images, 30)
    trained: list[TrainConfig] = []

    def train(config: TrainConfig, **_: Any) -> TrainResult:
        trained.append(config)
        raise StorageError("enough")

    monkeypatch.setattr(profile_module, "train", train)
    with pytest.raises(StorageError, match="enough"):
        profile(auto(data=str(images), optimizer="adamw"), output=tmp_path / "traces")
    (config,) = trained
    assert config.model == "raytrain.models:cifar10_fast" and config.image_size == (32, 32)
    assert config.optimizer == "adamw" and not config.open_options  # else the run would leave the options as they are
    assert config.epochs > 100 and config.evaluate_every == 0  # a few steps, and nothing else
