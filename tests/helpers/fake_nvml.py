"""Pretend that this machine has other GPUs: NVML's functions return those of a test."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pynvml
import pytest

from raytrain.backends.gpus import Gpu


def install(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[Gpu]) -> None:
    """Let NVML report ``gpus``; without any, there is no NVIDIA driver."""
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
    """As NVML reports it: GPUs that share the CPU's memory have none of their own."""
    return SimpleNamespace(total=gpu.memory_bytes) if gpu.memory_bytes else _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _fail(code: int) -> SimpleNamespace:
    raise pynvml.NVMLError(code)
