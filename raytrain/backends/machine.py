"""What this machine has for a run: cores, GPUs, and memory for decoded images."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from raytrain.backends.gpus import gpus
from raytrain.backends.placement import Hardware

_CACHE_FRACTION = 0.3  # of the memory that is available, as Ray's object store
_FREE_FRACTION = 0.8  # of a folder's free space that images may take
_SHARED_MEMORY = "/dev/shm"
_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_hardware(chosen_gpus: str | None = None) -> Hardware:
    """What a run may use here; ``chosen_gpus`` are those of ``--device``, by default all that CUDA shows.

    The object store is the memory for decoded images.
    """
    chosen = chosen_gpus or os.environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus = len(gpus())
    if chosen is not None:
        num_gpus = min(num_gpus, len([each for each in chosen.split(",") if each.strip() not in ("", "-1")]))
    return Hardware(1, cores(), num_gpus, image_memory()[1])


def image_memory() -> tuple[str, int]:
    """The folder for files of decoded images, and the bytes that they may take."""
    wanted = int(_CACHE_FRACTION * available_bytes())
    room = {folder: min(wanted, _free_bytes(folder)) for folder in (_SHARED_MEMORY, tempfile.gettempdir())}
    return max(room.items(), key=lambda item: item[1])  # of equals the first


def _free_bytes(folder: str) -> int:
    with suppress(OSError):
        return int(_FREE_FRACTION * shutil.disk_usage(folder).free)
    return 0


def available_bytes() -> int:
    """Memory that can be taken without swapping, within the limit of the container."""
    limits = [_read_number(Path(path).read_text()) for path in _LIMITS if os.access(path, os.R_OK)]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(1024 * int(line.split()[1]))
    return min(limit for limit in limits if limit is not None)


def _read_number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
