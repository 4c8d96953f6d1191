"""Images as they are decoded: their shape, how large a file may be, and the error of a file that is no image."""

from __future__ import annotations

import math
from typing import NamedTuple

from raytrain.data.images.crop_box import STRETCHED, Cropping

MAX_IMAGE_BYTES = 512 << 20  # of memory while one image is decoded; as many are decoded at a time as there are CPUs


class BadImage(ValueError):
    """A file cannot be read as an image; the message is the reason, without the key."""


def too_large(width: int, height: int, limit: int) -> BadImage:
    """Return the error for an image of more than ``limit`` pixels."""
    return BadImage(f"the image is too large: {width:,} × {height:,} pixels, and at most {limit:,} are decoded")


class ImageHeader(NamedTuple):
    """Format and size in pixels of an image file as stored, before any rotation that EXIF asks for."""

    format: str
    width: int
    height: int


class ImageShape(NamedTuple):
    """The shape that every decoded image has: height and width in pixels, and 1 or 3 channels.

    Example: ``ImageShape(224, 224, 3).num_bytes == 150_528``
    """

    height: int
    width: int
    channels: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one decoded image."""
        return math.prod(self)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.height, self.width


class ImageFormat(NamedTuple):
    """The shape of the decoded images of a data set, and the part of each image that they show.

    ``as_files``: the images travel as files to the workers, which decode them on their GPUs.
    """

    shape: ImageShape
    cropping: Cropping = STRETCHED
    as_files: bool = False
