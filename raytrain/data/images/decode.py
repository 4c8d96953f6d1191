"""Decodes image files to uint8 pixels.

Files come from anywhere, so a decoder must neither be slow nor be led to take all memory. Most files are JPEGs:
libjpeg-turbo decodes them at 1/2, 1/4 or 1/8 of their size if that is enough. All others go to Pillow, which also says
what is wrong with a file. The size in the header is checked before any pixel is decoded.

Whatever decodes it, an image looks as in a browser: it is turned as its EXIF block says, and not by XMP, it is white
where it is transparent, and its colour profile is not used. Pillow's decoders see only the formats that are read, never
those of other untrusted files. Its own limits are replaced if they are lower than raytrain's, and its errors, of
which there are many kinds, become :class:`BadImage`.

A JPEG is a sequence of segments: a marker of two bytes, 0xff and its kind, then its length and content. Segments of the
kind APP1 hold EXIF, a *frame* says the size and how the pixels are coded, and each *scan* holds some of them. In a
baseline JPEG one scan has all. A progressive one has several, each of which refines all pixels: it is decoded once for
each scan, and its coefficients are in memory until the last. So few bytes may ask for hours, and the segments are read
here before a decoder gets the file.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from raytrain.config.network import Size
from raytrain.data.images.crop_box import ROUNDING, STRETCH, Crop, CropBox, Pixels, cut
from raytrain.data.images.image_format import MAX_IMAGE_BYTES, BadImage, ImageHeader, ImageShape, too_large

_JPEG = b"\xff\xd8\xff"
"""The first bytes of a JPEG."""

_MIRRORED_ROWS, _MIRRORED_COLUMNS = (3, 4, 7, 8), (2, 3, 6, 7)
"""Orientations of EXIF at which rows, or columns, are in reverse order, once width and height are swapped."""

_ON_ITS_SIDE = (5, 6, 7, 8)
"""Orientations of EXIF at which width and height are swapped."""

_ORIENTATION, _SHORT = 0x0112, 3  # the tag of EXIF, and its type
_EXIF = b"Exif\0\0"
_APP1, _ADOBE_MARKER, _START_OF_SCAN_MARKER = 0xE1, 0xEE, 0xDA
_BASELINE, _EXTENDED, _PROGRESSIVE = 0xC0, 0xC1, 0xC2  # markers of frames
_ADOBE = b"Adobe"
_END_OF_IMAGE = b"\xff\xd9"  # not within compressed data
_MAX_JPEG_PIXELS = 1 << 28  # phones have 200 million; a large JPEG is decoded at a fraction of its size
_MAX_SCANNED_PIXELS = 1 << 30  # over all scans of a JPEG, which may be many in few bytes; about two seconds
_MIN_SCAN_BYTES = 10  # of the file; no scan is shorter
_START_OF_SCAN = b"\xff\xda"  # not within compressed data, where a zero follows each 0xff
_COEFFICIENT_BYTES = 6  # per pixel of a JPEG that is read in several scans: three components of 16 bits

_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")  # Pillow's other decoders never see untrusted files
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTH = 24  # its position in a PNG, before the type of colour
_PNG_GREY, _PNG_RGB = 0, 2  # types of colour
_LOW_BYTES = "RGB;16L"  # Pillow's name of colours of 16 bits whose low bytes come first
_PNG_TEXT = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_LOOKED_AT_BYTES = 256  # to tell whether a file is text
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

# Kinds of files of other formats, by their first bytes.
_NOT_READ = "{}, which is not read; convert it to PNG or JPEG"
_OTHER_FILES = {
    b"version https://git-lfs.github.com/spec/": "a pointer of Git LFS; `git lfs pull` fetches the image",
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0"), _NOT_READ.format("TIFF")),
    **dict.fromkeys((b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"), _NOT_READ.format("JPEG 2000")),
    **dict.fromkeys((b"\0\0\0\x0cJXL ", b"\xff\x0a"), _NOT_READ.format("JPEG XL")),
    b"<": "text, such as a page of a web server",
    b"%PDF": "PDF",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "compressed with gzip; decompress it",
    b"\x93NUMPY": "an array of NumPy",
    b"\0\5\x16\7": "attributes of a file, which a Mac keeps beside it",
    **dict.fromkeys((_JPEG, _PNG, b"GIF8", b"RIFF"), "a damaged image, or of a rare kind"),
}
_OTHER_FORMATS = {_PNG: "PNG", b"RIFF": "WebP", b"GIF8": "GIF", b"BM": "BMP"}
_ISO_BRANDS = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"hevc": "HEIC",
    b"mif1": "HEIC",
    b"msf1": "HEIC",
}


def is_unusual_png(data: bytes) -> bool:
    """Return True if an image file is a PNG whose pixels are anything but 8 bits of red, green and blue each."""
    return data.startswith(_PNG) and data[_PNG_DEPTH : _PNG_DEPTH + 2] != bytes((8, _PNG_RGB))


def decode(data: bytes, shape: ImageShape, crop: Crop = STRETCH) -> Pixels:
    """Return the pixels of one image file, uint8 (H, W, C): the part that ``crop`` says, resized to ``shape``.

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
    if not data.startswith(_JPEG):
        return _decode_by_pillow(data, shape, crop)
    import simplejpeg

    try:
        # simplejpeg is faster than Pillow, but makes no RGB of CMYK, and knows nothing of EXIF.
        height, width, colour_space, _ = simplejpeg.decode_jpeg_header(data)
        if colour_space in ("CMYK", "YCCK"):
            return _decode_by_pillow(data, shape, crop)
        height, width = int(height), int(width)
        orientation = _checked_orientation(data, height, width)
        size = (width, height) if orientation in _ON_ITS_SIDE else (height, width)

        # Both sides are divided by 1, 2, 4 or 8: the largest of these with which the crop box need not be enlarged.
        # This is what Pillow's ``draft`` does; libjpeg's other scales take longer than the whole image does.
        box = crop(size, shape.size)
        scale = min(box.scale, 1.0)
        largest_factor = min(side // math.ceil(side * scale - ROUNDING) for side in size)
        factor = max(factor for factor in (1, 2, 4, 8) if factor <= largest_factor)
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
    except ValueError:  # Pillow may be able to decode the image, or raises an error with the reason
        return _decode_by_pillow(data, shape, crop)

    # Turn the pixels upright, without a copy. A file that is stored on its side has them as (W, H, C).
    if orientation in _ON_ITS_SIDE:
        pixels = pixels.swapaxes(0, 1)
    row_step = -1 if orientation in _MIRRORED_ROWS else 1
    column_step = -1 if orientation in _MIRRORED_COLUMNS else 1
    pixels = pixels[::row_step, ::column_step]

    # Pixels that were decoded at a fraction of the size have a crop box of their own.
    decoded_size = pixels.shape[:2]
    return cut(pixels, box if decoded_size == size else crop(decoded_size, shape.size), shape.size)


def shrink(data: bytes, shorter_side: int) -> Pixels | None:
    """Return the whole image, upright, with a shorter side of ``shorter_side`` pixels, uint8 (H, W, C).

    Return None if the image is not larger than that. C is 1 for a grey image, else 3. Raises :class:`BadImage`, as
    :func:`decode` does.
    """
    whole_image = Crop("stretch", interpolation="bicubic")  # the sides are in proportion, so nothing is distorted

    def shrunk_size(size: Size) -> Size:
        """Return height and width in proportion to ``size``, with the wanted shorter side."""
        height, width = (round(side * shorter_side / min(size)) for side in size)
        return height, width

    with _opened(data) as image:
        if min(image.size) <= shorter_side:
            return None
        upright = _load_upright(image, data, lambda size: whole_image(size, shrunk_size(size)))
        num_channels = 1 if upright.mode in ("1", "L", "I;16") else 3
        shape = ImageShape(*shrunk_size((upright.height, upright.width)), num_channels)
        return pixels_of(upright, shape, whole_image)


def read_header(data: bytes) -> ImageHeader:
    """Return the header of an image file, without decoding the image. Raise BadImage if there is none."""
    with _opened(data) as image:
        return ImageHeader(image.format or "", image.width, image.height)


# Pillow.


def _decode_by_pillow(data: bytes, shape: ImageShape, crop: Crop) -> Pixels:
    """Return the pixels of one image file, as :func:`decode` does, with Pillow alone."""
    with _opened(data) as image:
        upright = _load_upright(image, data, lambda size: crop(size, shape.size))
        return pixels_of(upright, shape, crop)


def _load_upright(image: Any, data: bytes, box: Callable[[Size], CropBox]) -> Any:
    """Decode an image of which Pillow has read only the header, and return it upright.

    ``box`` returns the crop box for an image's height and width. A JPEG is decoded at a fraction of its size if that is
    enough for the box. Raises BadImage if the image would need too much memory or time.
    """
    # Let Pillow decode a JPEG at a fraction of its size.
    orientation = 1
    if image.format == "JPEG":
        orientation = _checked_orientation(data, image.height, image.width)
        upright = image.height, image.width
        if orientation in _ON_ITS_SIDE:
            upright = image.width, image.height
        scale = min(box(upright).scale, 1.0)
        image.draft(None, (math.ceil(image.width * scale - ROUNDING), math.ceil(image.height * scale - ROUNDING)))

    # Refuse images that are too large. The bytes per pixel are what Pillow takes at its peak, as measured: with the
    # decoder's copies, the rotation and a white background.
    frame = image.tile[0][1] if image.format == "GIF" and image.tile else None
    is_frame_smaller = frame is not None and tuple(frame) != (0, 0, *image.size)
    bytes_per_pixel = 20 if image.format == "WEBP" else 8
    if image.format != "WEBP" and (image.has_transparency_data or "progressive" in image.info or is_frame_smaller):
        bytes_per_pixel = 12
    limit = MAX_IMAGE_BYTES // bytes_per_pixel
    if image.width * image.height > limit:
        raise too_large(image.width, image.height, limit)
    image.load()

    # Show transparency as browsers do, where Pillow does not.
    if is_frame_smaller:
        image = _on_transparent_canvas(image, frame)
    elif image.format == "PNG" and "transparency" in image.info:
        image = _with_transparent_colour(image, data)
    if image.format in ("PNG", "WEBP"):
        orientation = _exif_orientation(image.info.get("exif"))
    return _rotated(image, orientation)


def turn_upright(image: Any) -> Any:
    """Return an image of Pillow upright, as :func:`decode` turns its file: by EXIF, or, for a TIFF, by its tags."""
    tags = getattr(image, "tag_v2", None)
    return _rotated(image, _exif_orientation(image.info.get("exif")) if tags is None else tags.get(_ORIENTATION, 1))


def _rotated(image: Any, orientation: int) -> Any:
    """Return an image of Pillow as it is upright, by the ``orientation`` that EXIF gives it."""
    from PIL import Image

    return image.transpose(Image.Transpose[_TRANSPOSED[orientation]]) if orientation in _TRANSPOSED else image


def _on_transparent_canvas(image: Any, frame: Any) -> Any:
    """Return a GIF whose first ``frame`` is smaller than its canvas, transparent beside the frame as in browsers.

    ``frame`` is left, top, right and bottom in pixels.
    """
    from PIL import Image

    canvas = Image.new("RGBA", image.size, (255, 255, 255, 0))
    canvas.paste(image.crop(frame).convert("RGBA"), frame)
    return canvas


def _with_transparent_colour(image: Any, data: bytes) -> Any:
    """Return a PNG in which exactly the pixels of the colour that it declares transparent are transparent.

    Pillow compares this colour with pixels of 8 bits, which is wrong for images of fewer or of 16 bits.
    """
    from PIL import Image

    transparent = image.info["transparency"]
    depth, colour_type = data[_PNG_DEPTH], data[_PNG_DEPTH + 1]
    if colour_type == _PNG_GREY and depth < 8 and transparent < 2**depth:
        image.info["transparency"] = transparent * 255 // (2**depth - 1)
    elif colour_type == _PNG_RGB and depth == 16:
        # Pillow keeps only the high byte of each channel. Decoded with swapped bytes, the file yields the low ones.
        with _opened(data) as swapped:
            swapped.tile = [tile._replace(args=_LOW_BYTES) for tile in swapped.tile]
            swapped.load()
            low_bytes = np.asarray(swapped)
        colour = np.array(transparent)
        is_opaque = ((np.asarray(image) != colour >> 8) | (low_bytes != (colour & 255))).any(axis=2)
        del image.info["transparency"]
        image.putalpha(Image.fromarray(is_opaque.astype(np.uint8) * np.uint8(255)))
    return image


def pixels_of(image: Any, shape: ImageShape, crop: Crop = STRETCH) -> Pixels:
    """Return the pixels of an upright image of Pillow, uint8 (H, W, C), as :func:`decode` makes them of its file."""
    from PIL import Image

    # Make 8 bits a channel, and white of what is transparent. Pillow would clip grey values of 16 bits, not scale them.
    if image.mode.startswith("I"):
        values = np.asarray(image)
        is_transparent = values == image.info.get("transparency", -1)
        image = Image.fromarray(np.where(is_transparent, 255, values >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(layer, mask=layer)
    mode = "L" if shape.channels == 1 else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    return cut(image, crop((image.height, image.width), shape.size), shape.size)


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open an image with Pillow, which at first reads only the header. Exceptions in the block become BadImage."""
    from PIL import Image

    try:
        with _open_jpeg(data) or Image.open(io.BytesIO(_without_text(data)), formats=_FORMATS) as image:
            yield image
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(f"the image is too large: {error}") from None
    except Image.UnidentifiedImageError:
        # Say what the file is, if its first bytes are known.
        if data[4:8] == b"ftyp":
            kind = _NOT_READ.format(_ISO_BRANDS.get(data[8:12], "a video or the like"))
        elif data[128:132] == b"DICM":
            kind = _NOT_READ.format("DICOM")
        else:
            kinds = (kind for start, kind in _OTHER_FILES.items() if data.lstrip().startswith(start))
            kind = next(kinds, _kind_of_content(data))
        raise BadImage(f"the file is {kind}") from None
    except Exception as error:  # Pillow's decoders raise all kinds of exceptions for damaged files
        raise BadImage(f"the image cannot be decoded: {str(error) or type(error).__name__}") from None


def _kind_of_content(data: bytes) -> str:
    """Return what a file is that begins like no format. A text is not shown: it may be a file of somebody's keys."""
    if not any(data):
        return "nothing but zeros"
    start = data[:_LOOKED_AT_BYTES]
    is_text = start.isascii() and all(chr(byte).isprintable() or chr(byte).isspace() for byte in start)
    return "text, such as an error of a server or a path" if is_text else "not an image that can be read"


def _open_jpeg(data: bytes) -> Any:
    """Open a JPEG without Pillow's size limit, which is below ours; return None if it is damaged, or no JPEG."""
    from PIL.JpegImagePlugin import JpegImageFile

    with suppress(SyntaxError):
        return JpegImageFile(io.BytesIO(data)) if data.startswith(_JPEG) else None
    return None


def _without_text(data: bytes) -> bytes:
    """Return a PNG without large texts and colour profiles: Pillow refuses an image with one of more than 1 MiB.

    Other files are returned as they are.
    """
    if not data.startswith(_PNG):
        return data

    # A PNG is a sequence of chunks: 4 bytes of length, 4 of type, the content, and 4 of a checksum. ``start`` is where
    # the bytes begin that are kept next.
    kept, start, position = [], 0, len(_PNG)
    while position + 8 <= len(data):
        stop = position + 12 + int.from_bytes(data[position : position + 4], "big")
        if data[position + 4 : position + 8] in _PNG_TEXT and stop - position > _SMALL_TEXT_BYTES:
            kept.append(data[start:position])
            start = stop
        position = stop
    return b"".join([*kept, data[start:]]) if kept else data


# The segments of a JPEG before its pixels.


def _checked_orientation(data: bytes, height: int, width: int) -> int:
    """Check the size of a JPEG, and return the orientation that its EXIF block gives.

    Raises BadImage if decoding would take too much time, or the coefficients of a progressive JPEG too much memory.
    """
    num_pixels = width * height
    limit = _MAX_JPEG_PIXELS

    # Limit the pixels of all scans together. Only a large image, or one of many bytes, can have so many scans that they
    # matter: a file of n bytes has at most n / _MIN_SCAN_BYTES.
    if num_pixels * len(data) > _MAX_SCANNED_PIXELS * _MIN_SCAN_BYTES and _is_read_in_scans(data):
        num_scans = max(1, data.count(_START_OF_SCAN))
        if num_pixels * num_scans > _MAX_SCANNED_PIXELS:
            raise BadImage(f"the image is too large: {width:,} × {height:,} pixels in {num_scans:,} scans of a JPEG")
        limit = MAX_IMAGE_BYTES // _COEFFICIENT_BYTES
    if num_pixels > limit:
        raise too_large(width, height, limit)

    exif = (content for marker, content in _segments(data) if marker == _APP1 and content.startswith(_EXIF))
    return _exif_orientation(next(exif, None))


def plain_jpeg_size(data: bytes) -> Size | str:
    """Return the height and width of a plain JPEG, upright, or the kind of another file in a few words.

    A GPU decodes plain ones: whole, baseline, of 8 bits a channel, grey or YCbCr, with all channels in one scan.

    Example: ``plain_jpeg_size(Path("cat.png").read_bytes()) == "PNG"``
    """
    # The first bytes tell other formats apart.
    if not data.startswith(_JPEG):
        return next((kind for start, kind in _OTHER_FORMATS.items() if data.startswith(start)), "no image")

    # Collect the EXIF block and the frame. The first scan comes after both: then all that matters is known. A frame is
    # bits a channel (1 byte), height, width (2 each), the number of channels (1), and 3 bytes for each channel, of
    # which the first is its name. A scan begins with the number of its channels.
    frame = exif = None
    for marker, content in _segments(data):
        if marker == _APP1 and exif is None and content.startswith(_EXIF):
            exif = content
        elif marker == _ADOBE_MARKER and content.startswith(_ADOBE) and content[11:12] == b"\0":
            return "JPEG in RGB or CMYK"  # Adobe's marker says that the channels are not YCbCr
        elif _is_frame(marker):
            if marker != _BASELINE:
                return "progressive JPEG" if marker == _PROGRESSIVE else "JPEG of a rare kind"
            frame = content
        elif marker == _START_OF_SCAN_MARKER and frame is not None and len(frame) > 5:
            bits, height, width, num_channels = struct.unpack_from(">BHHB", frame)
            names_of_channels = frame[6::3]
            if num_channels not in (1, 3) or names_of_channels == b"RGB":
                return "JPEG in RGB or CMYK"
            has_all_channels = content[:1] == bytes([num_channels])  # of the scan
            if bits != 8 or not has_all_channels or not (height and width):
                return "JPEG of a rare kind"
            if data.rfind(_END_OF_IMAGE) < data.rfind(_START_OF_SCAN):  # not those of a thumbnail in EXIF
                return "JPEG without an end"
            return (width, height) if _exif_orientation(exif) in _ON_ITS_SIDE else (height, width)
    return "JPEG of a rare kind"


def _exif_orientation(exif: bytes | None) -> int:
    """Return the orientation in an EXIF block, 1 to 8; 1 (upright) if there is none, or the block is damaged."""
    if exif is None:
        return 1

    # The block is a TIFF: the order of its bytes, and where its list of tags starts, each tag of 12 bytes.
    content = exif.removeprefix(_EXIF)
    with suppress(KeyError, struct.error):
        order = {b"II": "<", b"MM": ">"}[content[:2]]
        (start,) = struct.unpack_from(order + "I", content, 4)
        (num_tags,) = struct.unpack_from(order + "H", content, start)
        for position in range(start + 2, start + 2 + 12 * num_tags, 12):
            tag, kind, count, value = struct.unpack_from(order + "HHIH", content, position)
            if tag == _ORIENTATION:
                return value if (kind, count) == (_SHORT, 1) and 1 <= value <= 8 else 1
    return 1


def _is_read_in_scans(data: bytes) -> bool:
    """Return True if a JPEG is progressive, has its components in separate scans, or has an unusual header."""
    num_components = 0  # of the frame, once it is found
    for marker, content in _segments(data):
        if marker == _START_OF_SCAN_MARKER:  # whose content begins with the number of its components
            return content[:1] < bytes([num_components])
        if _is_frame(marker):
            if marker not in (_BASELINE, _EXTENDED):
                return True
            num_components = content[5] if len(content) > 5 else 0
    return True


def _is_frame(marker: int) -> bool:
    """Return True if the marker is that of a frame. Between those of frames are two of tables and an unused one."""
    return 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield marker and content of each segment of a JPEG, up to its first scan, or to where the file is damaged."""
    position = 2  # after the two bytes that begin every JPEG
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a byte that fills up, before the marker itself
            position += 1
            continue
        stop = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        yield marker, data[position + 4 : stop]
        if marker == _START_OF_SCAN_MARKER:
            return
        position = stop
