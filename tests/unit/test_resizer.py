"""The library that resizes JPEGs for training: decided once, kept, and within 1 of 255 of Pillow."""

import dataclasses
import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raytrain.config.network import Interpolation
from raytrain.data.dataset import evaluation_format, training_format
from raytrain.data.images.crop_box import Cropping, fastest_resizer
from raytrain.data.images.decode import decode
from raytrain.data.images.image_format import ImageShape
from raytrain.errors import UsageError
from raytrain.launch import prepare
from raytrain.launch.local.local_launch import LocalLaunch
from raytrain.launch.ray.feed.data_feed import DataFeed
from raytrain.launch.resumed_options import resumed_options
from raytrain.recipes import cifar10, custom
from tests.helpers.photographs import as_jpeg, draw
from tests.helpers.small_runs import make_images

needs_cykooz = pytest.mark.skipif(fastest_resizer() == "pillow", reason="cykooz-resizer has no wheel for this machine")


def photo(mode: str = "RGB") -> bytes:
    """A JPEG of 211 × 157 pixels."""
    small = np.random.default_rng(0).integers(0, 256, (20, 27, 3), np.uint8)
    written = io.BytesIO()
    Image.fromarray(small).resize((211, 157), Image.Resampling.BICUBIC).convert(mode).save(written, "JPEG", quality=95)
    return written.getvalue()


@needs_cykooz
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [ImageShape(96, 96, 3), ImageShape(300, 224, 1), ImageShape(157, 211, 3)], ids=str)
def test_both_libraries_resize_alike(shape: ImageShape, interpolation: Interpolation) -> None:
    data = photo("L" if shape.channels == 1 else "RGB")
    for cropping in (
        Cropping(interpolation=interpolation),
        Cropping("crop", 0.875, interpolation=interpolation),
        Cropping("pad", interpolation=interpolation),
        *(Cropping(crop_seed=seed, interpolation=interpolation) for seed in range(20)),
    ):
        slow, fast = (
            decode(data, shape, dataclasses.replace(cropping, resizer=resizer).crops(np.arange(1), 0)[0])
            for resizer in ("pillow", "cykooz")
        )
        assert np.abs(slow.astype(int) - fast).max() <= 1


@needs_cykooz
@pytest.mark.not_quick
@pytest.mark.parametrize(("height", "width"), [(375, 500), (768, 1024)])
def test_photographs_are_those_of_a_full_decode_by_pillow_if_nothing_is_scaled_down(height: int, width: int) -> None:
    data = as_jpeg(draw(height, width))
    with Image.open(io.BytesIO(data)) as image:
        whole = image.convert("RGB")
    shape, seen = ImageShape(224, 224, 3), 0
    for crop in Cropping(crop_seed=0, resizer="cykooz").crops(np.arange(60), 0):
        box = crop((height, width), shape.size)
        if 2 * box.scale <= 1:  # it is decoded at half the size, or less
            continue
        x, y = math.floor(box.left), math.floor(box.top)  # only whole pixels that the box touches are seen
        part = whole.crop((x, y, math.ceil(box.right), math.ceil(box.bottom)))
        inside = (box.left - x, box.top - y, box.right - x, box.bottom - y)
        expected = np.asarray(part.resize((224, 224), Image.Resampling.BILINEAR, inside))
        assert np.abs(decode(data, shape, crop).astype(int) - expected).max() <= 1
        seen += 1
    assert seen >= 15


def test_only_images_for_training_are_resized_by_another_library_than_pillow() -> None:
    for options in (cifar10(resizer="cykooz"), cifar10(resizer="cykooz", random_resized_crop=True)):
        assert training_format(options).cropping.resizer == "cykooz"
        assert evaluation_format(options).cropping.resizer == "pillow"
    assert training_format(cifar10()).cropping.resizer == "pillow"


@pytest.mark.parametrize("given", ["auto", "pillow"])
def test_a_resumed_run_keeps_its_library(given: str) -> None:
    before = cifar10(resizer="cykooz")
    now = cifar10(resizer=given)
    assert resumed_options(now, before).resizer == ("cykooz" if given == "auto" else "pillow")
    decided = {"name": "a", "num_workers": 1, "device": "cpu", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    assert now.resolve(**decided, fastest_resizer="cykooz").resizer == ("cykooz" if given == "auto" else "pillow")


def test_a_node_without_the_library_ends_the_run_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cykooz_resizer", None)
    with pytest.raises(UsageError, match=r"no cykooz-resizer.*--resizer pillow"):
        decode(photo(), ImageShape(32, 32, 3), Cropping(resizer="cykooz").crop)


@pytest.mark.not_quick
@pytest.mark.parametrize("found", ["cykooz", "pillow"])
def test_a_run_reads_with_the_library_that_it_writes_down(tmp_path: Path, found: Any) -> None:
    (tmp_path / "images").mkdir()
    options = {"data": str(make_images(tmp_path / "images")), "storage": str(tmp_path), "name": "run"}
    wanted = custom(**options, batch_size=8, learning_rate=0.1, workers=1, device="cpu")
    with prepare.prepare(prepare.settle_options(wanted)) as prepared:
        started = prepared.resolve(1, "cpu", fastest_resizer=lambda: found)
        feed = DataFeed(started, prepared.data, 0, 0)
        decided = dataclasses.replace(prepared, config=started)
        seen: list[Any] = []
        agent: Any = SimpleNamespace(start_workers=lambda spec, here: seen.append(here.data), close=lambda: None)
        launch = LocalLaunch(decided, agent)
        launch.start()
        launch.close(finished=True)
    # A feed gives its images only to a cluster, so this test has to look into it.
    for data in (feed._data, *seen):
        assert data.train_format.cropping.resizer == started.resizer == found
