"""What the device is, how fast it is at its best, and what raytrain knows of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from raytrain.launch.gpus import gpus
from raytrain.launch.placement import fastest_precision, machine_hardware
from raytrain.loader.machine import cores
from raytrain.runs.machine_history import MachineUse
from raytrain.training.metrics import machine_meter
from raytrain.training.metrics.machine_meter import MachineMeter
from raytrain.training.networks.device_precision import precision_warning
from tests.gpu.trial import Trial


def measure(trial: Trial) -> None:
    trial.says(f"{cores()} cores, {os.uname().release}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    _known(trial)
    _metered(trial)
    _fastest(trial)


def _known(trial: Trial) -> None:
    found = gpus()
    for gpu in found:
        trial.says(f"{gpu.name}: {gpu.memory_bytes / 2**30:.1f} GiB, driver {gpu.driver}, capability {gpu.capability}")
    trial.holds("NVML and torch count as many GPUs", len(found) == torch.cuda.device_count())
    trial.holds("a run would use them all", machine_hardware().gpus == len(found))
    trial.says(f"--precision auto is {fastest_precision(trial.device)}")
    for precision in ("tf32", "bfloat16", "float16"):
        trial.says(f"{precision}: {precision_warning(precision, torch.device(trial.device)) or 'native'}")


def _metered(trial: Trial) -> None:
    """What the meter of a worker tells of its GPU while that multiplies matrices."""
    measured: list[MachineUse] = []
    meter = MachineMeter(0, torch.device(trial.device), measured.append)
    matrix = torch.rand(trial.scaled(8192, on_cpu=256), trial.scaled(8192, on_cpu=256), device=trial.device)
    until = time.monotonic() + trial.scaled(2, on_cpu=0)
    while time.monotonic() < until:
        _ = matrix @ matrix
        trial.synchronise()
    with patch.object(machine_meter, "MEASURE_EVERY_S", 0.0):
        meter.step(32, 0.1, 1)
    use = measured[0]
    trial.says(str(use))
    trial.holds("the meter knows the machine's memory", (use.memory_bytes or 0) > 0 and use.cpu_fraction is not None)
    if trial.on_gpu:
        trial.holds("the meter knows the GPU's name and memory", bool(use.gpu) and (use.gpu_memory_bytes or 0) > 0)
        trial.check("use of a GPU that only computes", use.gpu_fraction or 0.0, "of 1", at_least=0.5)


def _fastest(trial: Trial) -> None:
    """The two limits of any network: products of matrices, and copies in the device's memory."""
    side = trial.scaled(8192, on_cpu=512)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.rand(side, side, device=trial.device).to(dtype)
        seconds = _seconds(trial, lambda matrix=matrix: matrix @ matrix)
        trial.figure(f"product of matrices, {dtype}".replace("torch.", ""), "TFLOP/s", 2 * side**3 / seconds / 1e12)
    source = torch.rand(trial.scaled(2**28, on_cpu=2**22), device=trial.device)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    trial.figure("copy in memory", "GB/s read and written", moved / _seconds(trial, lambda: target.copy_(source)) / 1e9)
    pinned = torch.empty(trial.scaled(2**26, on_cpu=2**20), pin_memory=trial.on_gpu)
    place = torch.empty_like(pinned, device=trial.device)
    seconds = _seconds(trial, lambda: place.copy_(pinned, non_blocking=True))
    trial.figure("copy from pinned memory", "GB/s", pinned.nbytes / seconds / 1e9)


def _seconds(trial: Trial, action: Callable[[], object], times: int = 10) -> float:
    for _ in range(3):
        action()
    trial.synchronise()
    started = time.perf_counter()
    for _ in range(times):
        action()
    trial.synchronise()
    return (time.perf_counter() - started) / times
