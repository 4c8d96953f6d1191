"""Placement of a run's workers on the CPU cores, GPUs and memory of a machine or a cluster."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from raytrain.config import TrainConfig
from raytrain.config.network import Precision
from raytrain.errors import UsageError, format_count
from raytrain.launch.gpus import gpus
from raytrain.loader.machine import cores, image_memory
from raytrain.training.networks.device_precision import AMPERE, NATIVE_FLAGS, cpu_flags

_log = logging.getLogger("raytrain")

_WORKERS_PER_CPU = 4  # most workers that may share a CPU core of a single machine
_ELASTIC_CPUS = 0.99
"""CPUs of a worker if Ray decides how many fit: one worker per CPU, with a little of each CPU left for reading data."""


# The hardware of this machine


def machine_hardware(chosen_gpus: str | None = None) -> Hardware:
    """Return the hardware of this machine that a run may use.

    ``chosen_gpus`` are those of ``--device``, such as ``0,2``; by default all that CUDA_VISIBLE_DEVICES shows.
    """
    chosen = chosen_gpus or os.environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus = len(gpus())
    if chosen is not None:  # an empty name or -1 in CUDA_VISIBLE_DEVICES names no GPU
        num_gpus = min(num_gpus, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))
    return Hardware(1, cores(), num_gpus, image_memory()[1])


def fastest_precision(device: str) -> Precision:
    """Return bfloat16 if this machine's CPU, or all of its GPUs, compute it natively; else float32.

    Emulated bfloat16 is slower than float32.
    """
    if device == "cpu":
        native = bool(NATIVE_FLAGS["bfloat16"] & cpu_flags())
    else:
        native = all(tuple(map(int, gpu.capability.split("."))) >= AMPERE for gpu in gpus())
    return "bfloat16" if native else "float32"


# The workers of a run on a machine or a cluster


@dataclass(frozen=True)
class Hardware:
    """CPUs and GPUs of all nodes of a cluster together, or of this machine, which is one node.

    ``object_store_bytes`` is the memory for images on one node, the one with the least. ``gpu_types`` has the number of
    GPUs by the name of their type; None if the types are not known.
    """

    num_nodes: int
    cpus: float
    gpus: float
    object_store_bytes: int
    gpu_types: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Placement:
    """The workers of a run, ``num_workers`` or, if they are elastic, at least ``min_workers``, and what each gets.

    ``device`` is ``cpu`` or ``cuda``. ``cpus`` are those of a worker itself, ``data_cpus`` those for reading its
    images, of which one data task takes ``task_cpus``; a part of a CPU is possible. ``threads`` is the number of
    torch's threads in a worker.
    """

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
        """CPUs left while workers start up. A starting worker uses one full CPU, even if it will train with less."""
        return (self.cpus + self.data_cpus - 1.0) * self.num_workers


def place(config: TrainConfig, hardware: Hardware) -> Placement:
    """Return the workers of a run, their device and their CPUs. Warn if workers share the cores of this machine.

    Raises UsageError if the options ask for more than there is.

    Example:
        >>> place(config, machine_hardware()).num_workers
        4
    """
    device, fewest, most = wanted_workers(config, hardware)
    available = available_workers(config, device, hardware)
    check_room(config, hardware)
    if fewest > available:
        _log.warning(
            "%s share %s; that is slower than %s.",
            *map(format_count, (fewest, available, available), ("worker", "CPU core", "worker")),
        )

    # Each worker gets one CPU if as many are left for reading; otherwise half of all CPUs are left for reading. If Ray
    # decides how many elastic workers fit, almost a whole CPU each, so that no more start than there are CPUs.
    num_workers = max(fewest, min(most, available))
    cpus = 1.0 if hardware.cpus >= 2 * num_workers else _round_down(hardware.cpus / 2 / num_workers)
    if config.elastic_workers and device == "cpu" and hardware.cpus < 2 * most:
        cpus = _ELASTIC_CPUS
    data_cpus = _round_down((hardware.cpus - cpus * num_workers) / num_workers)
    threads = config.threads_per_worker or max(1, int(hardware.cpus / num_workers))
    task_cpus = min(1.0, data_cpus)
    return Placement(most, fewest, device, cpus, data_cpus, task_cpus, threads, config.accelerator_type)


def check_room(config: TrainConfig, hardware: Hardware) -> None:
    """Raise UsageError if a run asks for more workers or GPUs than there are. On one machine, workers may share cores.

    The advice differs for a cluster, whose autoscaler may start more machines.
    """
    device, fewest, _ = wanted_workers(config, hardware)
    available = available_workers(config, device, hardware)

    # There is no GPU of the type, or none at all. Without a cluster, types are not known.
    if config.accelerator_type and hardware.gpu_types is not None and not available:
        types = ", ".join(f"{number:g} {name}" for name, number in hardware.gpu_types.items()) or "no GPUs"
        raise UsageError(
            f"--device is {config.device}, and the cluster has {types}; name a type that it has, "
            "or give a number of --workers and --wait-for-machines-s if an autoscaler starts such machines."
        )
    # The types of GPUs are not known of this machine alone, whose Ray, if any, a run starts itself.
    is_machine = config.backend == "local" or hardware.gpu_types is None
    if device == "cuda" and not available and is_machine:
        hidden = f" (of {len(gpus())}, CUDA_VISIBLE_DEVICES hides all)" if gpus() else ""
        hint = "" if config.backend == "local" else ", or name a cluster by --address"
        raise UsageError(f"--device is {config.device}, and this machine has no GPU{hidden}; use --device cpu{hint}.")
    if device == "cuda" and not available:
        raise UsageError(
            f"--device is {config.device}, and there is no GPU on the cluster's "
            f"{format_count(hardware.num_nodes, 'node')}; use --device cpu "
            "or another --address, or give a number of --workers and --wait-for-machines-s if an autoscaler starts GPU "
            "machines."
        )

    # There are fewer devices than workers. Workers may share the cores of a single machine, but neither those of a
    # cluster nor GPUs.
    limit = available * (_WORKERS_PER_CPU if device == "cpu" and hardware.num_nodes == 1 else 1)
    if fewest > limit:
        kind = device_kind(config.accelerator_type, device)
        location = "this machine" if is_machine else "the cluster"
        hint = "" if is_machine else ", or give --wait-for-machines-s if an autoscaler starts more"
        raise UsageError(
            f"--workers is {config.workers}, and {location} has {format_count(available, kind)}; ask for at most "
            f"{limit}{hint}."
        )


def wanted_workers(config: TrainConfig, hardware: Hardware) -> tuple[str, int, int]:
    """Return the device of the workers, ``cpu`` or ``cuda``, and the smallest and the largest number of workers.

    These are what the options ask for, whether there is room or not. The two numbers differ only for elastic workers.
    """
    # --workers auto takes all GPUs, or three quarters of the CPUs, so that the others are left for reading.
    any_gpu = hardware.gpus >= 1 or config.accelerator_type is not None
    device = ("cuda" if any_gpu else "cpu") if config.device_type == "auto" else config.device_type
    fitting = available_workers(config, device, hardware) if device == "cuda" else max(1, int(hardware.cpus * 3 / 4))
    number = fitting if config.workers == "auto" else config.workers
    fewest, most = config.elastic_workers or (int(number), int(number))
    return device, fewest, most


def available_workers(config: TrainConfig, device: str, hardware: Hardware) -> int:
    """Return how many workers can each have a CPU core, or a GPU of the type that the options name, of their own."""
    if device == "cpu":
        return int(hardware.cpus)
    if config.accelerator_type is None or hardware.gpu_types is None:
        return int(hardware.gpus)
    return int(hardware.gpu_types.get(config.accelerator_type, 0.0))


def device_kind(accelerator_type: str | None, device: str) -> str:
    """Return the name of a worker's device in messages: ``CPU``, ``GPU`` or, for instance, ``L4 GPU``."""
    return "CPU" if device == "cpu" else f"{accelerator_type or ''} GPU".strip()


def _round_down(cpus: float) -> float:
    """Round a number of CPUs down to thousandths; rounded up, the workers together might ask for more than all."""
    return max(math.floor(cpus * 1000) / 1000, 0.001)
