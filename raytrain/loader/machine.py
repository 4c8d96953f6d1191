"""Cores of this machine, its memory for images, and whether its GPUs can decode them."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import psutil

from raytrain.config.extras import extra
from raytrain.errors import UsageError
from raytrain.storage.temporary_files import temporary_folder

_CACHE_FRACTION = 0.3  # of the memory that is available, as Ray's object store
_FREE_FRACTION = 0.8  # of a folder's free space that images may take
_SHARED_MEMORY = "/dev/shm"
_TORCHCODEC = 0, 16  # the first version that decodes images
_CPU_LIMITS = (  # files with the CPU time that a container may take, and in what time, of cgroups of version 2 and 1
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_MEMORY_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1, within the limit of the container.

    It is the number that Ray counts, too.
    """
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for paths in _CPU_LIMITS:
        if all(os.access(path, os.R_OK) for path in paths):
            quota, period = " ".join(Path(path).read_text() for path in paths).split()  # version 2 has both in one file
            if quota.isdecimal():  # without a limit it is "max", or -1
                number = min(number, max(1, int(quota) // int(period)))
    return number


def local_world_size() -> int:
    """Return how many processes of this machine train together: LOCAL_WORLD_SIZE of the environment, or 1.

    Raises UsageError if that is no positive number.
    """
    number = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not number.isdecimal() or int(number) == 0:
        raise UsageError(
            f"LOCAL_WORLD_SIZE is {number!r} in the environment, and is the number of processes on this machine "
            "that train together; set it as torchrun does, or leave it out."
        )
    return int(number)


def image_memory() -> tuple[str, int]:
    """Return the folder for files of decoded images, and the number of bytes that they may take.

    It is the folder for shared memory, or the one for temporary files if that has more room, as in a container whose
    shared memory is small or read-only. Without room in either, the number is 0.
    """
    wanted_bytes = int(_CACHE_FRACTION * available_bytes())
    best_folder, most_bytes = _SHARED_MEMORY, -1
    for folder in (_SHARED_MEMORY, temporary_folder()):  # the faster one first, which is taken among equals
        room_bytes = 0
        with suppress(OSError):
            if os.access(folder, os.W_OK):
                room_bytes = min(wanted_bytes, int(_FREE_FRACTION * shutil.disk_usage(folder).free))
        if room_bytes > most_bytes:
            best_folder, most_bytes = folder, room_bytes
    return best_folder, most_bytes


def available_bytes() -> int:
    """Return the bytes of memory that are available without swapping, and within the limit of the container."""
    # The container's limit is that of cgroups of version 2 or 1; "max" if there is none.
    limits = [Path(path).read_text().strip() for path in _MEMORY_LIMITS if os.access(path, os.R_OK)]
    return min([psutil.virtual_memory().available, *(int(limit) for limit in limits if limit.isdecimal())])


def gpu_decoder_problem(device: str) -> str | None:
    """Return why this machine's workers cannot decode JPEGs on ``device``, cuda or cpu; None if they can.

    The versions are read from files, because importing the packages takes seconds.

    Example: ``gpu_decoder_problem("cpu") == "the device is a CPU"``
    """
    if device != "cuda":
        return "the device is a CPU"

    # Read which version of torchcodec there is, from the text of its file version.py, as of torch's.
    try:
        torch_text, torchcodec_text = (
            Path(str(distribution(name).locate_file(f"{name}/version.py"))).read_text()
            for name in ("torch", "torchcodec")
        )
    except (PackageNotFoundError, OSError):
        return f"torchcodec is not installed (install {extra('gpu-decoder')})"
    version = re.search(r"(\d+)\.(\d+)[^'\"]*", torchcodec_text)
    if version is None or (int(version[1]), int(version[2])) < _TORCHCODEC:
        return f"torchcodec {version and version[0]} decodes no images (install {extra('gpu-decoder')})"

    # Both packages are built for a version of CUDA, whose first number must be the same. It is 12 in torch's line
    # cuda = "12.6" and in torchcodec's version 0.16.0+cu126.
    torch_cuda = re.search(r"^cuda\b.*?(\d+)", torch_text, re.M)
    torchcodec_cuda = re.search(r"\+cu(\d+)\d\b", torchcodec_text)
    if torch_cuda is None or torchcodec_cuda is None or torch_cuda[1] != torchcodec_cuda[1]:
        return (
            f"torchcodec {version[0]} is built for {f'CUDA {torchcodec_cuda[1]}' if torchcodec_cuda else 'CPUs'}, and "
            f"torch for {f'CUDA {torch_cuda[1]}' if torch_cuda else 'CPUs'} (install both from one index of PyTorch)"
        )
    return None
