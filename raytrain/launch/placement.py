"""Cores, GPUs and memory of this machine, and how workers share those of a cluster."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from raytrain.config import TrainConfig
from raytrain.config.network import Precision
from raytrain.errors import UsageError
from raytrain.training.precision import AMPERE, NATIVE_FLAGS, cpu_flags


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``memory_bytes`` is 0 if the GPU has no memory of its own (it shares the CPU's)."""

    name: str
    memory_bytes: int
    driver: str
    capability: str


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine in PCI bus order, whatever CUDA_VISIBLE_DEVICES says; empty without NVIDIA's driver."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return tuple(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount()))
        finally:
            pynvml.nvmlShutdown()
    return ()


def visible_gpus(chosen: str) -> dict[str, str]:
    """Variables of a process that may only use the GPUs ``chosen``, such as ``0,2``; UsageError if one is missing."""
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


_CACHE_FRACTION = 0.3  # of the memory that is available, as Ray's object store
_FREE_FRACTION = 0.8  # of a folder's free space that images may take
_SHARED_MEMORY = "/dev/shm"
_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_hardware(chosen_gpus: str | None = None) -> Hardware:
    """What a run may use here; ``chosen_gpus`` are those of ``--device``, by default all that CUDA shows."""
    chosen = chosen_gpus or os.environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus = len(gpus())
    if chosen is not None:
        num_gpus = min(num_gpus, len([each for each in chosen.split(",") if each.strip() not in ("", "-1")]))
    return Hardware(1, cores(), num_gpus, image_memory()[1])


def image_memory() -> tuple[str, int]:
    """The folder for files of decoded images, and the bytes that they may take."""
    wanted = int(_CACHE_FRACTION * available_bytes())
    room = {folder: min(wanted, _free_bytes(folder)) for folder in (_SHARED_MEMORY, tempfile.gettempdir())}
    return max(room.items(), key=lambda item: item[1])  # of equals the first


def _free_bytes(folder: str) -> int:
    with suppress(OSError):
        return int(_FREE_FRACTION * shutil.disk_usage(folder).free)
    return 0


def available_bytes() -> int:
    """Memory that can be taken without swapping, within the limit of the container."""
    limits = [Path(path).read_text().strip() for path in _LIMITS if os.access(path, os.R_OK)]
    return min([psutil.virtual_memory().available, *(int(limit) for limit in limits if limit.isdecimal())])


def fastest_precision(device: str) -> Precision:
    """bfloat16 if this machine's CPU, or all of its GPUs, compute it natively; else float32. Never an emulated one."""
    if device == "cpu":
        native = bool(NATIVE_FLAGS["bfloat16"] & cpu_flags())
    else:
        native = all(tuple(map(int, gpu.capability.split("."))) >= AMPERE for gpu in gpus())
    return "bfloat16" if native else "float32"


_LOG = logging.getLogger("raytrain")

_WORKERS_PER_CPU = 4  # CPU workers that may share a core of a single machine
_ELASTIC_CPUS = 0.99
"""CPUs of a worker if Ray decides how many fit: one worker per CPU, and a little of each CPU left for reading data."""


@dataclass(frozen=True)
class Hardware:
    """What the nodes of a cluster have together, and the smallest object store; ``gpu_types`` is None if not known."""

    num_nodes: int
    cpus: float
    gpus: float
    object_store_bytes: int
    gpu_types: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Placement:
    """The layout of a run: ``cpus`` of each worker, ``data_cpus`` to read its images, and at least ``min_workers``."""

    num_workers: int
    min_workers: int
    device: str
    cpus: float
    data_cpus: float
    task_cpus: float
    threads: int
    accelerator_type: str | None = None
    """The type of GPU that each worker needs; None if any will do, or if it needs none."""

    @property
    def cpus_beside_start(self) -> float:
        """CPUs that are free while the workers start: until then each takes a whole one, whatever it computes with."""
        return (self.cpus + self.data_cpus - 1.0) * self.num_workers


def place(config: TrainConfig, found: Hardware) -> Placement:
    """Workers, their device and their CPUs; raises UsageError if more is asked for than the cluster has."""
    device, fewest, most = wanted(config, found)
    available = available_workers(config, device, found)
    check_room(config, found)
    if fewest > available:
        _LOG.warning("%d workers share %d CPU cores; that is slower than %d workers.", fewest, available, available)
    # One CPU for each worker if as many are left for reading. Otherwise half of all: reading must never starve.
    now = max(fewest, min(most, available))
    cpus = 1.0 if found.cpus >= 2 * now else _floor(found.cpus / 2 / now)
    if config.elastic_workers and device == "cpu" and found.cpus < 2 * most:
        cpus = _ELASTIC_CPUS
    data_cpus = _floor((found.cpus - cpus * now) / now)
    threads = config.threads_per_worker or max(1, int(found.cpus / now))
    task_cpus = min(1.0, data_cpus)
    return Placement(most, fewest, device, cpus, data_cpus, task_cpus, threads, config.accelerator_type)


def check_room(config: TrainConfig, found: Hardware) -> None:
    """Raise UsageError if a run asks for more workers or GPUs than there are. On one machine, they may share cores."""
    device, fewest, _ = wanted(config, found)
    available = available_workers(config, device, found)
    if config.accelerator_type and found.gpu_types is not None and not available:
        there = ", ".join(f"{number:g} {name}" for name, number in found.gpu_types.items()) or "no GPUs"
        raise UsageError(
            f"--device is {config.device}, and the cluster has {there}; name a type that it has, "
            "or give a number of --workers and --wait-for-machines-s if an autoscaler starts such machines."
        )
    if device == "cuda" and not available:
        raise UsageError(f"--device is {config.device}, and {_no_gpu(config, found)}")
    limit = available * (_WORKERS_PER_CPU if device == "cpu" and found.num_nodes == 1 else 1)
    if fewest > limit:
        kind = device_kind(config.accelerator_type, device)
        place, more = ("this machine", "") if config.backend == "local" else ("the cluster", _AUTOSCALER)
        raise UsageError(
            f"--workers is {config.workers}, and {place} has {available} {kind}; ask for at most {limit}{more}."
        )


_AUTOSCALER = ", or give --wait-for-machines-s if an autoscaler starts more"


def _no_gpu(config: TrainConfig, found: Hardware) -> str:
    if config.backend == "local":
        hidden = f" (of {len(gpus())}, CUDA_VISIBLE_DEVICES hides all)" if gpus() else ""
        return f"this machine has no GPU{hidden}; use --device cpu."
    return (
        f"the cluster's {found.num_nodes} nodes have no GPU; use --device cpu or another --address, or give a number "
        "of --workers and --wait-for-machines-s if an autoscaler starts GPU machines."
    )


def wanted(config: TrainConfig, found: Hardware) -> tuple[str, int, int]:
    """The device, and the least and the most workers."""
    any_gpu = found.gpus >= 1 or config.accelerator_type is not None
    device = ("cuda" if any_gpu else "cpu") if config.device_type == "auto" else config.device_type
    fitting = available_workers(config, device, found) if device == "cuda" else max(1, int(found.cpus * 3 / 4))
    number = fitting if config.workers == "auto" else config.workers
    fewest, most = config.elastic_workers or (int(number), int(number))
    return device, fewest, most


def available_workers(config: TrainConfig, device: str, found: Hardware) -> int:
    """How many workers find a device of their own."""
    if device == "cpu":
        return int(found.cpus)
    if config.accelerator_type is None or found.gpu_types is None:
        return int(found.gpus)
    return int(found.gpu_types.get(config.accelerator_type, 0.0))


def device_kind(accelerator_type: str | None, device: str) -> str:
    """What workers compute with, as messages name it."""
    return "CPUs" if device == "cpu" else f"{accelerator_type or ''} GPUs".strip()


def _floor(cpus: float) -> float:
    """Ray counts CPUs in ten-thousandths; rounding up would ask for more than there is."""
    return max(math.floor(cpus * 1000) / 1000, 0.001)
