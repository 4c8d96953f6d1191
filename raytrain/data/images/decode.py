"""Decodes image files to uint8 pixels.

Files come from anywhere, so a decoder must neither be slow nor be led to take all memory. Most files are JPEGs:
libjpeg-turbo decodes them at 1/2, 1/4 or 1/8 of their size if that is enough. All others go to Pillow, which also says
what is wrong with a file. The size in the header is checked before any pixel is decoded.

Whatever decodes it, an image is turned as its EXIF block says, and not by XMP, and its colour profile is not used.
"""

from __future__ import annotations

import math

from raytrain.config.network import Size
from raytrain.data.images.crop_box import STRETCH, Crop
from raytrain.data.images.image_format import BadImage, ImageHeader, ImageShape
from raytrain.data.images.jpeg_header import JPEG, ON_ITS_SIDE, check_jpeg_size, exif_of_jpeg, exif_orientation
from raytrain.data.images.pillow_decode import decode_by_pillow, load_upright, opened, pixels_of
from raytrain.data.images.resize import ROUNDING, Pixels, cut


def decode(data: bytes, shape: ImageShape, crop: Crop = STRETCH) -> Pixels:
    """Return the pixels of one image file, uint8 (H, W, C): its ``crop``, resized to ``shape``.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if then nothing needs to be enlarged. The image is what a
    browser shows on a white page: turned as EXIF says, white where it is transparent, the first picture of an
    animation; but its colour profile is not used. 16 bits a channel become 8. Raises :class:`BadImage` for anything
    else, also for a truncated file, and before decoding for an image that would take more than 512 MiB of memory: more
    than 268 million pixels of a JPEG (89 million of a progressive one of up to 12 scans), 67 million of a PNG, GIF or
    BMP (44 million if it has transparency), 26 million of a WebP.

    Example: ``decode(Path("cat.jpg").read_bytes(), ImageShape(224, 224, 3))``.
    """
    if not data:
        raise BadImage("the file is empty")
    if not data.startswith(JPEG):
        return decode_by_pillow(data, shape, crop)
    import simplejpeg

    try:
        height, width, colour_space, _ = simplejpeg.decode_jpeg_header(data)
        if colour_space in ("CMYK", "YCCK"):
            return decode_by_pillow(data, shape, crop)
        height, width = int(height), int(width)
        check_jpeg_size(data, height, width)
        orientation = exif_orientation(exif_of_jpeg(data))
        size = (width, height) if orientation in ON_ITS_SIDE else (height, width)

        # Each side is reduced by 1, 2, 4 or 8, so that the crop box need not be enlarged. This is what Pillow's
        # ``draft`` does; libjpeg's other scales take longer than all of the image.
        box = crop(size, shape.size)
        scale = min(box.scale, 1.0)
        most = min(side // math.ceil(side * scale - ROUNDING) for side in size)
        factor = max(factor for factor in (1, 2, 4, 8) if factor <= most)
        pixels = simplejpeg.decode_jpeg(
            data,
            "GRAY" if shape.channels == 1 else "RGB",
            min_height=math.ceil(height / factor),
            min_width=math.ceil(width / factor),
            fastdct=False,
            fastupsample=False,
        )
    except BadImage:
        raise
    except ValueError:  # Pillow may be able to decode it, or says what is wrong with it
        return decode_by_pillow(data, shape, crop)
    pixels = _turned(pixels, orientation)
    decoded_size = pixels.shape[:2]
    return cut(pixels, box if decoded_size == size else crop(decoded_size, shape.size), shape.size)


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """Return pixels (H, W, C), or (W, H, C) on their side, upright, without a copy."""
    if orientation in ON_ITS_SIDE:
        pixels = pixels.swapaxes(0, 1)
    return pixels[:: -1 if orientation in (3, 4, 7, 8) else 1, :: -1 if orientation in (2, 3, 6, 7) else 1]


def shrink(data: bytes, shorter_side: int) -> Pixels | None:
    """Return all of an image, upright, with a shorter side of so many pixels, uint8 (H, W, C); None if it has no more.

    C is 1 for a grey image. Raises :class:`BadImage`, as :func:`decode` does.
    """
    crop = Crop(interpolation="bicubic")

    def shrunk(size: Size) -> Size:
        height, width = (round(side * shorter_side / min(size)) for side in size)
        return height, width

    with opened(data) as image:
        if min(image.size) <= shorter_side:
            return None
        upright = load_upright(image, data, lambda size: crop(size, shrunk(size)))
        num_channels = 1 if upright.mode in ("1", "L", "I;16") else 3
        return pixels_of(upright, ImageShape(*shrunk((upright.height, upright.width)), num_channels), crop)


def read_header(data: bytes) -> ImageHeader:
    """Return the header of an image file, without decoding the image. Raise BadImage if there is none."""
    with opened(data) as image:
        return ImageHeader(image.format or "", image.width, image.height)
