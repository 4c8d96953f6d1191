"""What the segments of a JPEG say before its first scan: whether it is upright, and read in several scans."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress

ORIENTATION = 0x0112  # the tag of EXIF
_EXIF = b"Exif\0\0"


def is_read_in_scans(data: bytes) -> bool:
    """Whether a JPEG is progressive, or has components in scans of their own; also if its header is unusual."""
    num_components = 0
    for marker, content in _segments(data):
        if marker == 0xDA:  # a scan, and the number of its components
            return content[:1] < bytes([num_components])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the frame
            if marker not in (0xC0, 0xC1):
                return True
            num_components = content[5] if len(content) > 5 else 0
    return True


def is_stored_upright(data: bytes) -> bool:
    """Whether a JPEG is shown as it is stored; False too if only Pillow can tell."""
    for marker, content in _segments(data):
        if marker == 0xE1 and content.startswith(_EXIF):
            return _says_upright(content)
    return True


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Marker and content of each segment of a JPEG, up to its first scan."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a byte that fills
            position += 1
            continue
        stop = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        yield marker, data[position + 4 : stop]
        if marker == 0xDA:
            return
        position = stop


def _says_upright(exif: bytes) -> bool:
    """Whether an EXIF block is whole and has no orientation other than 1."""
    with suppress(KeyError, struct.error):
        order = {b"II": "<", b"MM": ">"}[exif[6:8]]
        start = 6 + struct.unpack_from(order + "I", exif, 10)[0]
        num_tags = struct.unpack_from(order + "H", exif, start)[0]
        tags = [struct.unpack_from(order + "HHIH", exif, start + 2 + 12 * at) for at in range(num_tags)]
        return all(tag != ORIENTATION or value == 1 for tag, _, _, value in tags)
    return False
