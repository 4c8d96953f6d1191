"""Found before the real simplejpeg if PYTHONPATH names this folder: some images kill the process that decodes them."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

_elsewhere = [path for path in sys.path if path and Path(path).resolve() != Path(__file__).parent]
_spec = PathFinder.find_spec(__name__, _elsewhere)
assert _spec is not None and _spec.loader is not None
_real: Any = module_from_spec(_spec)
sys.modules[__name__] = _real
_spec.loader.exec_module(_real)
_decode_jpeg = _real.decode_jpeg


def decode_jpeg(data: bytes, *arguments: Any, **options: Any) -> Any:
    """Decode an image, or die of what is written in its comment."""
    if b"deadly:segfault" in data:
        ctypes.string_at(0)  # not os.kill: another thread might get that signal, and this one go on meanwhile
    if b"deadly:exit" in data:
        os._exit(0)
    if b"deadly:memory" in data:
        bytearray(8 << 30)
    return _decode_jpeg(data, *arguments, **options)


_real.decode_jpeg = decode_jpeg
