"""A run that is resumed with other data or other options than its own is refused, and keeps every document."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import TrainConfig, TrainingFailed, UsageError
from raytrain.launch.prepare import prepare, settle_options
from raytrain.launch.resumed_options import resumed_options
from raytrain.runs.status import RunStatus, write_status
from raytrain.storage.open import open_store
from tests.helpers.small_runs import config, documents, local_config


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a run that finished."""
    storage = tmp_path_factory.mktemp("finished")
    raytrain.train(local_config(images, storage, epochs=1))
    return storage


@pytest.fixture
def storage(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs"))


def fewer_images(images: Path, folder: Path) -> dict[str, Any]:
    shutil.copytree(images, folder / "other")
    next((folder / "other").rglob("*.png")).unlink()
    return {"data": str(folder / "other")}


def other_classes(images: Path, folder: Path) -> dict[str, Any]:
    shutil.copytree(images, folder / "other")
    (folder / "other" / "blue").rename(folder / "other" / "yellow")
    return {"data": str(folder / "other")}


def a_label_file(images: Path, folder: Path) -> dict[str, Any]:
    keys = sorted(str(file.relative_to(images)) for file in images.rglob("*.png"))
    rows = [f"{key},{'changed' if key.endswith('0.png') else 'other'}\n" for key in keys]
    (folder / "labels.csv").write_text("path,label\n" + "".join(rows))
    return {"labels": str(folder / "labels.csv")}


MISTAKES: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], str]] = {
    "data": (fewer_images, "was made with other images"),
    "classes": (other_classes, "was made with 3 classes, and this run has 3, of which number 0 is blue there"),
    "labels": (
        a_label_file,
        r"was made with other labels \(digest none, but class folders\), and --labels has [0-9a-f]{8}…",
    ),
    "validation fold": (
        lambda *_: {"validation_fold": "2/5", "validation_data": None},
        "--validation-fold is 2/5, and the run was started with none",
    ),
    "validation fraction": (
        lambda *_: {"validation_fraction": 0.3, "validation_data": None},
        "--validation-fraction is 0.3, and the run was started with none",
    ),
    "model": (lambda *_: {"model": "resnet18"}, "was made with model tests.* and this run has resnet18"),
    "batch size": (lambda *_: {"batch_size": 10}, "was made with batch size 20, and this run has 10"),
    "seed": (lambda *_: {"seed": 1}, "was made with seed 0, and this run has 1"),
}


def test_with_the_local_backend(images: Path, storage: Path) -> None:
    before = documents(storage)
    with pytest.raises(UsageError, match="was made with seed 0, and this run has 1"):
        raytrain.train(resumed(images, storage, epochs=2, seed=1))
    assert documents(storage) == before


@pytest.mark.parametrize("mistake", MISTAKES)
def test_before_a_driver_starts_its_workers(mistake: str, images: Path, storage: Path, tmp_path: Path) -> None:
    change, sentence = MISTAKES[mistake]
    wanted = resumed(images, storage, epochs=2, **change(images, tmp_path))
    before = documents(storage)
    with pytest.raises(UsageError, match=sentence):
        prepare(settle_options(wanted))
    assert documents(storage) == before


@pytest.mark.slow
def test_what_only_the_checkpoint_shows_leaves_the_options_alone(images: Path, storage: Path) -> None:
    before = documents(storage)["run/config.json"]
    with pytest.raises(TrainingFailed, match="checkpoint's optimizer"):
        raytrain.train(resumed(images, storage, epochs=2, optimizer="adamw"))
    assert documents(storage)["run/config.json"] == before
    assert raytrain.train(resumed(images, storage, epochs=2)).status == "finished"


@pytest.mark.slow
def test_a_label_file_that_was_changed_meanwhile(images: Path, tmp_path: Path) -> None:
    options = local_config(images, tmp_path, epochs=1, **a_label_file(images, tmp_path))
    raytrain.train(options)
    labels = tmp_path / "labels.csv"
    header, *rows = labels.read_text().splitlines(keepends=True)
    labels.write_text("".join([header, *reversed(rows)]))  # the same labels in another order
    assert raytrain.train(dataclasses.replace(options, resume=True, epochs=2)).status == "finished"
    labels.write_text(labels.read_text().replace("changed", "other", 1))
    with pytest.raises(UsageError, match="was made with other labels"):
        raytrain.train(dataclasses.replace(options, resume=True, epochs=3))


def test_a_run_that_does_not_exist_yet_starts_and_then_continues_with_the_same_images_in_another_folder(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage, moved = tmp_path / "runs", shutil.copytree(images, tmp_path / "moved")
    assert raytrain.train(resumed(images, storage, epochs=1)).status == "finished"
    assert f"There is no run 'run' in {storage} yet; it starts from the beginning." in caplog.messages
    caplog.clear()
    again = raytrain.train(resumed(moved, storage, epochs=2))
    assert (again.status, again.steps) == ("finished", 10)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert '"epochs": 2' in open_store(again.run_dir).get("config.json").decode()


def test_a_trial_of_a_sweep(images: Path, tmp_path: Path) -> None:
    from raytrain.experiments.sweep import resumed_trials
    from raytrain.experiments.sweep_options import SweepOptions
    from raytrain.experiments.sweep_plan import plan_sweep
    from raytrain.experiments.trials import trials_of

    options = config(images, tmp_path, name="rates", workers=1, batch_size="20/worker")
    planned = plan_sweep(options, ["learning-rate=0.01,0.1"], SweepOptions())
    for trial in trials_of(planned, options, "rates"):
        resolved = trial.config.resolve(name=trial.name, num_workers=1, device="cpu", mean=(0.5,) * 3, std=(0.5,) * 3)
        trial.store.put("config.json", resolved.to_json().encode())
        write_status(trial.store, RunStatus(status="stopped"))
    before = documents(tmp_path)
    assert resumed_trials(trials_of(planned, options, "rates"), options) == trials_of(planned, options, "rates")
    other = dataclasses.replace(options, batch_size="10/worker")
    with pytest.raises(UsageError, match="'rates-00' was made with batch size 20, and this run has 10"):
        resumed_trials(trials_of(planned, other, "rates"), options)
    assert documents(tmp_path) == before


def resumed(images: Path, storage: Path, **options: Any) -> TrainConfig:
    return dataclasses.replace(local_config(images, storage), **{"resume": True, **options})


def test_other_groups() -> None:
    before = TrainConfig(data="images", labels="labels.csv", batch_size=8, group_by="patient")
    with pytest.raises(UsageError, match="--group-by is clinic, and the run was started with patient"):
        resumed_options(dataclasses.replace(before, group_by="clinic"), before)


@pytest.mark.parametrize(
    "split",
    [
        {"validation_fraction": 0.2},
        {"validation_fold": "2/3"},
        {"labels": "labels.csv", "group_by": "patient", "validation_fraction": 0.2},
    ],
)
def test_a_split_that_is_omitted_is_that_of_the_run(split: dict[str, Any]) -> None:
    before = TrainConfig(data="images", batch_size=8, **split)
    resumes = TrainConfig(data="images", batch_size=8, labels=split.get("labels"), resume=True)
    assert resumed_options(resumes, before) == dataclasses.replace(before, resume=True)
    # Other images are refused as such, later, and not since two options do not go together.
    elsewhere = dataclasses.replace(resumes, validation_data="other")
    assert resumed_options(elsewhere, before).validation_fraction is None
    other_labels = dataclasses.replace(resumes, labels=None if split.get("labels") else "other.csv")
    assert resumed_options(other_labels, before).group_by is None


def test_the_split_that_a_script_omits_stays_in_the_options(images: Path, tmp_path: Path) -> None:
    options = local_config(images, tmp_path, epochs=1, validation_data=None, validation_fraction=0.4)
    raytrain.train(options)
    again = raytrain.train(dataclasses.replace(options, epochs=2, validation_fraction=None, resume=True))
    assert '"validation_fraction": 0.4' in open_store(again.run_dir).get("config.json").decode()
