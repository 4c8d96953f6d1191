"""Energy that a worker's GPU uses, as NVIDIA's driver counts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_MILLI = 1000.0  # millijoules in a joule, and milliwatts in a watt: the driver counts in these


class GpuEnergy:
    """The energy that the GPU ``device`` has used since this object was created.

    For Volta and newer GPUs, the driver counts energy. For older ones, each call reads the power, which is assumed to
    have been the same since the call before. The energy of a part of a GPU (MIG) is not known.

    Example::

        energy = GpuEnergy(torch.device("cuda", 0))
        energy.joules()
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gpu: Any = None
        self._first: float | None = None  # joules since the driver was loaded; None if it does not count them
        self._by_power = 0.0  # joules
        self._asked_at = clock()  # seconds
        if device.type == "cuda":
            with suppress(Exception):  # without a driver, this raises many kinds of exceptions
                import pynvml

                pynvml.nvmlInit()
                self._gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
                self._first = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / _MILLI

    def joules(self) -> float | None:
        """Return the energy in joules that the GPU has used since this object was created; None if it is not known."""
        if self._gpu is None:
            return None
        with suppress(Exception):
            import pynvml

            if self._first is not None:
                return round(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / _MILLI - self._first, 1)
            now = self._clock()
            self._by_power += pynvml.nvmlDeviceGetPowerUsage(self._gpu) / _MILLI * (now - self._asked_at)
            self._asked_at = now
            return round(self._by_power, 1)
        return None
