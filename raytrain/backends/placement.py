"""How a run is laid out over a cluster or a machine: its workers, their device, and the CPUs for reading data."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from raytrain.config import TrainConfig
from raytrain.errors import UsageError

_LOG = logging.getLogger("raytrain")

_WORKERS_PER_CPU = 4
"""CPU workers that may share a core of a single machine."""
_ELASTIC_CPUS = 0.99
"""CPUs of a worker if Ray decides how many fit: one worker per CPU, and a little of each CPU left for reading data."""


@dataclass(frozen=True)
class Hardware:
    """What the nodes of a cluster have together, and the smallest object store among them.

    ``gpu_types``: how many of the GPUs are of each type; None if that is not known, as without Ray.
    """

    num_nodes: int
    cpus: float
    gpus: float
    object_store_bytes: int
    gpu_types: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Placement:
    """How a run is laid out: ``cpus`` for each worker, and ``data_cpus`` for reading each worker's images.

    An elastic run may have as few as ``min_workers`` of its ``num_workers``.
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
        """CPUs that are free while the workers start: until then each takes a whole one, whatever it computes with."""
        return (self.cpus + self.data_cpus - 1.0) * self.num_workers


def place(config: TrainConfig, found: Hardware) -> Placement:
    """Workers, their device and their CPUs; raises UsageError if more is asked for than the cluster has.

    Logs a warning if CPU workers have to share the cores of a single machine.
    """
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
    """Raise UsageError if a run asks for more workers or GPUs than there are.

    On a single machine, CPU workers may share cores: a loop can be tried with more workers than there are.
    """
    device, fewest, _ = wanted(config, found)
    available = available_workers(config, device, found)
    if config.accelerator_type and found.gpu_types is not None and not available:
        there = ", ".join(f"{number:g} {name}" for name, number in found.gpu_types.items()) or "no GPUs"
        raise UsageError(
            f"--device is {config.device}, and the cluster has {there}; name a type that it has, "
            "or give a number of --workers and --wait-for-machines-s if an autoscaler starts such machines."
        )
    if device == "cuda" and not available:
        raise UsageError(
            f"--device is cuda, and the cluster's {found.num_nodes} nodes have no GPU; use --device cpu or another "
            "--address, or give a number of --workers and --wait-for-machines-s if an autoscaler starts GPU machines."
        )
    limit = available * (_WORKERS_PER_CPU if device == "cpu" and found.num_nodes == 1 else 1)
    if fewest > limit:
        kind = device_kind(config.accelerator_type, device)
        raise UsageError(
            f"--workers is {config.workers}, and the cluster has {available} {kind}; ask for at most {limit}, or give "
            "--wait-for-machines-s if an autoscaler starts more."
        )


def wanted(config: TrainConfig, found: Hardware) -> tuple[str, int, int]:
    """The device, and the least and the most workers."""
    any_gpu = found.gpus >= 1 or config.accelerator_type is not None
    device = ("cuda" if any_gpu else "cpu") if config.device_type == "auto" else config.device_type
    fewest, most = config.elastic_workers or (_wanted_workers(config, device, found),) * 2
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


def _wanted_workers(config: TrainConfig, device: str, found: Hardware) -> int:
    if config.workers != "auto":
        return int(config.workers)
    return available_workers(config, device, found) if device == "cuda" else max(1, int(found.cpus * 3 / 4))


def _floor(cpus: float) -> float:
    """Ray counts CPUs in ten-thousandths; rounding up would ask for more than there is."""
    return max(math.floor(cpus * 1000) / 1000, 0.001)
