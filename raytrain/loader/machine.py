"""Cores of this machine, and its memory for decoded images."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

_CACHE_FRACTION = 0.3  # of the memory that is available, as Ray's object store
_FREE_FRACTION = 0.8  # of a folder's free space that images may take
_SHARED_MEMORY = "/dev/shm"
_MEMORY_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def image_memory() -> tuple[str, int]:
    """Return the folder for files of decoded images, and the bytes that they may take."""
    wanted_bytes = int(_CACHE_FRACTION * available_bytes())
    best_folder, most_bytes = _SHARED_MEMORY, -1
    for folder in (_SHARED_MEMORY, tempfile.gettempdir()):  # of equals, the first is faster
        room_bytes = 0
        with suppress(OSError):
            room_bytes = min(wanted_bytes, int(_FREE_FRACTION * shutil.disk_usage(folder).free))
        if room_bytes > most_bytes:
            best_folder, most_bytes = folder, room_bytes
    return best_folder, most_bytes


def available_bytes() -> int:
    """Return the memory that can be taken without swapping, within the limit of the container, in bytes."""
    # The limit of the container, by cgroups of either version; "max" if it has none.
    limits = [Path(path).read_text().strip() for path in _MEMORY_LIMITS if os.access(path, os.R_OK)]
    return min([psutil.virtual_memory().available, *(int(limit) for limit in limits if limit.isdecimal())])
