"""Fake NVML functions that report the GPUs of a test instead of those of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pynvml
import pytest

from raytrain.launch.gpus import Gpu


def install(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[Gpu]) -> None:
    """Make NVML report ``gpus``. If the sequence is empty, NVML reports a missing NVIDIA driver."""
    functions = {
        "nvmlInit": lambda: None if gpus else _fail(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
        "nvmlDeviceGetName": lambda gpu: gpu.name,
        "nvmlDeviceGetMemoryInfo": _memory_info,
        "nvmlSystemGetDriverVersion": lambda: gpus[0].driver,
        "nvmlDeviceGetCudaComputeCapability": lambda gpu: tuple(map(int, gpu.capability.split("."))),
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)


def _memory_info(gpu: Gpu) -> SimpleNamespace:
    """Return the memory as NVML does: not supported for a GPU that shares the CPU's memory."""
    return SimpleNamespace(total=gpu.memory_bytes) if gpu.memory_bytes else _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _fail(code: int) -> SimpleNamespace:
    raise pynvml.NVMLError(code)
