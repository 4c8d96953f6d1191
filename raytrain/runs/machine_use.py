"""What a worker makes of its machine, as of a few seconds ago."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """One worker's speed, and the use of its node and of its GPU. What is not known, or not there, is None.

    ``cpu_fraction`` is of all cores of the node, by whatever runs there, and so is the memory. ``shared_memory_bytes``
    is memory that processes share, as Ray's object store and other decoded images.
    """

    rank: int
    node: str
    images_per_s: float
    data_wait_fraction: float
    cpu_fraction: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    shared_memory_bytes: int | None = None
    gpu: str | None = None
    gpu_fraction: float | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
