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


def png(width: int, height: int, bits: int, colour_type: int, idat: bytes, transparent: bytes = b"") -> bytes:
    """Make a PNG file from its compressed rows, for kinds that Pillow cannot write."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    chunks = [(b"IHDR", header), *([(b"tRNS", transparent)] if transparent else []), (b"IDAT", idat), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_segment(jpeg: bytes, content: bytes) -> bytes:
    """Return a JPEG with one more APP1 segment, as EXIF and XMP are kept in, before all others."""
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content + jpeg[2:]


def jpeg_bomb(side: int, **options: Any) -> bytes:
    """Make a small JPEG whose header claims ``side`` x ``side`` pixels."""
    data = bytearray(encoded(photo(), "JPEG", **options))
    start = data.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0")
    data[start + 5 : start + 9] = struct.pack(">HH", side, side)
    return bytes(data)
