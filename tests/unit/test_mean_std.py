"""Mean and standard deviation of the training images, which normalise them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raytrain.data.dataset import open_dataset
from raytrain.data.images.image_format import ImageFormat, ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.data.mean_std import measure_mean_std
from raytrain.recipes import auto
from raytrain.storage.open import open_store

pytestmark = pytest.mark.not_quick  # the images are decoded in a process of their own


def test_they_are_those_of_all_pixels_and_need_little_more_memory_than_the_images(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, (100, 200, 256), (40, 64, 64, 3)).astype(np.uint8)
    pixels[..., 0] = 7
    for name in ("even", "odd"):
        (tmp_path / name).mkdir()
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(tmp_path / ("even", "odd")[number % 2] / f"{number:02d}.png")
    (tmp_path / "odd" / "99.png").write_bytes(b"no image")
    store = open_store(str(tmp_path))
    images = build_manifest(store)
    tracemalloc.start()
    mean, std = measure_mean_std(store, images, ImageFormat(ImageShape(64, 64, 3)), seed=0)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    values = pixels.reshape(-1, 3) / 255
    assert mean == pytest.approx(values.mean(axis=0), abs=1e-6)
    assert std == pytest.approx((1e-3, *values.std(axis=0)[1:]), abs=1e-6)
    assert most < 3.5 * pixels.nbytes  # other threads of this process allocate, too


@pytest.mark.parametrize(
    ("pixels", "told"),
    [
        (np.full((8, 8), 4095, np.uint16), "3 of 8 training images of {} that were measured are nearly black"),
        (np.full((8, 8), 2, np.uint8), "no value is above 31 of 255"),  # a mask
        (
            np.full((8, 8, 4), (255, 255, 255, 0), np.uint8),
            "3 of 8 training images of {} that were measured are nearly white",
        ),
        (np.full((8, 8), 65535 // 4, np.uint16), None),
    ],
)
def test_images_without_anything_to_see_are_reported_with_numbers(
    pixels: np.ndarray, told: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(8):
        folder = tmp_path / ("even", "odd")[number % 2]
        folder.mkdir(exist_ok=True)
        shown = pixels if number < 3 else np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
        Image.fromarray(shown).save(folder / f"{number}.png")
    store = open_store(str(tmp_path))
    measure_mean_std(store, build_manifest(store), ImageFormat(ImageShape(8, 8, 3)), seed=0)
    assert told.format(tmp_path) in caplog.text if told else not caplog.messages

    # They are looked for, too, if nothing has to be measured.
    caplog.clear()
    config, run_store = auto(data=str(tmp_path), mean=(0.5,) * 3, std=(0.5,) * 3), open_store(str(tmp_path / ".run"))
    open_dataset(config, run_store).write(run_store)
    lines = "".join(line for line in caplog.messages if "that were measured" in line)
    assert (told.rpartition("are ")[2] in lines and "of 6 training images" in lines) if told else not lines
    caplog.clear()
    open_dataset(config, run_store)  # of a run that resumes
    assert "that were measured" not in caplog.text


def test_they_are_of_images_of_the_size_that_is_chosen_when_the_images_are_known(tmp_path: Path) -> None:
    stripes = np.zeros((128, 128, 3), np.uint8)
    stripes[::2] = 255  # which are grey in images of half the size
    for name in ("train/even", "train/odd", "test/even", "test/odd"):
        (tmp_path / name).mkdir(parents=True)
        Image.fromarray(stripes).save(tmp_path / name / "1.png")
    undecided = open_dataset(auto(data=str(tmp_path)))
    decided = undecided.treated_as(auto(data=str(tmp_path), image_size=128))
    assert decided.std == pytest.approx((0.5, 0.5, 0.5), abs=1e-6)
