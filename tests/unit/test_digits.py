"""The rendered digits of the demo are balanced, repeatable and legible."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raytrain.demo import demo as digits
from raytrain.errors import StorageError, UsageError


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.png"))}


def test_every_class_has_the_same_number_of_training_and_test_images(tmp_path: Path) -> None:
    paths = contents(digits.render_digits(tmp_path, num_images=105, validation_fraction=0.2))
    assert set(paths) == {f"train/{digit}/{n:04d}.png" for digit in range(10) for n in range(1, 9)} | {
        f"test/{digit}/{n:04d}.png" for digit in range(10) for n in range(1, 3)
    }
    assert len(set(paths.values())) == 100  # No two images are the same.


def test_the_pixels_depend_on_the_seed(tmp_path: Path) -> None:
    first, again, other = (
        contents(digits.render_digits(tmp_path / name, num_images=40, validation_fraction=0.25, seed=seed))
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert first == again
    assert all(first[path] != other[path] for path in first)


@pytest.mark.not_quick
def test_images_are_grey_28x28_with_high_contrast(tmp_path: Path) -> None:
    for path in digits.render_digits(tmp_path, num_images=300).rglob("*.png"):
        image = Image.open(path)
        assert (image.mode, image.size) == ("L", (28, 28))
        pixels = np.asarray(image, dtype=float)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert np.percentile(pixels, 97) - np.median(pixels) > 60, path
        assert np.median(border) < np.percentile(pixels, 97) - 60, path


def test_digits_lean_by_up_to_45_degrees_either_way() -> None:
    rng = np.random.default_rng(0)
    leans = np.array([lean_degrees(digits.draw_digit(1, rng).astype(float)) for _ in range(400)])
    assert leans.min() < -30 and leans.max() > 30
    assert np.abs(leans).max() < 45 + 25  # An italic font leans by itself.


def lean_degrees(image: np.ndarray) -> float:
    """Return the angle in degrees between the digit's long axis and the vertical."""
    weight = np.clip(image - (np.median(image) + image.max()) / 2, 0, None)
    y, x = np.indices(image.shape)
    dy, dx = (axis - np.average(axis, weights=weight) for axis in (y, x))
    upward = 2 * np.average(-dx * dy, weights=weight), np.average(dy * dy - dx * dx, weights=weight)
    return float(np.degrees(np.arctan2(*upward) / 2))


@pytest.mark.parametrize("font", digits.FONTS)
def test_every_font_draws_ten_different_digits(font: str) -> None:
    upright: Any = SimpleNamespace(
        choice=lambda fonts: font,
        uniform=lambda low, high, size=None: np.full(size or (), (low + high) / 2),
        normal=lambda mean, deviation, size: np.zeros(size),
    )
    images = [digits.draw_digit(digit, upright).astype(float) for digit in range(10)]
    glyphs = [(image - image.min()) / np.ptp(image) for image in images]
    ink = [float(glyph.mean()) for glyph in glyphs]
    assert min(ink) > 0.02
    assert max(ink) < 0.35
    assert min(float(np.abs(a - b).mean()) for i, a in enumerate(glyphs) for b in glyphs[:i]) > 0.01


def test_too_few_images_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"num_images 30 and validation_fraction 0\.1 leave 0 of a class's 3 images"):
        digits.render_digits(tmp_path, num_images=30)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "images").write_text("mine")
    with pytest.raises(StorageError, match=r"images is a file, but should be a folder; check the path"):
        digits.render_digits(tmp_path / "images")
