"""Speed of each worker, and its use of CPU, memory and GPU, now and over the time of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from raytrain.config.option_values import matches
from raytrain.runs.documents import MACHINE_HISTORY, MACHINES, known_fields, read_json, write_json
from raytrain.storage.store import Store

MEASURE_EVERY_S = 5.0  # seconds between two measurements of a worker


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """One worker's speed, and the use of its node and of its GPU. An unknown value is None.

    ``step`` counts the completed steps. ``data_wait_fraction`` is the part of the time in which the loop has waited for
    images. ``gpu`` is the type of the GPU. CPU and memory are those of the whole node, for all of its processes:
    ``cpu_fraction`` is 1 if all cores are busy. ``shared_memory_bytes`` is memory that processes share, such as Ray's
    object store and other decoded images; ``object_store_bytes`` is the part in the node's object store.
    ``gpu_joules`` is the energy that the GPU has used since the worker began.
    """

    rank: int
    node: str
    step: int | None = None
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
    gpu_joules: float | None = None

    def rates_and_fractions(self) -> dict[str, float]:
        """Return the known values that a history keeps, by name: a rate, and fractions from 0 to 1."""
        # Fractions, because the nodes of a cluster differ in size.
        values = {
            "images_per_s": self.images_per_s,
            "data_wait_fraction": self.data_wait_fraction,
            "cpu_fraction": self.cpu_fraction,
            "memory_fraction": _fraction(self.memory_bytes, self.memory_total_bytes),
            "shared_memory_fraction": _fraction(self.shared_memory_bytes, self.memory_total_bytes),
            "object_store_fraction": _fraction(self.object_store_bytes, self.object_store_total_bytes),
            "gpu_fraction": self.gpu_fraction,
            "gpu_memory_fraction": _fraction(self.gpu_memory_bytes, self.gpu_memory_total_bytes),
        }
        return {name: value for name, value in values.items() if value is not None}


def _fraction(used: int | None, total: int | None) -> float | None:
    return None if used is None or not total else used / total


def write_machines(store: Store, uses: Sequence[MachineUse]) -> None:
    """Write how the workers use their machines now, for viewers in other processes."""
    write_json(store, MACHINES, {"workers": [asdict(use) for use in uses]})


def read_machines(store: Store) -> tuple[MachineUse, ...]:
    """Return what :func:`write_machines` wrote last, without workers whose values are damaged."""
    workers = read_json(store, MACHINES).get("workers")
    documents = cast(list[Any], workers) if isinstance(workers, list) else []
    uses = [known_fields(MachineUse, cast("dict[str, Any]", use)) for use in documents if isinstance(use, dict)]
    return tuple(MachineUse(**values) for values in uses if len(values) == len(fields(MachineUse)))


MAX_POINTS = 400
MAX_WORKERS = 16
_DIGITS = 4  # after the decimal point


class MachineHistory:
    """Measurements of the first 16 workers over time: at most 400 points, each the mean of equally many measurements.

    At first, a point is one measurement. Whenever there are 400 points, every two neighbours are merged into one, and
    from then on a point has twice as many measurements. So a run of any length takes bounded memory.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, str] = {}  # by rank
        self._every = 1  # measurements in a point
        self._num_pending = 0  # measurements at the end of the lists that are no point yet
        self._times: list[float] = []  # seconds after the start of the run
        self._columns: dict[tuple[int, str], list[float | None]] = {}  # by rank and name, a value for each time

    def add(self, elapsed_s: float, uses: Sequence[MachineUse]) -> None:
        """Add the workers' latest measurements, ``elapsed_s`` seconds after the start of the run."""
        uses = uses[:MAX_WORKERS]
        self._nodes |= {use.rank: use.node for use in uses}
        values = {(use.rank, name): value for use in uses for name, value in use.rates_and_fractions().items()}
        # A new column has None at the times before.
        for key in self._columns.keys() | values.keys():
            self._columns.setdefault(key, [None] * len(self._times)).append(values.get(key))
        self._times.append(round(elapsed_s, 1))

        # Make a point of the latest measurements once there are enough, and merge points once there are too many.
        self._num_pending += 1
        if self._num_pending == self._every:
            self._merge(len(self._times) - self._every, self._every)
            self._num_pending = 0
        if len(self._times) - self._num_pending >= MAX_POINTS:
            self._merge(0, 2)
            self._every *= 2

    def to_json(self) -> dict[str, Any]:
        """Return the document: the times of the points, and for each worker the rank, the node, and its values then.

        ``every`` is the number of measurements in a point. Measurements that are no point yet are left out.
        """
        num_points = len(self._times) - self._num_pending
        values_of: dict[int, dict[str, list[float | None]]] = {rank: {} for rank in sorted(self._nodes)}
        for (rank, name), column in sorted(self._columns.items()):
            values_of[rank][name] = column[:num_points]
        workers = [{"rank": rank, "node": self._nodes[rank], "values": values} for rank, values in values_of.items()]
        return {"every": self._every, "elapsed_s": self._times[:num_points], "workers": workers}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> MachineHistory:
        """Return the history in a document of :meth:`to_json`; if that is damaged, the part that can be used."""
        history = cls()
        every, times, workers = (document.get(name) for name in ("every", "elapsed_s", "workers"))
        if not (matches(every, int) and matches(times, list[float]) and len(cast(list[float], times)) <= MAX_POINTS):
            return history
        # Leave out workers and columns that are damaged: a column may have another length than the times.
        history._every, history._times = max(1, cast(int, every)), cast(list[float], times)
        for worker in cast(list[Any], workers)[:MAX_WORKERS] if isinstance(workers, list) else ():
            if not matches(worker, dict[str, Any]):
                continue
            rank, node, columns = (worker.get(name) for name in ("rank", "node", "values"))
            if type(rank) is int and isinstance(node, str) and matches(columns, dict[str, list[float | None]]):
                for name, column in columns.items():
                    if len(column) == len(history._times):
                        history._nodes[rank] = node
                        history._columns[rank, name] = column
        return history

    def _merge(self, first: int, size: int) -> None:
        """Merge each ``size`` points from ``first`` on into one, with their last time and the means of known values."""
        self._times[first:] = self._times[first + size - 1 :: size]
        for column in self._columns.values():
            merged: list[float | None] = []
            for start in range(first, len(column), size):
                values = [value for value in column[start : start + size] if value is not None]
                merged.append(round(sum(values) / len(values), _DIGITS) if values else None)
            column[first:] = merged


def read_machine_history(store: Store) -> MachineHistory:
    """Return the history of the run in ``store``; empty if there is none, or it is damaged."""
    return MachineHistory.from_json(read_json(store, MACHINE_HISTORY))
