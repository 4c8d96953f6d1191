"""Decode image files to uint8 pixels of a given size. Never imports torch, because it runs in data tasks."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain.data.manifest import Manifest
from raytrain.data.shards import DamagedShard, read_packed
from raytrain.storage.base import ObjectChanged, Store

Pixels = npt.NDArray[np.uint8]

_JPEG = b"\xff\xd8\xff"
_HEADER_BYTES = 4096
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")  # Pillow's other decoders never see untrusted files
_MAX_IMAGE_BYTES = 512 << 20  # of memory while one image is decoded: there are as many readers as CPUs
_MAX_JPEG_PIXELS = 1 << 28  # phones have 200 million; a large JPEG is decoded at a fraction of its size
_MAX_SCANNED_PIXELS = 1 << 30  # over all scans of a JPEG, which may be many in few bytes; about two seconds
_MIN_SCAN_BYTES = 10
_START_OF_SCAN = b"\xff\xda"  # not within compressed data, where a zero follows each 0xff
_COEFFICIENT_BYTES = 6  # per pixel of a JPEG that is read in several scans: three components of 16 bits


class BadImage(ValueError):
    """A file cannot be read as an image; the message is the reason, without the key."""


@dataclass(frozen=True)
class ImageShape:
    """The shape that every decoded image has."""

    height: int
    width: int
    channels: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one decoded image."""
        return self.height * self.width * self.channels


@dataclass(frozen=True)
class ImageReader:
    """Fetches and decodes the images of one store."""

    store: Store
    shape: ImageShape

    def read(self, manifest: Manifest) -> tuple[Pixels, dict[int, str]]:
        """The images of ``manifest``, uint8 (n, H, W, C), and index and reason of each one that could not be read.

        The pixels of an unreadable image are 0. Raises StorageError if the store refuses or cannot be reached.
        """
        shape = self.shape
        images = np.zeros((len(manifest), shape.height, shape.width, shape.channels), np.uint8)
        bad: dict[int, str] = {}
        for index, data in enumerate(self._contents(manifest)):
            try:
                images[index] = decode(_require_bytes(data), shape)
            except BadImage as error:
                bad[index] = str(error)
        return images, bad

    def _contents(self, manifest: Manifest) -> list[bytes | Exception]:
        if manifest.packing is not None:
            return read_packed(self.store, manifest.packing)
        return self.store.get_many(manifest.keys.to_pylist(), manifest.etags.to_pylist())


def decode(data: bytes, shape: ImageShape) -> Pixels:
    """Pixels of one image file, uint8 (H, W, C), stretched to ``shape``.

    The image is what a browser shows on a white page: rotated as EXIF says, white where it is transparent, the first
    picture of an animation. 16 bits a channel become 8. Raises :class:`BadImage` for anything else, also for a
    truncated file, and before decoding for an image that would take more than 512 MiB of memory: more than 268 million
    pixels of a JPEG (89 million of a progressive one of up to 12 scans), 67 million of a PNG, GIF or BMP (44 million
    if it has transparency), 26 million of a WebP.
    """
    if not data:
        raise BadImage("the file is empty")
    if data.startswith(_JPEG) and b"Exif" not in data[:_HEADER_BYTES]:
        pixels = _decode_jpeg(data, shape)
        if pixels is not None:
            return pixels
    return _decode_any(data, shape)


def _require_bytes(data: bytes | Exception) -> bytes:
    """The content of a file; raises BadImage if the file itself is at fault, and any other exception as it is."""
    if isinstance(data, FileNotFoundError):
        raise BadImage("the object is gone")
    if isinstance(data, ObjectChanged):
        raise BadImage("the object was replaced after it was listed")
    if isinstance(data, DamagedShard):
        raise BadImage(str(data))
    if isinstance(data, Exception):
        raise data
    return data


def _decode_jpeg(data: bytes, shape: ImageShape) -> Pixels | None:
    """Decode with libjpeg-turbo, which is fast. None if Pillow must decode the file, or say what is wrong with it."""
    import simplejpeg

    colours = "GRAY" if shape.channels == 1 else "RGB"
    try:
        height, width, colour_space, _ = simplejpeg.decode_jpeg_header(data)
        if colour_space in ("CMYK", "YCCK"):
            return None
        _check_jpeg_size(data, int(width), int(height))
        pixels = simplejpeg.decode_jpeg(
            data, colours, min_height=shape.height, min_width=shape.width, fastdct=False, fastupsample=False
        )
    except BadImage:
        raise
    except ValueError:
        return None
    return pixels if pixels.shape[:2] == (shape.height, shape.width) else _resize(pixels, shape)


def _resize(pixels: Pixels, shape: ImageShape) -> Pixels:
    from PIL import Image

    image = Image.fromarray(pixels[:, :, 0] if shape.channels == 1 else pixels)
    return _to_array(image.resize((shape.width, shape.height), Image.Resampling.BILINEAR), shape)


def _decode_any(data: bytes, shape: ImageShape) -> Pixels:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(image, data, shape)
            image.load()
            _rotate_upright(image)
            converted = _convert(image, "L" if shape.channels == 1 else "RGB")
            if converted.size != (shape.width, shape.height):
                converted = converted.resize((shape.width, shape.height), Image.Resampling.BILINEAR)
            return _to_array(converted, shape)
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(f"the image is too large: {error}") from None
    except Image.UnidentifiedImageError:
        raise BadImage("the file is not an image that can be read") from None
    except Exception as error:  # Pillow's decoders raise all kinds of exceptions for damaged files
        raise BadImage(f"the image cannot be decoded: {str(error) or type(error).__name__}") from None


def _check_jpeg_size(data: bytes, width: int, height: int) -> None:
    """Raise BadImage if a JPEG needs too much time, or the coefficients of a progressive one too much memory."""
    num_pixels = width * height
    if num_pixels * len(data) > _MAX_SCANNED_PIXELS * _MIN_SCAN_BYTES and _is_read_in_scans(data):
        num_scans = max(1, data.count(_START_OF_SCAN))
        if num_pixels * num_scans > _MAX_SCANNED_PIXELS:
            raise BadImage(f"the image is too large: {width:,} × {height:,} pixels in {num_scans:,} scans of a JPEG")
        _check_pixels(width, height, _MAX_IMAGE_BYTES // _COEFFICIENT_BYTES)
    elif num_pixels > _MAX_JPEG_PIXELS:
        _check_pixels(width, height, _MAX_JPEG_PIXELS)


def _is_read_in_scans(data: bytes) -> bool:
    """Whether a JPEG is progressive, or has components in scans of their own; also if its header is unusual."""
    position, num_components = 2, 0
    while position + 9 < len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xDA:  # a scan, and the number of its components
            return data[position + 4] < num_components
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the frame
            if marker not in (0xC0, 0xC1):
                return True
            num_components = data[position + 9]
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return True


def _check_size(image: Any, data: bytes, shape: ImageShape) -> None:
    """Raise BadImage if the image, of which only the header was read, would need too much memory."""
    limit = _MAX_IMAGE_BYTES // _bytes_per_pixel(image)
    if image.format in ("JPEG", "MPO"):
        _check_jpeg_size(data, image.width, image.height)
        if image.width * image.height > limit:
            image.draft(None, (shape.width, shape.height))  # decodes at a fraction of the size
    _check_pixels(image.width, image.height, limit)


def _bytes_per_pixel(image: Any) -> int:
    """Memory that Pillow needs at its peak, as measured: for the decoder's copies, rotation and a white background."""
    if image.format == "WEBP":
        return 20
    if image.has_transparency_data or "progressive" in image.info:
        return 12
    return 8


def _check_pixels(width: int, height: int, limit: int) -> None:
    if width * height > limit:
        raise BadImage(f"the image is too large: {width:,} × {height:,} pixels, and at most {limit:,} are decoded")


def _rotate_upright(image: Any) -> None:
    from PIL import ImageOps

    with suppress(Exception):  # an image with a damaged EXIF block is not rotated
        ImageOps.exif_transpose(image, in_place=True)


def _convert(image: Any, mode: str) -> Any:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip instead of scale
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(layer, mask=layer)
    return image if image.mode == mode else image.convert(mode)


def _to_array(image: Any, shape: ImageShape) -> Pixels:
    return np.asarray(image, dtype=np.uint8).reshape(shape.height, shape.width, shape.channels)
