"""Folds of a cross-validation: every image is held out once, in equal shares of each class, groups as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raytrain
from raytrain.config import TrainConfig
from raytrain.data.dataset import Dataset, open_dataset
from raytrain.data.labels.hold_out import hold_out_fold
from raytrain.errors import UsageError
from raytrain.experiments.sweep_result import mean_of_folds
from raytrain.experiments.trial_results import TrialResult
from raytrain.recipes import custom
from raytrain.runs.documents import read_config, run_store
from tests.helpers.small_runs import make_images


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"), num_images=66)


def opened(images: Path, **options: Any) -> Dataset:
    mean = (0.5, 0.5, 0.5)
    return open_dataset(TrainConfig(data=str(images), batch_size=2, learning_rate=1, mean=mean, std=mean, **options))


def test_every_image_is_held_out_once_in_equal_shares(images: Path) -> None:
    folds = [opened(images, validation_fold=f"{number}/5") for number in range(1, 6)]
    held_out = [key for data in folds for key in data.validation.keys.to_pylist()]
    assert sorted(held_out) == sorted(
        opened(images).train.keys.to_pylist() + opened(images).validation.keys.to_pylist()
    )
    for data in folds:
        assert set(data.validation.class_counts()) <= {4, 5} and len(data.validation) in (12, 13, 14)
        assert len(data.train) + len(data.validation) == 66
        assert not {*data.train.keys.to_pylist()} & {*data.validation.keys.to_pylist()}


def test_groups_are_in_one_fold_as_a_whole(images: Path) -> None:
    whole = opened(images, validation_fraction=0.5)
    manifest = whole.train
    groups = np.array([f"g{number // 3}" for number in range(len(manifest))], object)
    seen: list[str] = []
    for number in (1, 2, 3):
        _, held_out = hold_out_fold(manifest, (number, 3), 0, groups)
        keys = {*held_out.keys.to_pylist()}
        of_fold = {group for key, group in zip(manifest.keys.to_pylist(), groups, strict=True) if key in keys}
        assert len(held_out) == 3 * len(of_fold) and abs(len(held_out) - len(manifest) / 3) <= 3
        seen += of_fold
    assert sorted(seen) == sorted({*groups})
    sentence = "12 folds need at least 12 groups, and .* has 33 images of 11 groups; take at most 11 folds"
    with pytest.raises(UsageError, match=sentence):
        hold_out_fold(manifest, (1, 12), 0, groups)


def test_groups_of_one_class_each_leave_no_fold_empty(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = opened(images, validation_fraction=0.5).train
    names = [manifest.class_names(int(label))[0] for label in manifest.labels]
    for num_groups_per_class in (2, 1):
        groups = np.array([f"{name}{number % num_groups_per_class}" for number, name in enumerate(names)], object)
        parts = [hold_out_fold(manifest, (number, 3), 0, groups) for number in (1, 2, 3)]
        assert all(len(held_out) >= 5 for _, held_out in parts)
    # With one group for each class, the networks never see the class that they are measured on.
    rows = [f"{key},{name},{name}\n" for key, name in zip(manifest.keys.to_pylist(), names, strict=True)]
    (tmp_path / "labels.csv").write_text("path,label,kind\n" + "".join(rows))
    opened(images, labels=str(tmp_path / "labels.csv"), group_by="kind", validation_fold="1/3")
    assert "Classes without a training image, so that the network cannot learn them: 1 of 3" in caplog.text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"validation_fold": "0/5"}, "--validation-fold is 0/5; give the number of a fold and how many there are"),
        ({"validation_fold": "6/5"}, "--validation-fold is 6/5"),
        ({"validation_fold": "1/1"}, "at least two, such as 1/5"),
        (
            {"validation_fold": "1/5", "validation_fraction": 0.2},
            "--validation-fold and --validation-fraction both",
        ),
        (
            {"validation_fold": "1/23"},
            "23 folds need 23 images of each class, and blue, green, red in .* have fewer \\(22 of blue\\); take at",
        ),
    ],
)
def test_folds_that_cannot_be_are_refused(options: dict[str, Any], sentence: str, images: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        opened(images, **options)


def test_validation_images_that_are_given_are_no_folds(images: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part).symlink_to(images)
    with pytest.raises(UsageError, match="and validation images are given; move these to the training images"):
        opened(tmp_path, validation_fold="1/5")


def test_the_mean_of_each_choice_is_told_with_its_deviation() -> None:
    def trial(rate: float, fold: str, value: float | None) -> TrialResult:
        return TrialResult(name="a", values={"learning_rate": rate, "validation_fold": fold}, run_dir="", value=value)

    trials = [trial(0.1, "1/2", 0.8), trial(0.1, "2/2", 0.6), trial(0.2, "1/2", 0.9), trial(0.2, "2/2", None)]
    best, second = mean_of_folds(trials)
    assert (best.values, best.mean, best.deviation, best.num_measured) == ({"learning_rate": 0.2}, 0.9, None, 1)
    assert second.mean == pytest.approx(0.7) and second.deviation == pytest.approx(0.02**0.5)


@pytest.mark.not_quick
def test_each_fold_is_a_run_that_holds_out_its_part(images: Path, tmp_path: Path) -> None:
    config = custom(
        data=str(images),
        storage=str(tmp_path),
        name="cv",
        model="tests.helpers.memory_runs:network",
        image_size=(12, 12),
        epochs=1,
        batch_size=20,
        learning_rate=0.05,
        backend="local",
        device="cpu",
    )
    # Folds that the images are too few for are refused before anything starts, and before a document is written.
    with pytest.raises(UsageError, match="23 folds need 23 images of each class"):
        raytrain.sweep(config, vary="seed=0,1", folds=23)
    assert not [*tmp_path.iterdir()]

    result = raytrain.sweep(config, folds=2)
    assert read_config(run_store(str(tmp_path), "cv")).validation_fold is None  # each trial has one of its own
    assert [(folds.num_folds, folds.num_measured) for folds in result.folds] == [(2, 2)]
    values = [trial.value or 0.0 for trial in result.trials]
    assert result.folds[0].mean == pytest.approx(sum(values) / 2)
    assert sorted(str(trial.values["validation_fold"]) for trial in result.trials) == ["1/2", "2/2"]
    with pytest.raises(UsageError, match="--folds is 1; a cross-validation has at least 2"):
        raytrain.sweep(config, folds=1)
