"""Crop boxes, which say what is seen of an image (all, its centre, a random part) and the size that it gets.

A :class:`Cropping` says how the boxes of a data set are chosen, a :class:`Crop` how the box of one image is, and a
:class:`CropBox` is the result for an image of known size. Crops come before sizes are known: they travel to the
process that fetches the file and reads its header.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from raytrain.config.network import Interpolation, Resize, Resizer, Size
from raytrain.data.plan.permutation import Floats, Int64s, mix, uniform

_AREA, _ASPECT, _TOP, _LEFT, _NUMBERS_PER_CROP = range(5)
_MIN_AREA = 0.08
_LOG_ASPECT = math.log(4 / 3)
_CROP_STREAM = 1  # keeps the random numbers of the crops apart from the order of the samples and other augmentation


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


class Crop(NamedTuple):
    """The part of one image that is seen: all, its centre, all of it on black, or the part that ``numbers`` choose.

    A crop is called with the size of the image, as soon as that is known, and can be sent to another process before.
    """

    kind: Resize | Literal["random"] = "stretch"
    fraction: float = 1.0  # of the largest box of the output's shape, for ``crop``
    numbers: Sequence[float] = ()  # four in [0, 1), for ``random``
    interpolation: Interpolation = "bilinear"
    resizer: Resizer = "pillow"

    def __call__(self, image: Size, output: Size) -> CropBox:
        """Return the box of an ``image`` of this height and width that gives an image of the size ``output``."""
        height, width = output
        left, top, right, bottom = 0.0, 0.0, float(image[1]), float(image[0])
        if self.kind == "random":
            left, top, right, bottom = map(float, _edges(image, self.numbers))
        elif self.kind == "crop":
            # The largest box that has the shape of the output, made smaller around its centre.
            scale = self.fraction * min(image[0] / height, image[1] / width)
            top, left = (image[0] - height * scale) / 2, (image[1] - width * scale) / 2
            right, bottom = left + width * scale, top + height * scale
        elif self.kind == "pad":
            scale = min(height / image[0], width / image[1])
            height, width = (max(1, round(side * scale)) for side in image)
        return CropBox(left, top, right, bottom, height, width, self.interpolation, self.resizer)


STRETCH = Crop()


@dataclass(frozen=True)
class Cropping:
    """Rule by which the crop boxes of a data set are chosen.

    ``stretch`` shows all of an image. ``crop`` shows the ``crop_fraction`` of it around its centre, without distortion.
    ``pad`` shows all of it without distortion, on black. With ``crop_seed``, an image that is read for training shows
    another random part in each epoch.

    Example: ``Cropping("crop", crop_fraction=0.875)``, or ``Cropping(crop_seed=0).crops(draws, epoch=3)``
    """

    resize: Resize = "stretch"
    crop_fraction: float = 1.0
    crop_seed: int | None = None
    interpolation: Interpolation = "bilinear"
    resizer: Resizer = "pillow"

    @property
    def crop(self) -> Crop:
        """The crop of an image that is not cropped at random."""
        return Crop(self.resize, self.crop_fraction, (), self.interpolation, self.resizer)

    def crops(self, draws: Int64s, epoch: int) -> list[Crop]:
        """Return the crop of each of ``draws``, int64 (n,), in ``epoch``: ``Cropping(crop_seed=0).crops(draws, 3)``."""
        if self.crop_seed is None:
            return [self.crop] * len(draws)
        rows = crop_numbers(self.crop_seed, epoch, draws).tolist()
        return [Crop("random", 1.0, numbers, self.interpolation, self.resizer) for numbers in rows]


STRETCHED = Cropping()


def crop_numbers(seed: int, epoch: int, draws: Int64s) -> Floats:
    """Return the random numbers that choose a part of each of ``draws`` in ``epoch``, float64 (n, 4)."""
    return uniform(mix(seed, epoch, _CROP_STREAM), draws, _NUMBERS_PER_CROP)


def crop_boxes(image: Size, numbers: Floats) -> Floats:
    """Return a random box for each row of ``numbers`` (n, 4): left, top, right and bottom in pixels, float64 (n, 4).

    A box has 8 % to 100 % of the area and an aspect ratio of 3:4 to 4:3 (Szegedy et al. 2015).
    Like torchvision's RandomResizedCrop, except that a side longer than the image is cut to the image instead of drawn
    again, and that a box may start between two pixels.
    """
    return np.stack(_edges(image, numbers.T), axis=1)


def _edges(image: Size, numbers: Sequence[Any] | Floats) -> tuple[Any, ...]:
    """Return left, top, right and bottom: of one box by four floats, or of n by (4, n).

    One box is not taken as n = 1, because a row of NumPy takes 40 µs longer than floats.
    """
    height, width = image
    area = height * width * (_MIN_AREA + (1 - _MIN_AREA) * numbers[_AREA])
    aspect = np.exp((2 * numbers[_ASPECT] - 1) * _LOG_ASPECT)
    box_height = np.minimum(np.sqrt(area / aspect), height)
    box_width = np.minimum(np.sqrt(area * aspect), width)
    top = numbers[_TOP] * (height - box_height)
    left = numbers[_LEFT] * (width - box_width)
    return left, top, left + box_width, top + box_height
