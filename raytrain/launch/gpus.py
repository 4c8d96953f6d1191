"""GPUs of this machine, as NVIDIA's driver reports them by NVML.

The driver is asked without torch, whose import takes seconds.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from raytrain.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``memory_bytes`` is 0 if the GPU has no memory of its own (it shares the CPU's)."""

    name: str
    memory_bytes: int
    driver: str  # the version of NVIDIA's driver
    capability: str  # CUDA's version of what the GPU can do, such as 8.0


def gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of this machine in PCI bus order, whatever CUDA_VISIBLE_DEVICES says.

    Empty without NVIDIA's driver, or if the driver cannot be asked.
    """
    import pynvml

    devices: list[Gpu] = []
    with suppress(pynvml.NVMLError):  # there is no driver, or it failed: then the list is not returned
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                try:
                    memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
                except pynvml.NVMLError_NotSupported:  # pyright: ignore[reportAttributeAccessIssue] ; made at import
                    memory_bytes = 0
                name, driver = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlSystemGetDriverVersion()
                devices.append(Gpu(name, memory_bytes, driver, capability=f"{major}.{minor}"))
        finally:
            pynvml.nvmlShutdown()
        return tuple(devices)
    return ()


def visible_gpus(chosen: str) -> dict[str, str]:
    """Return the environment variables with which a process uses only the GPUs ``chosen``, such as ``0,2``.

    Raises UsageError if the machine lacks one of them.
    """
    num_gpus = len(gpus())
    if max(map(int, chosen.split(","))) >= num_gpus:
        available = f"reports {num_gpus}, counted from 0" if num_gpus else "reports none"
        raise UsageError(
            f"--device is cuda:{chosen}, but the NVIDIA driver of this machine {available}; choose among the GPUs that "
            "`raytrain devices` lists."
        )
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen}
