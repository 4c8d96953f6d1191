"""How a run is laid out over a cluster or a machine: its workers, their device, and the CPUs for reading data."""

from __future__ import annotations

import logging
import math
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
    """What the nodes of a cluster have together, and the smallest object store among them."""

    num_nodes: int
    cpus: float
    gpus: float
    object_store_bytes: int


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


def place(config: TrainConfig, found: Hardware) -> Placement:
    """Workers, their device and their CPUs; raises UsageError if more is asked for than the cluster has.

    Logs a warning if CPU workers have to share the cores of a single machine.
    """
    device, fewest, most = wanted(config, found)
    available = available_workers(device, found)
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
    return Placement(most, fewest, device, cpus, data_cpus, min(1.0, data_cpus), threads)


def check_room(config: TrainConfig, found: Hardware) -> None:
    """Raise UsageError if a run asks for more workers or GPUs than there are.

    On a single machine, CPU workers may share cores: a loop can be tried with more workers than there are.
    """
    device, fewest, _ = wanted(config, found)
    available = available_workers(device, found)
    if device == "cuda" and not available:
        raise UsageError(
            f"--device is cuda, and the cluster's {found.num_nodes} nodes have no GPU; use --device cpu or another "
            "--address."
        )
    limit = available * (_WORKERS_PER_CPU if device == "cpu" and found.num_nodes == 1 else 1)
    if fewest > limit:
        kind = "GPUs" if device == "cuda" else "CPUs"
        raise UsageError(
            f"--workers is {config.workers}, and the cluster has {available} {kind}; ask for at most {limit}, or give "
            "--wait-for-machines-s if an autoscaler starts more."
        )


def wanted(config: TrainConfig, found: Hardware) -> tuple[str, int, int]:
    """The device, and the least and the most workers."""
    device = ("cuda" if found.gpus >= 1 else "cpu") if config.device == "auto" else config.device
    fewest, most = config.elastic_workers or (_wanted_workers(config, device, found),) * 2
    return device, fewest, most


def available_workers(device: str, found: Hardware) -> int:
    """How many workers find a device of their own."""
    return int(found.gpus if device == "cuda" else found.cpus)


def _wanted_workers(config: TrainConfig, device: str, found: Hardware) -> int:
    if config.workers != "auto":
        return int(config.workers)
    return int(found.gpus) if device == "cuda" else max(1, int(found.cpus * 3 / 4))


def _floor(cpus: float) -> float:
    """Ray counts CPUs in ten-thousandths; rounding up would ask for more than there is."""
    return max(math.floor(cpus * 1000) / 1000, 0.001)
