"""Image files of many formats, made anew."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Array = npt.NDArray[np.uint8]
HEIGHT, WIDTH = 24, 40


def photo() -> Array:
    """Make a smooth picture without symmetry, (24, 40, 3)."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.stack([6 * x, 10 * y, 3 * x + 3 * y], axis=2).astype(np.uint8)


def encoded(image: Image.Image | Array, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    picture.save(file, format, **options)
    return file.getvalue()


def png(width: int, height: int, bits: int, colour_type: int, idat: bytes) -> bytes:
    """Make a PNG file from its compressed rows, for kinds that Pillow cannot write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", idat) + chunk(b"IEND", b"")


def jpeg_bomb(side: int, **options: Any) -> bytes:
    """Make a small JPEG whose header claims ``side`` x ``side`` pixels."""
    data = bytearray(encoded(photo(), "JPEG", **options))
    start = data.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0")
    data[start + 5 : start + 9] = struct.pack(">HH", side, side)
    return bytes(data)
