"""Photographs that are made here: random ones, with the spectrum of natural images, so that they compress alike."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

_FALL = 1.0  # of the amplitude, with the frequency: 1 in natural images (Field 1987)
_CONTRAST, _COLOUR = 60.0, 0.35  # of 255, and of the brightness
_NOISE = 3.0  # of a camera, of 255


def draw(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """A photograph, uint8 (H, W, 3)."""
    random = np.random.default_rng(seed)
    brightness, red, blue = (_field(random, height, width) for _ in range(3))
    channels = [brightness + _COLOUR * each for each in (red, -red - blue, blue)]
    pixels = 128 + _CONTRAST * np.stack(channels, axis=2) + random.normal(0, _NOISE, (height, width, 3))
    return pixels.clip(0, 255).round().astype(np.uint8)


def _field(random: np.random.Generator, height: int, width: int) -> npt.NDArray[np.float64]:
    """Random values of mean 0 and deviation 1, (H, W)."""
    y, x = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(y, x)
    frequency[0, 0] = np.inf
    phases = random.uniform(0, 2 * np.pi, frequency.shape)
    values = np.fft.irfft2(np.exp(1j * phases) / frequency**_FALL, (height, width))
    return values / values.std()


def as_jpeg(pixels: npt.NDArray[np.uint8], quality: int = 95, **options: Any) -> bytes:
    """The file of a photograph."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, **options)
    return file.getvalue()


def write_photographs(folder: Path, num: int) -> None:
    """Write ``num`` JPEGs of 500x375 pixels and some 100 KB below ``folder``, in ten class folders."""
    large = [draw(1500, 2000, seed) for seed in range(8)]
    random = np.random.default_rng(0)
    for number in range(num):
        top, left = random.integers(0, 1125), random.integers(0, 1500)
        pixels = large[number % len(large)][top : top + 375, left : left + 500]
        file = folder / f"{number % 10}" / f"{number:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(as_jpeg(pixels, quality=85))
