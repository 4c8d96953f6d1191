"""Streaming: feeders read the blocks of a few workers each, in turn, and each worker takes its own.

A feeder is a process outside of its workers: it reads while they start, and does not compete with training for a Python
interpreter. What it costs to start a block, in Ray Data above all, limits how many workers it can feed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import ray
import ray.data
from ray.actor import ActorProxy
from ray.data import DataContext, ExecutionResources
from ray.exceptions import RayActorError, RayError

from raytrain.data.blocks import Block, Prefetch, to_block
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import BlockOrder, BlockRef, Partition, WorkerOrder, interleave
from raytrain.launch.ray.feed.exchange import Stream, StreamQueues
from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet, blocks_by_tasks, read_block
from raytrain.launch.ray.private_api import PAUSE, on_this_node
from raytrain.launch.ray.trainer import root_cause

_POLL_S = 10.0
_CLOSE_S = 10.0
_AHEAD_BLOCKS, _AHEAD_BYTES = 4, 64 << 20  # that wait for a worker
_WORKERS_PER_FEEDER = 4  # GPUs that use 3,000 photographs/s need 27 blocks/s, a third of what Ray Data starts on a core
_TAKES_PER_WORKER = 2  # of training images, and meanwhile of test images; a group that has ended may have as many


class StreamFeeder:
    """Reads the streams of a part of a run's workers, and queues their blocks: one of ``num_feeders``."""

    def __init__(self, number: int, num_feeders: int, cpus: DataCpus) -> None:
        self._number = number
        self._num_feeders = num_feeders
        self._cpus = cpus
        self._queues = StreamQueues()
        self._readers: list[threading.Thread] = []

    def open(self, stream: Stream, images: ImageSet, plan: BatchPlan, loads: Sequence[float]) -> None:
        """Read a stream from now on, if that is not being done. Raises RuntimeError if a newer one has begun."""
        orders = {
            rank: WorkerOrder(Partition(plan, rank, loads), stream.first_step, images.rows_per_block)
            for rank in range(stream.num_workers)
            if feeder_of(stream, rank, self._num_feeders) == self._number
        }
        if self._queues.open(stream, orders):
            reader = threading.Thread(target=self._read, args=(stream, images, orders), daemon=True)
            self._readers = [each for each in self._readers if each.is_alive()] + [reader]
            reader.start()

    def take(self, stream: Stream, rank: int, timeout_s: float) -> list[Any]:
        """References of a worker's next blocks, see :meth:`StreamQueues.take`."""
        return self._queues.take(stream, rank, timeout_s)

    def close(self) -> None:
        """Stop reading, and wait until nothing here asks the cluster for anything."""
        self._queues.close()
        for reader in self._readers:
            reader.join()

    def _read(self, stream: Stream, images: ImageSet, orders: dict[int, WorkerOrder]) -> None:
        ranks = list(orders)
        depth = images.within(_AHEAD_BLOCKS, _AHEAD_BYTES)
        try:
            for number, (which, ref) in enumerate(block_refs(images, list(orders.values()), self._cpus)):
                if not self._queues.push(stream, ranks[which], ref, depth):
                    return
                if number >= depth * len(ranks):  # more than wait for the workers
                    _IS_TAKEN.set()
        except Exception as error:
            self._queues.fail(stream, root_cause(error))


FeederHandle = ActorProxy[StreamFeeder]


def start_feeders(num_workers: int, cpus: DataCpus) -> tuple[FeederHandle, ...]:
    """One feeder for every few workers: beside the driver, or several on all nodes. One that dies is started again."""
    count = -(-num_workers // _WORKERS_PER_FEEDER)
    where = {"label_selector": on_this_node()} if count == 1 else {"scheduling_strategy": "SPREAD"}
    calls = 2 * _TAKES_PER_WORKER * _WORKERS_PER_FEEDER + 2
    actor: Any = ray.remote(StreamFeeder).options(num_cpus=0, max_restarts=-1, max_concurrency=calls, **where)
    share = DataCpus(cpus.all / count, cpus.task)
    return tuple(actor.remote(number, count, share) for number in range(count))


def stop_feeders(feeders: Sequence[FeederHandle]) -> None:
    """Stop all reading, and end their processes."""
    with suppress(RayError):  # GetTimeoutError is one, too
        ray.get([feeder.close.remote() for feeder in feeders], timeout=_CLOSE_S)
    for feeder in feeders:
        ray.kill(feeder)  # pyright: ignore[reportArgumentType] ; Ray types a handle as handle or class


def feeder_of(stream: Stream, rank: int, num_feeders: int) -> int:
    """Which feeder has the blocks of a worker: neighbours have the same one."""
    return rank * num_feeders // stream.num_workers


def stream_blocks(
    feeders: Sequence[FeederHandle], stream: Stream, images: ImageSet, partition: Partition
) -> Iterator[Block]:
    """A worker's blocks of a stream, in order; the next ones are fetched from other nodes ahead of time."""
    blocks = Prefetch(_taken(feeders, stream, images, partition), depth=2)
    try:
        yield from blocks
    finally:
        blocks.close()


def _taken(feeders: Sequence[FeederHandle], stream: Stream, images: ImageSet, partition: Partition) -> Iterator[Block]:
    feeder = feeders[feeder_of(stream, partition.rank, len(feeders))]
    try:
        ray.get(feeder.open.remote(stream, images, partition.plan, partition.loads))
        while True:
            for ref in ray.get(feeder.take.remote(stream, partition.rank, _POLL_S)):
                yield to_block(ray.get(ref), images.shape)
    except RayActorError:
        raise ConnectionError("the process that feeds it with images has died") from None  # another start may pass


_HEAD_BLOCKS, _HEAD_BYTES = 4, 64 << 20  # per order, read by plain tasks while a pipeline starts, which takes seconds
_TURN_S = 0.01
_TASKS_PER_CPU = 2  # one fetches while another decodes, and Ray Data hears up to 0.1 s late that a task has ended
_IS_TAKEN = threading.Event()  # workers train; until then, half as many processes leave them more of the cores to start
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

    # Two blocks for each task and each order: Ray Data starts no task while those that have ended wait for their turn
    # and fill the room. With half of it, cores were idle 6 % of the time that photographs were read.
    room = (2 * _TASKS_PER_CPU * cpus.num_tasks + 2 * len(orders)) * images.rows_per_block * images.shape.num_bytes
    configure(DataContext.get_current(), cpus.all / _TASKS_PER_CPU, room)
    items = [{"which": which, "number": number} for which, number in turns]
    # Rows that exist already: those of a range are read by tasks.
    rows = ray.data.from_items(items, override_num_blocks=len(items))
    share = math.floor(10_000 * cpus.task / _TASKS_PER_CPU) / 10_000  # Ray rounds what is finer, also up
    return rows.map_batches(read_row, batch_size=1, batch_format="numpy", num_cpus=share, zero_copy_batch=True)


_found = PAUSE.find()
_ExecutionCallback: Any = _found[0] if _found else object


class _Pause(_ExecutionCallback):
    """Keeps Ray Data's scheduling loop from spinning while there is nothing to do, which takes a whole core.

    From the time at which workers take blocks, it lets Ray Data use all CPUs that there are for reading.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._is_raised = False

    def on_execution_step(self, executor: Any) -> None:
        """Called by Ray Data after each turn of its loop."""
        if _IS_TAKEN.is_set() and not self._is_raised:
            self._is_raised = True
            if (options := getattr(executor, "_options", None)) is not None:  # see PAUSE in private_api.py
                limits: ExecutionResources = options.resource_limits
                options.resource_limits = limits.copy(cpu=limits.cpu * _TASKS_PER_CPU)
        time.sleep(max(0.0, self._last + _TURN_S - time.monotonic()))
        self._last = time.monotonic()


def configure(context: DataContext, cpus: float, object_store_bytes: float) -> None:
    """Keep the order of rows, stay within ``cpus`` and ``object_store_bytes``, and keep quiet."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is reported once, in our words
    context.enable_progress_bars = False
    if _found:
        context.custom_execution_callback_classes = [_Pause]
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(cpu=cpus, object_store_memory=object_store_bytes)
