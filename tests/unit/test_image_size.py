"""Images that grow from epoch to epoch: their sizes, the same weights on any number of workers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import Run, TrainConfig, UsageError
from raytrain.config.network import training_size
from raytrain.data.dataset import open_dataset
from raytrain.runs.documents import run_store
from raytrain.training.assembly import load_initial_weights
from raytrain.training.run_spec import RunSpec
from tests.helpers.folder_runs import FolderRun, folder_run, largest_difference, train_here, train_runs

GROWING: dict[str, Any] = {"image_size": "4..12", "epochs": 4}
CASES: dict[str, dict[str, Any]] = {
    "whole images": {"color_jitter": 0.3, "cutmix": 1.0},
    "crops of originals": {"random_resized_crop": True, "mixup": 0.4},
    "crops of kept images": {"random_resized_crop": True, "cache_side": 1.25, "accumulate": 2},
}


def test_the_size_grows_in_fours_and_is_the_full_one_in_the_last_fifth() -> None:
    sizes = [training_size("128..224", epoch, 10) for epoch in range(10)]
    assert sizes == [(side, side) for side in (128, 140, 152, 164, 176, 188, 200, 212, 224, 224)]
    assert [training_size("20..30", epoch, 2) for epoch in range(2)] == [(20, 20), (30, 30)]
    assert training_size((20, 30), 0, 2) == (20, 30)


@pytest.mark.not_quick
def test_the_weights_are_the_same_on_any_number_of_workers_and_after_a_resume(images: Path, tmp_path: Path) -> None:
    def runs(prefix: str, stop_after: int | None = None) -> list[FolderRun]:
        return [
            folder_run(images, tmp_path, f"{prefix}-{number}", stop_after=stop_after, **GROWING, **options)
            for number, options in enumerate(CASES.values())
        ]

    alone = train_runs(1, *runs("1"))
    train_runs(3, *runs("stopped", stop_after=12))  # within the third epoch
    resumed = train_runs(2, *runs("stopped"))
    for name, one, other in zip(CASES, alone, resumed, strict=True):
        assert largest_difference(one, other) < 1e-10, name


@pytest.mark.not_quick
def test_each_epoch_trains_on_its_size_and_all_evaluations_on_the_full_one(images: Path, tmp_path: Path) -> None:
    trained, tested = set[tuple[int, int]](), set[tuple[int, ...]]()

    def watching(run: Run) -> None:
        def evaluate() -> dict[str, float]:
            tested.update(tuple(batch.images.shape[2:]) for batch in run.evaluation_batches())
            return {"accuracy": 0.5, "loss": 1.0}

        model = run.prepare(run.build_model())
        optimizer = run.prepare(run.build_optimizer(model))
        for epoch in run.epochs(evaluate):
            for batch in epoch:
                trained.add((epoch.number, batch.images.shape[2]))
                loss = run.loss(model(batch.images), batch.targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)

    train_here(folder_run(images, tmp_path, "run", loop=watching, **GROWING))
    assert trained == {(0, 4), (1, 4), (2, 8), (3, 12)} and tested == {(12, 12)}


@pytest.mark.not_quick
def test_a_look_shows_the_first_size(images: Path, tmp_path: Path) -> None:
    shown = raytrain.look(folder_run(images, tmp_path, "run", **GROWING).config).first_images
    assert shown.pixels.shape[1:] == (4, 4, 3)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"image_size": "128-224"}, "--image-size is '128-224'; give a side, such as 224, height and width, or a"),
        ({"image_size": "224..128"}, "--image-size is 224..128 and --epochs 10; a range starts with the smaller size"),
        ({"image_size": "8..12", "epochs": 1}, "needs at least two epochs to grow in"),
        ({"image_size": "8..12", "translate": 8}, "--translate is 8, and images have 8x8 pixels"),
    ],
)
def test_a_range_that_is_none_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        TrainConfig(batch_size=2, **given)


def test_a_network_for_one_size_is_refused_before_it_trains(images: Path, tmp_path: Path) -> None:
    config = folder_run(images, tmp_path, "run", model="raytrain.models:digits", **GROWING).config
    data = open_dataset(config, run_store(config.storage, "run"))
    resolved = config.resolve(name="run", num_workers=1, device="cpu", mean=data.mean, std=data.std)
    spec = RunSpec.of(resolved, data, run_store(config.storage, "run"), None, 1)
    with pytest.raises(
        UsageError, match=r"--image-size is 4..12, and --model raytrain.models:digits cannot take .* 4x4"
    ):
        load_initial_weights(spec, 0)
