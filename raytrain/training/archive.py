"""How large a file of weights gets when torch unpacks it, found out before it is unpacked."""

from __future__ import annotations

import io
import zipfile

_MAX_RATIO = 10
"""torch.save does not compress, and compressed weights lose some ten percent. A zip bomb grows a thousand times."""


def check_unpacked_size(data: bytes) -> None:
    """Raise ValueError if ``data`` is a zip archive, as torch writes them, that unpacks to over 10 times its size."""
    file = io.BytesIO(data)
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError) as error:
        raise ValueError(f"it is a damaged archive ({error})") from None
    if unpacked > _MAX_RATIO * len(data):
        raise ValueError(f"it unpacks to {unpacked / 1e9:,.1f} GB, {unpacked / len(data):,.0f} times its size")
