"""What is seen of an image: all of it, its centre, or a part that depends on seed, epoch and sample alone."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from raytrain import TrainConfig
from raytrain.config.network import Resizer
from raytrain.data.dataset import evaluation_format, training_format
from raytrain.data.images.crop_box import Cropping, crop_boxes, crop_numbers
from raytrain.data.images.decode import decode
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageShape
from raytrain.data.labels.manifest import list_images
from raytrain.errors import UsageError
from raytrain.storage.open import open_store

SIZES = [(300, 400), (400, 300), (97, 33), (5, 800)]


def photo(height: int, width: int, **options: object) -> bytes:
    """A JPEG that is red from left to right and green from top to bottom."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * x / (width - 1), 255 * y / (height - 1), 0 * x], axis=2).round().astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=98, **options)
    return file.getvalue()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("output", [(64, 64), (48, 96)])
def test_crop_sees_the_centre_without_distortion(size: tuple[int, int], output: tuple[int, int]) -> None:
    box = Cropping("crop", crop_fraction=0.8).crop(size, output)
    height, width = box.bottom - box.top, box.right - box.left
    assert height / width == pytest.approx(output[0] / output[1])
    assert max(height / size[0], width / size[1]) == pytest.approx(0.8)
    assert (box.top + box.bottom, box.left + box.right) == pytest.approx(size)
    assert (box.height, box.width) == output


@pytest.mark.parametrize("resizer", ["pillow", "cykooz"])
@pytest.mark.parametrize(("size", "side"), [((200, 250), 176), ((50, 50), 176), ((103, 25), 352)])
def test_a_crop_of_the_whole_side_begins_at_the_first_pixel(size: tuple[int, int], side: int, resizer: Resizer) -> None:
    """``side * (25 / side)`` may be a little more than 25, so that the box would begin before the image."""
    crop = Cropping("crop", crop_fraction=1.0, resizer=resizer).crop
    box = crop(size, (side, side))
    assert (box.top if size[0] < size[1] else box.left) == 0
    decoded = decode(photo(*size), ImageShape(side, side, 3), crop)
    with Image.open(io.BytesIO(photo(*size))) as image:
        expected = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    assert np.abs(decoded.astype(int) - np.asarray(expected)).max() <= 4


@pytest.mark.parametrize("size", SIZES)
def test_pad_sees_everything_without_distortion_on_black(size: tuple[int, int]) -> None:
    image = decode(photo(*size), ImageShape(64, 64, 3), Cropping("pad").crop)
    inside = (image.astype(int).sum(axis=2) > 0) | (image[:, :, 2] > 0)
    rows, columns = inside.any(axis=1).sum(), inside.any(axis=0).sum()
    assert max(rows, columns) >= 63
    assert rows / columns == pytest.approx(size[0] / size[1], rel=0.1) or min(rows, columns) <= 2


def test_boxes_have_the_areas_and_shapes_of_random_resized_crops() -> None:
    numbers = crop_numbers(3, 1, np.arange(20_000))
    left, top, right, bottom = crop_boxes((300, 400), numbers).T
    area, aspect = (right - left) * (bottom - top) / 120_000, (right - left) / (bottom - top)
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 400 and bottom.max() <= 300
    assert 0.08 <= area.min() < 0.09 and 0.9 < area.max() <= 1
    assert 0.7499 <= aspect.min() < 0.76 and 1.32 < aspect.max() < 1.4
    assert left.max() > 250 and top.max() > 150


def test_the_box_of_a_sample_depends_on_seed_and_epoch_and_not_on_the_batch() -> None:
    samples = np.array([5, 9, 1])
    boxes = crop_boxes((100, 100), crop_numbers(0, 0, samples))
    assert (crop_boxes((100, 100), crop_numbers(0, 0, samples[1:])) == boxes[1:]).all()
    for seed, epoch in [(1, 0), (0, 1)]:
        assert (crop_boxes((100, 100), crop_numbers(seed, epoch, samples)) != boxes).any(axis=1).all()
    assert len(np.unique(boxes, axis=0)) == 3


@pytest.mark.not_quick
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": True}], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_crop_comes_from_the_original_however_it_is_decoded(options: dict[str, object], seed: int) -> None:
    cropping = Cropping(crop_seed=seed)
    if options.pop("exif", False):
        options["exif"] = Image.Exif().tobytes()
    (crop,) = cropping.crops(np.array([7]), epoch=2)
    size, shape = (1200, 1600), ImageShape(32, 48, 3)
    crop, box = decode(photo(*size, **options), shape, crop), crop(size, shape.size)
    columns = (box.left + (np.arange(48) + 0.5) / 48 * (box.right - box.left)) / 1600 * 255
    rows = (box.top + (np.arange(32) + 0.5) / 32 * (box.bottom - box.top)) / 1200 * 255
    assert np.abs(crop[:, :, 0] - columns).max() < 4 and np.abs(crop[:, :, 1] - rows[:, None]).max() < 4


def test_a_rotated_photo_is_cropped_upright() -> None:
    """Orientation 6: the camera lay on its side, so that the file's left edge is the top of the picture."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = decode(photo(1200, 800, exif=exif), ImageShape(40, 60, 3), Cropping("crop", 1.0).crop)
    red, green = image[:, :, 0].astype(int), image[:, :, 1].astype(int)
    assert (np.diff(red[:, 20]) > 0).all()  # from the top to the bottom, all of it
    assert red[0].max() < 8 and red[-1].min() > 247
    assert (np.diff(green[20]) < 0).all()


def test_epochs_see_other_parts_and_evaluation_the_centre(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(photo(300, 400))
    store = open_store(str(tmp_path))
    manifest, samples = list_images(store), np.array([0])
    options = TrainConfig(batch_size=1, image_size=(32, 32), random_resized_crop=True, resize="crop")
    reader = ImageReader(store, *training_format(options))
    crops = [reader.read(manifest, reader.cropping.crops(samples, epoch))[0] for epoch in (0, 1, 0)]
    assert (crops[0] == crops[2]).all() and (crops[0] != crops[1]).any()
    seen, _ = ImageReader(store, *evaluation_format(options)).read(manifest)
    assert seen[0, 0, 0, 0] == pytest.approx(255 * (0.5 - 0.875 * 0.375), abs=6)


@pytest.mark.parametrize(
    "cropping", [Cropping(interpolation="bicubic"), Cropping(crop_seed=1, interpolation="bicubic")]
)
def test_images_are_resized_as_asked_for(cropping: Cropping) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8))
    file = io.BytesIO()
    noise.save(file, "PNG")
    (crop,) = cropping.crops(np.arange(1), 0)
    left, top, right, bottom = crop((40, 30), (20, 16))[:4]
    x, y = math.floor(left), math.floor(top)  # only whole pixels that the box touches are seen
    seen = noise.crop((x, y, math.ceil(right), math.ceil(bottom)))
    resized = seen.resize((16, 20), Image.Resampling.BICUBIC, (left - x, top - y, right - x, bottom - y))
    assert (decode(file.getvalue(), ImageShape(20, 16, 3), crop) == np.asarray(resized)).all()


def test_images_that_are_kept_have_a_margin_and_show_everything() -> None:
    options = TrainConfig(batch_size=1, image_size=(32, 40), random_resized_crop=True, cache_side=1.25, resize="crop")
    shape, cropping, _ = training_format(options)
    assert shape.size == (40, 50)
    assert cropping.crop((300, 400), shape.size) == (0, 0, 400, 300, 40, 50, "bilinear", "pillow")
    assert evaluation_format(options).shape.size == (32, 40)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache_side": 1.2}, "--cache-side is 1.2, and only random crops use it"),
        ({"random_resized_crop": True, "cache": "memory"}, "--cache is memory, and --random-resized-crop reads"),
        ({"random_resized_crop": True, "cache_side": 0.9}, "--cache-side is 0.9; it must be at least 1"),
        ({"translate": 12}, "--translate is 12, and images have 12x30 pixels"),
        ({"crop_fraction": 1.1}, "--crop-fraction is 1.1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        TrainConfig(batch_size=1, image_size=(12, 30), **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("channels", [1, 3])
def test_any_view_of_any_image_can_be_decoded(channels: int) -> None:
    sizes = itertools.product((1, 2, 7, 33), repeat=2)
    for height, width in sizes:
        file = io.BytesIO()
        Image.new("RGB", (width, height), "white").save(file, "JPEG")
        for cropping in (Cropping("crop", 0.3), Cropping("pad"), Cropping(crop_seed=1)):
            for crop in cropping.crops(np.arange(5), 0):
                image = decode(file.getvalue(), ImageShape(9, 6, channels), crop)
                assert image.shape == (9, 6, channels) and image.max() > 250
