"""Whether torchcodec is here, and fits the torch that is: it decodes for tests in place of a GPU's nvJPEG."""

from __future__ import annotations

import pytest


def _decodes() -> bool:
    try:
        from torchcodec.decoders import decode_jpeg  # pyright: ignore[reportPrivateImportUsage] ; see device_decoder.py
    except (ImportError, OSError, RuntimeError):  # the last two: it is built for another torch
        return False
    return callable(decode_jpeg)


needs_torchcodec = pytest.mark.skipif(not _decodes(), reason="there is no torchcodec that fits this torch")
