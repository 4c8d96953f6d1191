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

from raytrain.data.decode import ImageShape
from raytrain.data.ingest import DataCpus, ImageSet, block_refs, to_block
from raytrain.data.order import WorkerOrder
from raytrain.data.plan import Plan
from raytrain.data.shares import Block, Prefetch, Shares
from raytrain.data.streams import FEED, WAIT, Stream
from raytrain.failures import plain_reason

_POLL_S = 10.0
_CLOSE_S = 10.0
_AHEAD_BLOCKS, _AHEAD_BYTES = 4, 64 << 20  # that wait for a worker


class Streamer:
    """Reads the streams that workers ask for, and from now on the one that is ``foreseen``. Lives in the driver."""

    def __init__(
        self, actor: Any, cpus: DataCpus, sets: dict[str, tuple[ImageSet, Plan]], loads: Sequence[float], foreseen: Stream | None
    ) -> None:
        self._actor = actor
        self._cpus = cpus
        self._sets = sets
        self._loads = loads
        self._closed = False
        self._readers: list[threading.Thread] = []
        if foreseen is not None:
            ray.get(actor.open_stream.remote(foreseen))
            self._begin(foreseen)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="streams")
        self._listener.start()

    def close(self) -> None:
        """Read no more, and wait until nothing here asks the cluster for anything."""
        self._closed = True
        with suppress(Exception):  # the actor may be gone
            ray.get(self._actor.close_streams.remote(), timeout=_CLOSE_S)
        until = time.monotonic() + _CLOSE_S
        self._listener.join(_CLOSE_S)  # before it has ended, it may begin another reader
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))

    def _listen(self) -> None:
        wanted = self._actor.wanted.options(concurrency_group=FEED)
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
        orders = [WorkerOrder(Shares(plan, rank, loads), stream.first_step, images.rows_per_block) for rank in range(len(loads))]
        push = self._actor.push.options(concurrency_group=FEED)
        depth = images.within(_AHEAD_BLOCKS, _AHEAD_BYTES)
        try:
            for rank, ref in block_refs(images, orders, self._cpus):
                if not ray.get(push.remote(stream, rank, [ref], depth)):
                    return
        except Exception as error:
            if not self._closed:
                self._actor.fail_stream.remote(stream, plain_reason(error))


def streamed_blocks(actor: Any, stream: Stream, rank: int, shape: ImageShape) -> Iterator[Block]:
    """A worker's blocks of a stream, in order, the next ones fetched from other nodes ahead; it ends with whoever reads it."""
    blocks = Prefetch(_taken(actor, stream, rank, shape), depth=2)
    try:
        yield from blocks
    finally:
        blocks.close()


def _taken(actor: Any, stream: Stream, rank: int, shape: ImageShape) -> Iterator[Block]:
    take = actor.take.options(concurrency_group=WAIT)
    while True:
        for ref in ray.get(take.remote(stream, rank, _POLL_S)):
            yield to_block(ray.get(ref), shape)
