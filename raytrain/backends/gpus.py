"""The NVIDIA GPUs of this machine, and how to make a process see only some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytrain.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``memory_bytes`` is 0 if the GPU has no memory of its own (it shares the CPU's)."""

    name: str
    memory_bytes: int
    driver: str
    capability: str


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine in PCI bus order, as the NVIDIA driver (NVML) reports them. Empty if there is no driver.

    ``CUDA_VISIBLE_DEVICES`` has no effect here.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(chosen: str) -> dict[str, str]:
    """The environment variables of a process that may use only the GPUs ``chosen`` of this machine, such as ``0,2``.

    Raises UsageError if this machine has no GPU of such a number.
    """
    found = len(gpus())
    if max(map(int, chosen.split(","))) >= found:
        available = f"reports {found}, counted from 0" if found else "reports none"
        raise UsageError(
            f"--device is cuda:{chosen}, but the NVIDIA driver of this machine {available}; choose among the GPUs that "
            "`raytrain devices` lists."
        )
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen}


def _gpu(handle: Any) -> Gpu:
    import pynvml

    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=_memory_bytes(handle),
        driver=pynvml.nvmlSystemGetDriverVersion(),
        capability=f"{major}.{minor}",
    )


def _memory_bytes(handle: Any) -> int:
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:  # pyright: ignore[reportAttributeAccessIssue] ; made at import
        return 0
