"""What a JPEG says before its pixels: how it is turned, and how much time and memory its decoding will take.

A JPEG is a sequence of segments: a marker of two bytes, 0xff and its kind, then its length and content. Segments of
the kind APP1 hold EXIF, a *frame* says the size and how the pixels are coded, and each *scan* holds some of them. In a
baseline JPEG one scan has all. A progressive one has several, each of which refines all pixels: it is decoded once for
each scan, and its coefficients are in memory until the last. So few bytes may ask for hours, and a file is read here
before a decoder gets it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress

from raytrain.data.images.image_format import MAX_IMAGE_BYTES, BadImage, too_large

JPEG = b"\xff\xd8\xff"
"""The first bytes of a JPEG."""

ON_ITS_SIDE = (5, 6, 7, 8)
"""Orientations of EXIF at which width and height are swapped."""

ORIENTATION, _SHORT = 0x0112, 3  # the tag of EXIF, and its type
_EXIF = b"Exif\0\0"
_APP1, _START_OF_SCAN_MARKER = 0xE1, 0xDA
_MAX_JPEG_PIXELS = 1 << 28  # phones have 200 million; a large JPEG is decoded at a fraction of its size
_MAX_SCANNED_PIXELS = 1 << 30  # over all scans of a JPEG, which may be many in few bytes; about two seconds
_MIN_SCAN_BYTES = 10  # of the file; no scan is shorter
_START_OF_SCAN = b"\xff\xda"  # not within compressed data, where a zero follows each 0xff
_COEFFICIENT_BYTES = 6  # per pixel of a JPEG that is read in several scans: three components of 16 bits


def exif_of_jpeg(data: bytes) -> bytes | None:
    """Return the EXIF block of a JPEG; None if it has none."""
    blocks = (content for marker, content in _segments(data) if marker == _APP1 and content.startswith(_EXIF))
    return next(blocks, None)


def exif_orientation(exif: bytes | None) -> int:
    """Return the orientation that an EXIF block says, 1 to 8; 1, as it is stored, if it says none or is damaged."""
    if exif is None:
        return 1
    content = exif.removeprefix(_EXIF)
    with suppress(KeyError, struct.error):
        order = {b"II": "<", b"MM": ">"}[content[:2]]
        (start,) = struct.unpack_from(order + "I", content, 4)
        (num_tags,) = struct.unpack_from(order + "H", content, start)
        for position in range(start + 2, start + 2 + 12 * num_tags, 12):
            tag, kind, count, value = struct.unpack_from(order + "HHIH", content, position)
            if tag == ORIENTATION:
                return value if (kind, count) == (_SHORT, 1) and 1 <= value <= 8 else 1
    return 1


def check_jpeg_size(data: bytes, height: int, width: int) -> None:
    """Raise BadImage if a JPEG needs too much time, or the coefficients of a progressive one too much memory."""
    num_pixels = width * height
    limit = _MAX_JPEG_PIXELS
    # Only a large image, or one of many bytes, can have so many scans that they matter.
    if num_pixels * len(data) > _MAX_SCANNED_PIXELS * _MIN_SCAN_BYTES and _is_read_in_scans(data):
        num_scans = max(1, data.count(_START_OF_SCAN))
        if num_pixels * num_scans > _MAX_SCANNED_PIXELS:
            raise BadImage(f"the image is too large: {width:,} × {height:,} pixels in {num_scans:,} scans of a JPEG")
        limit = MAX_IMAGE_BYTES // _COEFFICIENT_BYTES
    if num_pixels > limit:
        raise too_large(width, height, limit)


def _is_read_in_scans(data: bytes) -> bool:
    """Return whether a JPEG is progressive, or has components in scans of their own, or an unusual header."""
    num_components = 0
    for marker, content in _segments(data):
        if marker == _START_OF_SCAN_MARKER:  # and the number of its components
            return content[:1] < bytes([num_components])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the frame
            if marker not in (0xC0, 0xC1):
                return True
            num_components = content[5] if len(content) > 5 else 0
    return True


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield marker and content of each segment of a JPEG, up to its first scan."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a byte that fills
            position += 1
            continue
        stop = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        yield marker, data[position + 4 : stop]
        if marker == _START_OF_SCAN_MARKER:
            return
        position = stop
