"""Streaming through the coordinator: the driver reads the blocks of all workers in turn, and each worker takes its own.

There is one pipeline for all workers, outside of them: it reads while they start, its processes stay warm, and it does
not compete with training for a Python interpreter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain.data.blocks import Block, to_block
from raytrain.data.images.decode import ImageShape
from raytrain.data.local_batch import Prefetch
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.block_order import WorkerOrder
from raytrain.data.plan.partition import Partition
from raytrain.launch.ray.coordinator import CoordinatorHandle
from raytrain.launch.ray.feed.exchange import Stream
from raytrain.launch.ray.feed.image_pipeline import block_refs
from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet
from raytrain.launch.ray.trainer import root_cause

_POLL_S = 10.0
_CLOSE_S = 10.0
_AHEAD_BLOCKS, _AHEAD_BYTES = 4, 64 << 20  # that wait for a worker


class StreamReader:
    """Reads the streams that workers request, and the ``expected`` one from now on. Lives in the driver."""

    def __init__(
        self,
        coordinator: CoordinatorHandle,
        cpus: DataCpus,
        sets: dict[str, tuple[ImageSet, BatchPlan]],
        loads: Sequence[float],
        expected: Stream | None,
    ) -> None:
        self._coordinator = coordinator
        self._cpus = cpus
        self._sets = sets
        self._loads = loads
        self._closed = False
        self._readers: list[threading.Thread] = []
        if expected is not None:
            ray.get(coordinator.open_stream.remote(expected))
            self._begin(expected)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="streams")
        self._listener.start()

    def close(self) -> None:
        """Stop reading, and wait until nothing here asks the cluster for anything."""
        self._closed = True
        with suppress(Exception):  # the actor may be gone
            ray.get(self._coordinator.close_streams.remote(), timeout=_CLOSE_S)
        until = time.monotonic() + _CLOSE_S
        self._listener.join(_CLOSE_S)  # until it has ended, it may start another reader
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))

    def _listen(self) -> None:
        with suppress(RayError):  # the end of the run ends it
            while not self._closed:
                stream: Any = ray.get(self._coordinator.requested_stream.remote(_POLL_S))
                if stream is not None:
                    self._begin(stream)

    def _begin(self, stream: Stream) -> None:
        reader = threading.Thread(target=self._read, args=(stream,), daemon=True, name=f"stream-{stream.dataset}")
        self._readers = [each for each in self._readers if each.is_alive()] + [reader]
        reader.start()

    def _read(self, stream: Stream) -> None:
        images, plan = self._sets[stream.dataset]
        loads = self._loads or (1.0,) * stream.num_workers
        orders = [
            WorkerOrder(Partition(plan, rank, loads), stream.first_step, images.rows_per_block)
            for rank in range(len(loads))
        ]
        depth = images.within(_AHEAD_BLOCKS, _AHEAD_BYTES)
        try:
            for rank, ref in block_refs(images, orders, self._cpus):
                if not ray.get(self._coordinator.push.remote(stream, rank, [ref], depth)):
                    return
        except Exception as error:
            if not self._closed:
                self._coordinator.fail_stream.remote(stream, root_cause(error))


def stream_blocks(coordinator: CoordinatorHandle, stream: Stream, rank: int, shape: ImageShape) -> Iterator[Block]:
    """A worker's blocks of a stream, in order; the next ones are fetched from other nodes ahead of time."""
    blocks = Prefetch(_taken(coordinator, stream, rank, shape), depth=2)
    try:
        yield from blocks
    finally:
        blocks.close()


def _taken(coordinator: CoordinatorHandle, stream: Stream, rank: int, shape: ImageShape) -> Iterator[Block]:
    while True:
        for ref in ray.get(coordinator.take.remote(stream, rank, _POLL_S)):
            yield to_block(ray.get(ref), shape)
