"""Streaming through the run's actor: the driver reads the blocks of all workers, in turn, and each worker takes its own.

One pipeline for all of them, outside of them: it reads while they start, its processes stay warm, and it takes nothing of the
interpreter of a process that trains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain.backends.ray.failures import root_cause
from raytrain.backends.ray.ingest import DataCpus, ImageSet, block_refs, to_block
from raytrain.backends.ray.stream_queues import FEED, WAIT, Stream
from raytrain.data.batch_plan import BatchPlan
from raytrain.data.block_order import WorkerOrder
from raytrain.data.decode import ImageShape
from raytrain.data.partition import Block, Partition, Prefetch

_POLL_S = 10.0
_CLOSE_S = 10.0
_AHEAD_BLOCKS, _AHEAD_BYTES = 4, 64 << 20  # that wait for a worker


class StreamReader:
    """Reads the streams that workers ask for, and from now on the one that is ``foreseen``. Lives in the driver."""

    def __init__(
        self, coordinator: Any, cpus: DataCpus, sets: dict[str, tuple[ImageSet, BatchPlan]], loads: Sequence[float], foreseen: Stream | None
    ) -> None:
        self._coordinator = coordinator
        self._cpus = cpus
        self._sets = sets
        self._loads = loads
        self._closed = False
        self._readers: list[threading.Thread] = []
        if foreseen is not None:
            ray.get(coordinator.open_stream.remote(foreseen))
            self._begin(foreseen)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="streams")
        self._listener.start()

    def close(self) -> None:
        """Read no more, and wait until nothing here asks the cluster for anything."""
        self._closed = True
        with suppress(Exception):  # the actor may be gone
            ray.get(self._coordinator.close_streams.remote(), timeout=_CLOSE_S)
        until = time.monotonic() + _CLOSE_S
        self._listener.join(_CLOSE_S)  # before it has ended, it may begin another reader
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))

    def _listen(self) -> None:
        wanted = self._coordinator.wanted.options(concurrency_group=FEED)
        with suppress(RayError):  # the end of the run ends it
            while not self._closed:
                stream: Any = ray.get(wanted.remote(_POLL_S))
                if stream is not None:
                    self._begin(stream)

    def _begin(self, stream: Stream) -> None:
        reader = threading.Thread(target=self._read, args=(stream,), daemon=True, name=f"stream-{stream.name}")
        self._readers = [each for each in self._readers if each.is_alive()] + [reader]
        reader.start()

    def _read(self, stream: Stream) -> None:
        images, plan = self._sets[stream.name]
        loads = self._loads or (1.0,) * stream.num_workers
        orders = [WorkerOrder(Partition(plan, rank, loads), stream.first_step, images.rows_per_block) for rank in range(len(loads))]
        push = self._coordinator.push.options(concurrency_group=FEED)
        depth = images.within(_AHEAD_BLOCKS, _AHEAD_BYTES)
        try:
            for rank, ref in block_refs(images, orders, self._cpus):
                if not ray.get(push.remote(stream, rank, [ref], depth)):
                    return
        except Exception as error:
            if not self._closed:
                self._coordinator.fail_stream.remote(stream, root_cause(error))


def streamed_blocks(coordinator: Any, stream: Stream, rank: int, shape: ImageShape) -> Iterator[Block]:
    """A worker's blocks of a stream, in order, the next ones fetched from other nodes ahead; it ends with whoever reads it."""
    blocks = Prefetch(_taken(coordinator, stream, rank, shape), depth=2)
    try:
        yield from blocks
    finally:
        blocks.close()


def _taken(coordinator: Any, stream: Stream, rank: int, shape: ImageShape) -> Iterator[Block]:
    take = coordinator.take.options(concurrency_group=WAIT)
    while True:
        for ref in ray.get(take.remote(stream, rank, _POLL_S)):
            yield to_block(ray.get(ref), shape)
