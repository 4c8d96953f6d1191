"""A data set kept decoded in Ray's object store: filled by the driver while training already runs, read by every worker."""

from __future__ import annotations

import threading
from typing import Any

import ray

from raytrain.backends.ray.failures import root_cause
from raytrain.backends.ray.ingest import DataCpus, ImageSet, block_refs, read_table, to_block
from raytrain.data.block_order import CacheOrder
from raytrain.data.decode import ImageShape
from raytrain.data.partition import Block

_POLL_S = 10.0
_FIRST_BLOCKS = 4  # read before anything else is started, so that the first steps have the data and the cores
_CLOSE_S = 10.0


class CacheFiller:
    """Reads data sets into the object store, one after the other, and tells the run's actor of each block.

    The driver reads the first blocks itself, so that training can begin; the rest is for Ray Data, which starts when the
    workers have: not beside them, for both keep every core busy. Lives in the driver, which owns the blocks: they outlast
    any worker, and Ray reads lost ones again.
    """

    def __init__(self, coordinator: Any, cpus: DataCpus, sets: dict[str, tuple[ImageSet, CacheOrder]]) -> None:
        self._coordinator = coordinator
        self._cpus = cpus
        self._sets = sets
        self._refs: list[Any] = []
        self._workers_started = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._fill, daemon=True, name="cache")
        self._thread.start()

    def go_on(self) -> None:
        """The workers have started: read the rest."""
        self._workers_started.set()

    def close(self) -> None:
        """Let go of the blocks."""
        self._closed = True
        self._workers_started.set()
        self._thread.join(_CLOSE_S)
        self._refs.clear()

    def _fill(self) -> None:
        try:
            heads = {name: self._add_head(name) for name in self._sets}
            self._workers_started.wait()
            for name, (images, order) in self._sets.items():
                for _, ref in block_refs(images, [order], self._cpus, first=heads[name]):
                    if self._closed:
                        return
                    self._add(name, ref)
        except Exception as error:
            if not self._closed:
                self._coordinator.fail_blocks.remote(root_cause(error))

    def _add_head(self, name: str) -> int:
        """Read the first blocks here; how many."""
        images, order = self._sets[name]
        count = min(_FIRST_BLOCKS, len(order)) if name == "train" else 0
        for number in range(count):
            self._add(name, ray.put(read_table(images, order.samples(number))))
        return count

    def _add(self, name: str, ref: Any) -> None:
        self._refs.append(ref)
        self._coordinator.add_blocks.remote(name, [ref])


class RemoteBlocks:
    """The blocks of a cached data set as a worker sees them: shared memory on its node, waited for where not there yet."""

    def __init__(self, coordinator: Any, name: str, shape: ImageShape) -> None:
        self._coordinator = coordinator
        self._name = name
        self._shape = shape
        self._refs: list[Any] = []
        self._blocks: dict[int, Block] = {}

    def __call__(self, number: int) -> Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = to_block(ray.get(self._ref(number)), self._shape)
        return block

    def _ref(self, number: int) -> Any:
        while number >= len(self._refs):
            self._refs += ray.get(self._coordinator.blocks.remote(self._name, len(self._refs), _POLL_S))
        return self._refs[number]
