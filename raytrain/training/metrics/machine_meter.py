"""Measures a worker's speed, the use of its machine's CPU, memory and GPU, and the energy that the GPU uses."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import torch

from raytrain.runs.machine_history import MEASURE_EVERY_S, MachineUse


class MachineMeter:
    """Counts the images of a worker, and gives ``report`` their rate and the machine's load every few seconds.

    Example::

        meter = MachineMeter(rank=0, device=torch.device("cpu"), report=print)
        meter.step(num_images=32, wait_s=0.01, completed=0)  # in each step
    """

    def __init__(self, rank: int, device: torch.device, report: Callable[[MachineUse], None]) -> None:
        self._rank = rank
        self._device = device
        self._energy = GpuEnergy(device)
        self._report = report
        self._node = socket.gethostname()
        psutil.cpu_percent()  # the next call measures from this one on
        self._begin_interval()

    def _begin_interval(self) -> None:
        """Count from here on what the next measurement will report."""
        self._since = time.monotonic()
        self._num_images = 0
        self._wait_s = 0.0

    def step(self, num_images: int, wait_s: float, completed: int) -> None:
        """Count a step of ``num_images``; measure and report if the last measurement is some seconds old.

        ``wait_s`` is the time in seconds that the step waited for its images, ``completed`` the number of steps that
        were completed before it.
        """
        self._num_images += num_images
        self._wait_s += wait_s
        seconds = time.monotonic() - self._since
        if seconds < MEASURE_EVERY_S:
            return
        memory = psutil.virtual_memory()
        use = MachineUse(
            rank=self._rank,
            node=self._node,
            step=completed,
            images_per_s=round(self._num_images / seconds, 1),
            data_wait_fraction=round(min(self._wait_s / seconds, 1.0), 4),
            cpu_fraction=psutil.cpu_percent() / 100,
            memory_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            shared_memory_bytes=getattr(memory, "shared", None),  # Linux knows it
            **gpu_use(self._device),
            gpu_joules=self._energy.joules(),
        )
        self._report(use)
        self._begin_interval()


def gpu_use(device: torch.device) -> dict[str, Any]:
    """Return the fields of MachineUse that are about a GPU, as far as its driver tells; none for a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    use: dict[str, Any] = {"gpu_memory_bytes": total - free, "gpu_memory_total_bytes": total}
    with suppress(Exception):  # NVML cannot measure the use of some GPUs, and raises errors of many kinds
        use["gpu_fraction"] = torch.cuda.utilization(device) / 100
    return {"gpu": torch.cuda.get_device_name(device), **use}


class GpuEnergy:
    """The energy that the GPU ``device`` has used since this object was created, as its driver counts it.

    It is not known of a part of a GPU (MIG), of a GPU from before Volta, and without a driver.

    Example::

        energy = GpuEnergy(torch.device("cuda", 0))
        energy.joules()
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu: Any = None
        self._first_mj = 0  # millijoules since the driver was loaded
        if device.type == "cuda":
            with suppress(Exception):  # NVML raises many kinds of exceptions
                import pynvml

                pynvml.nvmlInit()
                gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
                self._first_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
                self._gpu = gpu

    def joules(self) -> float | None:
        """Return the energy in joules that the GPU has used since this object was created; None if it is not known."""
        if self._gpu is None:
            return None
        with suppress(Exception):
            import pynvml

            return round((pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) - self._first_mj) / 1000, 1)
        return None
