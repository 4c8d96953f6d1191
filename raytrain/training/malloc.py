"""What a step frees stays with the process: the next step needs as much."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST = 2**31 - 1
_MMAP_LARGEST = (1 << 30, 32 << 20)  # older C libraries take no more than the second


def keep_freed_memory() -> None:
    """Have the C library keep the memory that is freed, where it is glibc.

    By default it gives large pieces back to the system, and each step gets its activations anew, page by page: a sixth of
    the time of a small network's step on a CPU. Everything else of the process is as before.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _LARGEST)
        any(mallopt(_MMAP_THRESHOLD, largest) for largest in _MMAP_LARGEST)
