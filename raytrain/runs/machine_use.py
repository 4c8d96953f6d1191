"""What a worker makes of its machine, as of a few seconds ago."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from raytrain.runs.documents import read_json, write_json
from raytrain.runs.layout import MACHINES
from raytrain.runs.stored_values import known_fields

if TYPE_CHECKING:
    from raytrain.storage.base import Store


MEASURE_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """One worker's speed, and the use of its node and of its GPU. What is not known, or not there, is None.

    ``cpu_fraction`` is of all cores of the node, by whatever runs there, and so is the memory. ``shared_memory_bytes``
    is memory that processes share, as Ray's object store and other decoded images. ``object_store_bytes`` is what that
    store of the node holds.
    """

    rank: int
    node: str
    images_per_s: float
    data_wait_fraction: float
    cpu_fraction: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    shared_memory_bytes: int | None = None
    object_store_bytes: int | None = None
    object_store_total_bytes: int | None = None
    gpu: str | None = None
    gpu_fraction: float | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None


def write_machines(store: Store, uses: Sequence[MachineUse]) -> None:
    """Write what the workers make of their machines, for those who watch the run from elsewhere."""
    write_json(store, MACHINES, {"workers": [asdict(use) for use in uses]})


def read_machines(store: Store) -> tuple[MachineUse, ...]:
    """What :func:`write_machines` wrote last; what is damaged is left out."""
    workers = read_json(store, MACHINES).get("workers")
    documents = cast(list[Any], workers) if isinstance(workers, list) else []
    known = [known_fields(MachineUse, cast("dict[str, Any]", each)) for each in documents if isinstance(each, dict)]
    return tuple(MachineUse(**each) for each in known if len(each) == len(fields(MachineUse)))
