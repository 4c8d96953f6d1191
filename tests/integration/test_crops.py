"""Random crops of the original images: the same pixels on any number of workers, in an own loop, after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.folder_runs import folder_run, largest_difference, train_runs

CROPPED = {"random_resized_crop": True, "flip": "random", "resize": "crop"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 40 JPEGs of several sizes in two class folders."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(40):
        height, width = (int(side) for side in random.integers(20, 60, 2))
        pixels = random.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
        path = folder / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).resize((width, height)).save(path)
    return folder


@pytest.mark.parametrize("cache_side", [None, 1.25])
def test_crops_are_the_same_on_any_number_of_workers_and_after_a_resume(
    cache_side: float | None, photos: Path, tmp_path: Path
) -> None:
    def run(name: str, stop_after: int | None = None):
        options = {**CROPPED, "cache_side": cache_side, "batch_size": 7}
        return folder_run(photos, tmp_path, name, stop_after=stop_after, **options)

    (alone,) = train_runs(1, run("alone"))
    train_runs(3, run("stopped", stop_after=7))  # in the middle of an epoch
    (resumed,) = train_runs(2, run("stopped"))
    assert largest_difference(alone, resumed) < 1e-10


def test_crops_differ_between_epochs_and_seeds(photos: Path, tmp_path: Path) -> None:
    whole = folder_run(photos, tmp_path, "whole", batch_size=7)
    cropped = folder_run(photos, tmp_path, "cropped", batch_size=7, **CROPPED)
    first, second = train_runs(1, whole, cropped)
    assert largest_difference(first, second) > 1e-3
