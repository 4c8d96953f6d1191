"""Streaming through the coordinator: the driver reads the blocks of all workers in turn, and each worker takes its own.

There is one pipeline for all workers, outside of them: it reads while they start, its processes stay warm, and it does
not compete with training for a Python interpreter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import ray
import ray.data
from ray.data import DataContext, ExecutionResources
from ray.exceptions import RayError

from raytrain.data.blocks import Block, Prefetch, to_block
from raytrain.data.images.decode import ImageShape
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import BlockOrder, BlockRef, Partition, WorkerOrder, interleave
from raytrain.launch.ray.coordinator import CoordinatorHandle
from raytrain.launch.ray.feed.exchange import Stream
from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet, blocks_by_tasks, read_block
from raytrain.launch.ray.private_api import PAUSE
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


_HEAD_BLOCKS, _HEAD_BYTES = 4, 64 << 20  # per order, read by plain tasks while a pipeline starts, which takes seconds
_TURN_S = 0.01
_BLOCKS_PER_EXECUTION = 1024  # Ray Data plans every task of an execution before the first one starts


def block_refs(images: ImageSet, orders: Sequence[BlockOrder], cpus: DataCpus) -> Iterator[tuple[int, Any]]:
    """References of the blocks of all ``orders``, in turn, as they are read: number of the order, and reference."""
    turns = interleave(orders)
    head = list(islice(turns, images.within(_HEAD_BLOCKS, _HEAD_BYTES) * len(orders)))
    piped = Prefetch(_by_pipelines(images, orders, cpus, turns), depth=2)  # starts now
    try:
        # They take no CPUs of the cluster: the pipeline beside them has those for reading, and workers need the others.
        yield from blocks_by_tasks(images, orders, head, cpus.num_tasks, task_cpus=0)
        yield from piped
    finally:
        piped.close(_CLOSE_S)  # otherwise its thread asks a cluster that may have ended by then


def _by_pipelines(
    images: ImageSet, orders: Sequence[BlockOrder], cpus: DataCpus, turns: Iterator[BlockRef]
) -> Iterator[tuple[int, Any]]:
    while chunk := list(islice(turns, _BLOCKS_PER_EXECUTION)):
        bundles = _pipeline(images, orders, chunk, cpus).iter_internal_ref_bundles()
        refs = (ref for bundle in bundles for ref in bundle.block_refs)
        for (which, _), ref in zip(chunk, refs, strict=True):
            yield which, ref


def _pipeline(
    images: ImageSet, orders: Sequence[BlockOrder], turns: Sequence[BlockRef], cpus: DataCpus
) -> ray.data.Dataset:
    def read_row(row: Any) -> Any:
        return read_block(images, orders[int(row["which"][0])], int(row["number"][0]))

    # The buffer limit: two blocks per task and two per order.
    room = (2 * cpus.num_tasks + 2 * len(orders)) * images.rows_per_block * images.shape.num_bytes
    configure(DataContext.get_current(), cpus.all, room)
    items = [{"which": which, "number": number} for which, number in turns]
    rows = ray.data.from_items(
        items, override_num_blocks=len(items)
    )  # its rows exist already; those of a range are read by tasks
    return rows.map_batches(read_row, batch_size=1, batch_format="numpy", num_cpus=cpus.task, zero_copy_batch=True)


_found = PAUSE.find()
_ExecutionCallback: Any = _found[0] if _found else object


class _Pause(_ExecutionCallback):
    """Keeps Ray Data's scheduling loop from spinning while there is nothing to do, which takes a whole core."""

    def __init__(self) -> None:
        self._last = 0.0

    def on_execution_step(self, executor: Any) -> None:
        """Called by Ray Data after each turn of its loop."""
        time.sleep(max(0.0, self._last + _TURN_S - time.monotonic()))
        self._last = time.monotonic()


def configure(context: DataContext, cpus: float, object_store_bytes: float | None = None) -> None:
    """Keep the order of rows, stay within ``cpus`` and ``object_store_bytes``, and keep quiet."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is reported once, in our words
    context.enable_progress_bars = False
    if _found:
        context.custom_execution_callback_classes = [_Pause]
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(cpu=cpus, object_store_memory=object_store_bytes)
