"""What the header of an image file says: its format and its size."""

from __future__ import annotations

import io
from typing import NamedTuple

from raytrain.data.decode import FORMATS, BadImage


class ImageHeader(NamedTuple):
    """Format and size in pixels of an image file, as it is stored: EXIF may say that it is shown rotated."""

    format: str
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader:
    """The header of an image file, without decoding the image. Raises BadImage if there is none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return ImageHeader(image.format or "", image.width, image.height)
    except Exception:  # Pillow's parsers raise all kinds of exceptions for damaged files
        raise BadImage("the file is not an image that can be read") from None
