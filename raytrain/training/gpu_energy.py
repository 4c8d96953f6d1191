"""Energy that a worker's GPU uses, as NVIDIA's driver counts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_MILLI = 1000.0


class GpuEnergy:
    """Energy of the GPU ``device`` since this was made.

    The driver counts it since Volta. Of an older GPU, its power is asked for at each call, and taken for that of all
    the time since the call before. Nothing is known of a part of a GPU (MIG).

    Example::

        energy = GpuEnergy(torch.device("cuda", 0))
        energy.joules()
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gpu: Any = None
        self._first: float | None = None  # joules since the driver was loaded
        self._by_power = 0.0
        self._asked_at = clock()
        if device.type == "cuda":
            with suppress(Exception):  # there may be no driver to ask, which says so in many ways
                import pynvml

                pynvml.nvmlInit()
                self._gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
                self._first = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / _MILLI

    def joules(self) -> float | None:
        """Return the energy so far; None if it is not known."""
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
