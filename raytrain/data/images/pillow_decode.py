"""Decodes image files by Pillow, so that they look as in a browser: upright, and white where they are transparent.

Pillow's decoders see only the formats that are read, never those of other untrusted files. Its own limits are replaced
where they are lower than raytrain's, and its errors, of which there are many kinds, become :class:`BadImage`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from raytrain.config.network import Size
from raytrain.data.images.crop_box import STRETCH, Crop, CropBox
from raytrain.data.images.image_format import MAX_IMAGE_BYTES, BadImage, ImageShape, too_large
from raytrain.data.images.jpeg_header import (
    JPEG,
    ON_ITS_SIDE,
    ORIENTATION,
    check_jpeg_size,
    exif_of_jpeg,
    exif_orientation,
)
from raytrain.data.images.resize import ROUNDING, Pixels, cut

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")  # Pillow's other decoders never see untrusted files
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTH = 24  # its position in a PNG, before the type of colour
_PNG_GREY, _PNG_RGB = 0, 2  # types of colour
_LOW_BYTES = "RGB;16L"  # Pillow's name of colours of 16 bits whose low bytes come first
_PNG_TEXT = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_SMALL_TEXT_BYTES = 1000  # compressed, of which at most 1 MiB can come
_TRANSPOSED = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}

# What a file is that is none of these, by its first bytes.
_NOT_READ = "{}, which is not read; convert it to PNG or JPEG"
_OTHER_FILES = {
    b"version https://git-lfs.github.com/spec/": "a pointer of Git LFS; `git lfs pull` fetches the image",
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0"), _NOT_READ.format("TIFF")),
    **dict.fromkeys((b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"), _NOT_READ.format("JPEG 2000")),
    **dict.fromkeys((b"\0\0\0\x0cJXL ", b"\xff\x0a"), _NOT_READ.format("JPEG XL")),
    b"<": "text, such as a page of a web server",
    b"%PDF": "PDF",
    b"PK\x03\x04": "a ZIP archive",
    **dict.fromkeys((JPEG, _PNG, b"GIF8", b"RIFF"), "a damaged image, or of a rare kind"),
}
_ISO_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"msf1": "HEIC"}


def decode_by_pillow(data: bytes, shape: ImageShape, crop: Crop) -> Pixels:
    """Return the pixels of one image file, as :func:`raytrain.data.images.decode.decode` does."""
    with opened(data) as image:
        upright = load_upright(image, data, lambda size: crop(size, shape.size))
        return pixels_of(upright, shape, crop)


def load_upright(image: Any, data: bytes, box: Callable[[Size], CropBox]) -> Any:
    """Decode an image of which only the header was read, and return it upright.

    A JPEG is decoded at a fraction of its size if that is enough for the ``box`` of an image of its size. Raises
    BadImage if the image would need too much memory.
    """
    orientation = 1
    if image.format == "JPEG":
        check_jpeg_size(data, image.height, image.width)
        orientation = exif_orientation(exif_of_jpeg(data))
        upright = image.height, image.width
        if orientation in ON_ITS_SIDE:
            upright = image.width, image.height
        scale = min(box(upright).scale, 1.0)
        image.draft(None, (math.ceil(image.width * scale - ROUNDING), math.ceil(image.height * scale - ROUNDING)))

    # What Pillow needs at its peak, as measured: for the decoder's copies, rotation and a white background.
    frame = image.tile[0][1] if image.format == "GIF" and image.tile else None
    is_frame_smaller = frame is not None and tuple(frame) != (0, 0, *image.size)
    bytes_per_pixel = 20 if image.format == "WEBP" else 8
    if image.format != "WEBP" and (image.has_transparency_data or "progressive" in image.info or is_frame_smaller):
        bytes_per_pixel = 12
    limit = MAX_IMAGE_BYTES // bytes_per_pixel
    if image.width * image.height > limit:
        raise too_large(image.width, image.height, limit)
    image.load()

    # What Pillow makes of transparency otherwise than browsers do.
    if is_frame_smaller:
        image = _on_transparent_canvas(image, frame)
    elif image.format == "PNG" and "transparency" in image.info:
        image = _with_transparent_colour(image, data)
    if image.format in ("PNG", "WEBP"):
        orientation = exif_orientation(image.info.get("exif"))
    return _turn(image, orientation)


def turn_upright(image: Any) -> Any:
    """Return an image of Pillow upright, as :func:`decode` turns its file: by EXIF, or the tags of a TIFF."""
    tags = getattr(image, "tag_v2", None)
    return _turn(image, exif_orientation(image.info.get("exif")) if tags is None else tags.get(ORIENTATION, 1))


def _turn(image: Any, orientation: int) -> Any:
    from PIL import Image

    return image.transpose(Image.Transpose[_TRANSPOSED[orientation]]) if orientation in _TRANSPOSED else image


def _on_transparent_canvas(image: Any, frame: Any) -> Any:
    """Return a GIF whose first ``frame`` is smaller than its canvas: browsers show nothing beside the frame."""
    from PIL import Image

    canvas = Image.new("RGBA", image.size, (255, 255, 255, 0))
    canvas.paste(image.crop(frame).convert("RGBA"), frame)
    return canvas


def _with_transparent_colour(image: Any, data: bytes) -> Any:
    """Return a PNG with the transparency of one colour that it names, which Pillow compares with pixels of 8 bits."""
    from PIL import Image

    transparent = image.info["transparency"]
    depth, colour_type = data[_PNG_DEPTH], data[_PNG_DEPTH + 1]
    if colour_type == _PNG_GREY and depth < 8 and transparent < 2**depth:
        image.info["transparency"] = transparent * 255 // (2**depth - 1)
    elif colour_type == _PNG_RGB and depth == 16:
        # Pillow keeps the high bytes alone; read as if the low ones came first, the file gives these.
        with opened(data) as other:
            other.tile = [tile._replace(args=_LOW_BYTES) for tile in other.tile]
            other.load()
            low = np.asarray(other)
        colour = np.array(transparent)
        is_opaque = ((np.asarray(image) != colour >> 8) | (low != (colour & 255))).any(axis=2)
        del image.info["transparency"]
        image.putalpha(Image.fromarray(is_opaque.astype(np.uint8) * np.uint8(255)))
    return image


def pixels_of(image: Any, shape: ImageShape, crop: Crop = STRETCH) -> Pixels:
    """Return the pixels of an upright image of Pillow, uint8 (H, W, C), as :func:`decode` makes them of its file."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip instead of scale
        values = np.asarray(image)
        white = values == image.info.get("transparency", -1)
        image = Image.fromarray(np.where(white, 255, values >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(layer, mask=layer)
    mode = "L" if shape.channels == 1 else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    return cut(image, crop((image.height, image.width), shape.size), shape.size)


@contextmanager
def opened(data: bytes) -> Iterator[Any]:
    """Open an image by Pillow, which reads only its header yet. What Pillow raises meanwhile becomes BadImage."""
    from PIL import Image

    try:
        with _open_jpeg(data) or Image.open(io.BytesIO(_without_text(data)), formats=FORMATS) as image:
            yield image
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(f"the image is too large: {error}") from None
    except Image.UnidentifiedImageError:
        # Say what the file is, if its first bytes are known.
        if data[4:8] == b"ftyp":
            kind = _NOT_READ.format(_ISO_BRANDS.get(data[8:12], "a video or the like"))
        else:
            kinds = (kind for start, kind in _OTHER_FILES.items() if data.lstrip().startswith(start))
            kind = next(kinds, "not an image that can be read" if any(data) else "nothing but zeros")
        raise BadImage(f"the file is {kind}") from None
    except Exception as error:  # Pillow's decoders raise all kinds of exceptions for damaged files
        raise BadImage(f"the image cannot be decoded: {str(error) or type(error).__name__}") from None


def _open_jpeg(data: bytes) -> Any:
    """Open a JPEG without Pillow's own limit, which is below the one here; None if it is damaged, or another file."""
    from PIL.JpegImagePlugin import JpegImageFile

    with suppress(SyntaxError):
        return JpegImageFile(io.BytesIO(data)) if data.startswith(JPEG) else None
    return None


def _without_text(data: bytes) -> bytes:
    """Return a PNG without its large texts and colour profile: Pillow refuses the image if one has more than 1 MiB."""
    if not data.startswith(_PNG):
        return data
    kept, start, position = [], 0, len(_PNG)
    while position + 8 <= len(data):
        stop = position + 12 + int.from_bytes(data[position : position + 4], "big")
        if data[position + 4 : position + 8] in _PNG_TEXT and stop - position > _SMALL_TEXT_BYTES:
            kept.append(data[start:position])
            start = stop
        position = stop
    return b"".join([*kept, data[start:]]) if kept else data
