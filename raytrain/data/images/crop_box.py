"""Crop boxes: all of an image, its centre or a random part, and the size that it is resized to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from raytrain.config.network import Interpolation, Resize, Resizer, Size
from raytrain.data.plan.permutation import Floats, Int64s, mix, uniform

_AREA, _ASPECT, _TOP, _LEFT, NUM_CROP_DRAWS = range(5)
_MIN_AREA = 0.08
_LOG_ASPECT = math.log(4 / 3)
_CROP_STREAM = 1  # keeps the draws of the crops apart from the order of the samples and from other augmentation


class CropBox(NamedTuple):
    """A part of an image in pixels, from edge to edge, and the size that it gets; if too small, centred on black."""

    left: float
    top: float
    right: float
    bottom: float
    height: int
    width: int
    interpolation: Interpolation = "bilinear"
    resizer: Resizer = "pillow"

    @property
    def scale(self) -> float:
        """The larger of the two factors by which the part is resized."""
        return max(self.height / (self.bottom - self.top), self.width / (self.right - self.left))


Crop = Callable[[Size, Size], CropBox]  # the box of an image of the first size that gives an image of the second size


@dataclass(frozen=True)
class Cropping:
    """How the crop boxes of a data set are chosen.

    ``stretch`` shows all of an image. ``crop`` shows the ``crop_fraction`` of it around its centre, without distortion.
    ``pad`` shows all of it without distortion, on black. With ``crop_seed``, an image that is read for training shows
    another random part in each epoch.
    """

    resize: Resize = "stretch"
    crop_fraction: float = 1.0
    crop_seed: int | None = None
    interpolation: Interpolation = "bilinear"
    resizer: Resizer = "pillow"

    @property
    def crop(self) -> Crop:
        """The crop of an image that is not cropped at random."""
        parts: dict[Resize, Callable[..., CropBox]] = {
            "stretch": stretch,
            "crop": partial(_centre, fraction=self.crop_fraction),
            "pad": _pad,
        }
        return partial(parts[self.resize], interpolation=self.interpolation, resizer=self.resizer)

    def crops(self, samples: Int64s, epoch: int) -> list[Crop]:
        """The crop of each of ``samples``, int64 (n,), in ``epoch``."""
        if self.crop_seed is None:
            return [self.crop] * len(samples)
        all_draws = crop_draws(self.crop_seed, epoch, samples).tolist()
        box = partial(_random_box, interpolation=self.interpolation, resizer=self.resizer)
        return [partial(box, draws=draws) for draws in all_draws]


STRETCHED = Cropping()


def stretch(image: Size, output: Size, **how: Any) -> CropBox:
    """All of the image. ``how``: the interpolation and the resizer of the box."""
    return CropBox(0, 0, image[1], image[0], *output, **how)


def crop_draws(seed: int, epoch: int, samples: Int64s) -> Floats:
    """The random numbers that choose a part of each sample in ``epoch``, float64 (n, 4)."""
    return uniform(mix(seed, epoch, _CROP_STREAM), samples, NUM_CROP_DRAWS)


def crop_boxes(image: Size, draws: Floats) -> Floats:
    """A random box for each row of ``draws`` (n, 4): left, top, right and bottom in pixels, float64 (n, 4).

    A box has 8 % to 100 % of the area and an aspect ratio of 3:4 to 4:3 (Szegedy et al. 2015).
    Like torchvision's RandomResizedCrop, except that a side longer than the image is cut to the image instead of drawn
    again, and that a box may start between two pixels.
    """
    return np.stack(_edges(image, draws.T), axis=1)


def _edges(image: Size, draws: Sequence[Any] | Floats) -> tuple[Any, ...]:
    """Left, top, right and bottom, of one box by four floats, or of n by (4, n): a row of NumPy takes 40 µs longer."""
    height, width = image
    area = height * width * (_MIN_AREA + (1 - _MIN_AREA) * draws[_AREA])
    aspect = np.exp((2 * draws[_ASPECT] - 1) * _LOG_ASPECT)
    box_height = np.minimum(np.sqrt(area / aspect), height)
    box_width = np.minimum(np.sqrt(area * aspect), width)
    top = draws[_TOP] * (height - box_height)
    left = draws[_LEFT] * (width - box_width)
    return left, top, left + box_width, top + box_height


def _random_box(image: Size, output: Size, draws: Sequence[float], **how: Any) -> CropBox:
    left, top, right, bottom = map(float, _edges(image, draws))
    return CropBox(left, top, right, bottom, *output, **how)


def _centre(image: Size, output: Size, fraction: float, **how: Any) -> CropBox:
    """The ``fraction`` of the largest box in the image that has the shape of the output."""
    scale = fraction * min(image[0] / output[0], image[1] / output[1])
    height, width = output[0] * scale, output[1] * scale
    top, left = (image[0] - height) / 2, (image[1] - width) / 2
    return CropBox(left, top, left + width, top + height, *output, **how)


def _pad(image: Size, output: Size, **how: Any) -> CropBox:
    scale = min(output[0] / image[0], output[1] / image[1])
    height, width = (max(1, round(side * scale)) for side in image)
    return CropBox(0, 0, image[1], image[0], height, width, **how)
