"""Meter of a worker's speed, CPU, memory and GPU; a setting of glibc's malloc."""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import torch

from raytrain.runs.machine_history import MEASURE_EVERY_S, MachineUse

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the options' numbers in mallopt(3)
_TRIM_LIMIT = 2**31 - 1
_MMAP_LIMITS = (1 << 30, 32 << 20)  # older versions of glibc accept only the second


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for this process; does nothing with another C library.

    By default glibc returns large pieces to the system, and every step gets the memory of its activations anew, page by
    page. That takes a sixth of the time of a small network's step on a CPU.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _TRIM_LIMIT)
        any(mallopt(_MMAP_THRESHOLD, limit) for limit in _MMAP_LIMITS)


class MachineMeter:
    """Counts the images of a worker, and gives ``report`` what it measures every few seconds."""

    def __init__(self, rank: int, device: torch.device, report: Callable[[MachineUse], None]) -> None:
        self._rank = rank
        self._device = device
        self._report = report
        self._node = socket.gethostname()
        psutil.cpu_percent()  # from now on
        self._reset()

    def step(self, num_images: int, wait_s: float, completed: int) -> None:
        """Count a step, after so many ``completed`` ones, and measure if it is time; else, this adds two numbers."""
        self._num_images += num_images
        self._wait_s += wait_s
        seconds = time.monotonic() - self._since
        if seconds >= MEASURE_EVERY_S:
            self._report(self._measure(seconds, completed))
            self._reset()

    def _reset(self) -> None:
        self._since = time.monotonic()
        self._num_images = 0
        self._wait_s = 0.0

    def _measure(self, seconds: float, completed: int) -> MachineUse:
        memory = psutil.virtual_memory()
        return MachineUse(
            rank=self._rank,
            node=self._node,
            step=completed,
            images_per_s=round(self._num_images / seconds, 1),
            data_wait_fraction=round(min(self._wait_s / seconds, 1.0), 4),
            cpu_fraction=psutil.cpu_percent() / 100,
            memory_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            shared_memory_bytes=getattr(memory, "shared", None),  # Linux knows it
            **_gpu(self._device),
        )


def _gpu(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    use: dict[str, Any] = {"gpu_memory_bytes": total - free, "gpu_memory_total_bytes": total}
    with suppress(Exception):  # NVML knows no use of some GPUs, and says so in many ways
        use["gpu_fraction"] = torch.cuda.utilization(device) / 100
    return {"gpu": torch.cuda.get_device_name(device), **use}
