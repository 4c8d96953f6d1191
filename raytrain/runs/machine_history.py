"""Speed, CPU, memory and GPU of each worker, now and over the time of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from raytrain.runs.documents import MACHINE_HISTORY, MACHINES, known_fields, matches, read_json, write_json
from raytrain.storage.store import Store

MEASURE_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """One worker's speed, and the use of its node and of its GPU. What is not known, or not there, is None.

    ``step`` counts the completed steps. ``cpu_fraction`` is of all cores of the node, by whatever runs there,
    and so is the memory. ``shared_memory_bytes`` is memory that processes share, as Ray's object store and other
    decoded images. ``object_store_bytes`` is what that store of the node holds.
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


def write_machines(store: Store, uses: Sequence[MachineUse]) -> None:
    """Write what the workers make of their machines, for those who watch the run from elsewhere."""
    write_json(store, MACHINES, {"workers": [asdict(use) for use in uses]})


def read_machines(store: Store) -> tuple[MachineUse, ...]:
    """What :func:`write_machines` wrote last; what is damaged is left out."""
    workers = read_json(store, MACHINES).get("workers")
    documents = cast(list[Any], workers) if isinstance(workers, list) else []
    known = [known_fields(MachineUse, cast("dict[str, Any]", each)) for each in documents if isinstance(each, dict)]
    return tuple(MachineUse(**each) for each in known if len(each) == len(fields(MachineUse)))


MAX_POINTS = 400
MAX_WORKERS = 16
_DIGITS = 4


class MachineHistory:
    """Measurements of the first 16 workers: at most 400 points, each a mean of equally many."""

    def __init__(self) -> None:
        self._nodes: dict[int, str] = {}  # by rank
        self._every = 1  # measurements of a point
        self._num_pending = 0  # the last measurements, which are no point yet
        self._times: list[float] = []
        self._columns: dict[tuple[int, str], list[float | None]] = {}  # by rank and name, a value for each time

    def add(self, elapsed_s: float, uses: Sequence[MachineUse]) -> None:
        """Add what the workers measured last, ``elapsed_s`` seconds after the start of the run."""
        shown = uses[:MAX_WORKERS]
        self._nodes |= {use.rank: use.node for use in shown}
        values = {(use.rank, name): value for use in shown for name, value in _measured(use) if value is not None}
        for key in self._columns.keys() | values.keys():
            self._columns.setdefault(key, [None] * len(self._times)).append(values.get(key))
        self._times.append(round(elapsed_s, 1))
        self._num_pending += 1
        if self._num_pending == self._every:
            self._merge(len(self._times) - self._every, self._every)
            self._num_pending = 0
        if len(self._times) - self._num_pending >= MAX_POINTS:
            self._merge(0, 2)
            self._every *= 2

    def to_json(self) -> dict[str, Any]:
        """The times of the points, and for each worker its rank, its node, and its values at these times."""
        end = len(self._times) - self._num_pending
        known = {key: column[:end] for key, column in sorted(self._columns.items())}
        workers = [
            {"rank": rank, "node": node, "values": {name: known[of, name] for of, name in known if of == rank}}
            for rank, node in sorted(self._nodes.items())
        ]
        return {"every": self._every, "elapsed_s": self._times[:end], "workers": workers}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> MachineHistory:
        """The inverse of :meth:`to_json`; of a damaged document, what can be used."""
        history = cls()
        every, times = document.get("every"), document.get("elapsed_s")
        if matches(every, int) and matches(times, list[float]) and len(cast(list[float], times)) <= MAX_POINTS:
            history._every, history._times = max(1, cast(int, every)), cast(list[float], times)
            for rank, node, name, column in _columns(document.get("workers"), len(history._times)):
                history._nodes[rank] = node
                history._columns[rank, name] = column
        return history

    def _merge(self, first: int, size: int) -> None:
        """Make one point of each ``size`` from ``first`` on: the mean of the values that are known."""
        self._times[first:] = self._times[first + size - 1 :: size]
        for column in self._columns.values():
            column[first:] = [_mean(column[place : place + size]) for place in range(first, len(column), size)]


def read_machine_history(store: Store) -> MachineHistory:
    """The history of the run in ``store``; empty if there is none."""
    return MachineHistory.from_json(read_json(store, MACHINE_HISTORY))


def _measured(use: MachineUse) -> Iterable[tuple[str, float | None]]:
    return (
        ("images_per_s", use.images_per_s),
        ("data_wait_fraction", use.data_wait_fraction),
        ("cpu_fraction", use.cpu_fraction),
        ("memory_fraction", _fraction(use.memory_bytes, use.memory_total_bytes)),
        ("shared_memory_fraction", _fraction(use.shared_memory_bytes, use.memory_total_bytes)),
        ("object_store_fraction", _fraction(use.object_store_bytes, use.object_store_total_bytes)),
        ("gpu_fraction", use.gpu_fraction),
        ("gpu_memory_fraction", _fraction(use.gpu_memory_bytes, use.gpu_memory_total_bytes)),
    )


def _fraction(used: int | None, total: int | None) -> float | None:
    return None if used is None or not total else used / total


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), _DIGITS) if known else None


def _columns(workers: object, length: int) -> Iterable[tuple[int, str, str, list[float | None]]]:
    """Rank, node, name and values of each column of a document that is whole."""
    for worker in cast(list[Any], workers)[:MAX_WORKERS] if isinstance(workers, list) else ():
        if not matches(worker, dict[str, Any]):
            continue
        rank, node, columns = (worker.get(name) for name in ("rank", "node", "values"))
        if type(rank) is int and isinstance(node, str) and matches(columns, dict[str, list[float | None]]):
            yield from ((rank, node, name, column) for name, column in columns.items() if len(column) == length)
