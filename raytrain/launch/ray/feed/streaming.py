"""Feeders of streamed images: each reads the blocks of a few workers, in turn, into one queue for each worker.

A feeder is a process outside of its workers: it reads while they start, and does not compete with training for a Python
interpreter. Starting the task of a block takes time, above all in Ray Data; that limits how many workers it can feed.

The path of an image, in the order of the calls:

1. :func:`stream_blocks`, in a worker, asks the worker's feeder for a stream: one pass over a data set.
2. :meth:`StreamFeeder.read_stream` opens a queue for each of the feeder's workers, and has a thread fill them.
3. :func:`block_refs` has the blocks of these workers read, in turn: the first ones by plain tasks
   (:func:`~raytrain.launch.ray.feed.ingest.blocks_by_tasks`), all others by Ray Data.
4. :func:`~raytrain.launch.ray.feed.ingest.read_block`, in a data task, fetches and decodes one block, and leaves it in
   the object store of its node.
5. :meth:`StreamQueues.push` puts a reference to the block into its worker's queue, and waits while that is full.
6. :meth:`StreamQueues.take`, called by the worker, empties the queue. :func:`stream_blocks` fetches the blocks
   themselves to the worker's node, two of them ahead of their use.

One thread reads for all workers of a feeder, and their queues are bounded. So a full queue must never keep the thread
from the block for which another worker waits. The order in which it reads guarantees that: it is never more than a
block ahead of any worker (``interleave`` in ``data/plan/partition.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
import ray.data
from ray.actor import ActorProxy
from ray.data import DataContext, ExecutionResources
from ray.exceptions import RayError

from raytrain.data.blocks import Block, to_block
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import BlockOrder, BlockRef, Partition, WorkerOrder, interleave
from raytrain.data.prefetch import Prefetch
from raytrain.errors import RaytrainError
from raytrain.launch.ray.feed.ingest import TASKS_PER_CPU, DataCpus, ImageSet, blocks_by_tasks, read_block
from raytrain.launch.ray.private_api import PAUSE, on_this_node
from raytrain.launch.ray.ray_errors import LOST_ACTOR, root_cause

_POLL_S = 10.0
_CLOSE_S = 10.0
_AHEAD_BLOCKS, _AHEAD_BYTES = 4, 64 << 20  # limits of what waits for a worker
_WORKERS_PER_FEEDER = 4  # GPUs that use 3,000 photographs/s need 27 blocks/s, a third of what Ray Data starts on a core
_TAKES_PER_WORKER = 2  # calls of take() at the same time: for training images, and for validation images
_ENDED = "another worker group reads the data now"


@dataclass(frozen=True)
class Stream:
    """One pass over a data set by the workers of one attempt; the same on all of them."""

    attempt: int  # number of the attempt, counted from 0 since the coordinator started
    number: int  # number of this attempt's passes over the data set, counted from 0
    dataset: str  # train, validation or test
    first_step: int
    num_workers: int

    @property
    def age(self) -> tuple[int, int]:
        """A pair of numbers by which passes over a data set are ordered: a later pass has a larger one."""
        return self.attempt, self.number


def stream_blocks(
    feeders: Sequence[FeederHandle], stream: Stream, images: ImageSet, partition: Partition
) -> Iterator[Block]:
    """Yield a worker's blocks of a stream, in order; the next two are fetched from other nodes ahead of time.

    Raises ConnectionError if the feeder has died, so that a restart may succeed, RuntimeError if a newer stream has
    ended this one, and RaytrainError if the images cannot be read.
    """
    feeder = feeders[feeder_of(stream, partition.rank, len(feeders))]

    def take_blocks() -> Iterator[Block]:
        """Yield the blocks as the feeder hands them out, until the caller stops."""
        try:
            # The first worker of a feeder that asks opens the stream, unless the driver did while the workers started.
            ray.get(feeder.read_stream.remote(stream, images, partition.plan, partition.loads))
            while True:
                for ref in ray.get(feeder.take.remote(stream, partition.rank, _POLL_S)):
                    yield to_block(ray.get(ref), images.format.shape)
        except LOST_ACTOR:
            raise ConnectionError("the process that feeds it with images has died") from None

    blocks = Prefetch(take_blocks(), depth=2)
    try:
        yield from blocks
    finally:
        blocks.close()


def feeder_of(stream: Stream, rank: int, num_feeders: int) -> int:
    """Return the number of the feeder that reads for worker ``rank``; workers with neighbouring ranks share one."""
    return rank * num_feeders // stream.num_workers


class StreamQueues:
    """Bounded queues of blocks, one for each worker of a stream. Any number of threads may call its methods.

    Opening a stream ends the older ones of its data set, and all of earlier attempts. One thread for each stream fills
    its queues by :meth:`push`, and each worker empties its own by :meth:`take`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # wakes all of the few threads that wait, to take or to push
        self._queues: dict[Stream, dict[int, deque[Any]]] = {}  # by rank
        self._failures: dict[Stream, str] = {}
        self._newest: dict[str, tuple[int, int]] = {}  # by data set: the :attr:`Stream.age` of its newest stream
        self._closed = False

    def open(self, stream: Stream, ranks: Iterable[int]) -> bool:
        """Open a queue for each of these workers; return False if the stream is open already.

        Raises RuntimeError if a newer stream has ended this one, or if all are closed.
        """
        with self._changed:
            if stream in self._queues:
                return False
            # Refuse a worker of an earlier attempt, which may still ask after the next attempt has begun to read.
            newest_attempt = max((attempt for attempt, _ in self._newest.values()), default=0)
            newest_age = self._newest.get(stream.dataset, stream.age)
            if self._closed or stream.attempt < newest_attempt or stream.age < newest_age:
                raise RuntimeError(_ENDED)
            for older in list(self._queues):
                if older.dataset == stream.dataset or older.attempt < stream.attempt:
                    del self._queues[older]
            self._newest[stream.dataset] = stream.age
            self._queues[stream] = {rank: deque() for rank in ranks}
            self._changed.notify_all()
            return True

    def push(self, stream: Stream, rank: int, block: Any, depth: int) -> bool:
        """Queue a block for a worker once fewer than ``depth`` are queued; return False if the stream has ended."""
        with self._changed:
            self._changed.wait_for(lambda: stream not in self._queues or len(self._queues[stream][rank]) < depth)
            if stream not in self._queues:
                return False
            self._queues[stream][rank].append(block)
            self._changed.notify_all()
            return True

    def take(self, stream: Stream, rank: int, timeout_s: float) -> list[Any]:
        """Return the blocks queued for a worker, once there is one; [] after ``timeout_s`` seconds without one.

        Raises RuntimeError if a newer stream has begun, and RaytrainError if this one has failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: stream not in self._queues or self._queues[stream][rank] or stream in self._failures, timeout_s
            )
            if stream not in self._queues:
                raise RuntimeError(_ENDED)
            blocks = list(self._queues[stream][rank])
            if not blocks and stream in self._failures:
                raise RaytrainError(self._failures[stream])
            self._queues[stream][rank].clear()
            self._changed.notify_all()
            return blocks

    def fail(self, stream: Stream, reason: str) -> None:
        """End a stream early: after the queued blocks, :meth:`take` raises RaytrainError with the reason."""
        with self._changed:
            self._failures[stream] = reason
            self._changed.notify_all()

    def close(self) -> None:
        """End all streams."""
        with self._changed:
            self._closed = True
            self._queues.clear()
            self._changed.notify_all()


class StreamFeeder(StreamQueues):
    """The actor that reads the streams of some of a run's workers into queues; number ``number`` of ``num_feeders``.

    ``cpus`` are its share of the CPUs for reading.
    """

    def __init__(self, number: int, num_feeders: int, cpus: DataCpus) -> None:
        super().__init__()
        self._number = number
        self._num_feeders = num_feeders
        self._cpus = cpus
        self._readers: list[threading.Thread] = []

    def read_stream(self, stream: Stream, images: ImageSet, plan: BatchPlan, loads: Sequence[float]) -> None:
        """Begin to read a stream for the workers of this feeder, in a thread, unless it is being read already.

        ``loads`` are the shares of all workers, relative to each other. Raises RuntimeError if a newer stream has ended
        this one.
        """
        orders = {
            rank: WorkerOrder(Partition(plan, rank, loads), stream.first_step, images.rows_per_block)
            for rank in range(stream.num_workers)
            if feeder_of(stream, rank, self._num_feeders) == self._number
        }
        if self.open(stream, orders):
            reader = threading.Thread(target=self._fill_queues, args=(stream, images, orders), daemon=True)
            self._readers = [thread for thread in self._readers if thread.is_alive()] + [reader]
            reader.start()

    def close(self) -> None:
        """Stop reading, and wait until no thread here uses the cluster any more."""
        super().close()
        for reader in self._readers:
            reader.join()

    def _fill_queues(self, stream: Stream, images: ImageSet, orders: dict[int, WorkerOrder]) -> None:
        """Read a stream, in a thread: put the blocks of its workers, in their ``orders``, into their queues.

        Returns when all are read, or the stream has ended. The workers get an error in place of the next blocks.
        """
        ranks = list(orders)
        depth = images.num_blocks_in(_AHEAD_BYTES, at_most=_AHEAD_BLOCKS)
        try:
            for number, (order, ref) in enumerate(block_refs(images, list(orders.values()), self._cpus)):
                if not self.push(stream, ranks[order], ref, depth):
                    return
                if number >= depth * len(ranks):  # more blocks than the queues hold, so workers have taken some
                    _workers_train.set()
        except Exception as error:
            self.fail(stream, root_cause(error))


FeederHandle = ActorProxy[StreamFeeder]


def start_feeders(num_workers: int, cpus: DataCpus) -> tuple[FeederHandle, ...]:
    """Start a feeder for every four workers. A single one is on the driver's node, several are spread over all nodes.

    Ray restarts feeders that die; their streams are lost. The CPUs for reading, ``cpus``, are divided evenly.
    """
    num_feeders = -(-num_workers // _WORKERS_PER_FEEDER)  # rounded up
    where = {"label_selector": on_this_node()} if num_feeders == 1 else {"scheduling_strategy": "SPREAD"}
    num_calls = 2 * _TAKES_PER_WORKER * _WORKERS_PER_FEEDER + 2  # at once: takes of two attempts, one read, one close
    actor: Any = ray.remote(StreamFeeder).options(num_cpus=0, max_restarts=-1, max_concurrency=num_calls, **where)
    share = DataCpus(cpus.all / num_feeders, cpus.task)
    return tuple(actor.remote(number, num_feeders, share) for number in range(num_feeders))


def stop_feeders(feeders: Sequence[FeederHandle]) -> None:
    """Stop all reading, and end the feeders' processes, also those that do not answer within ten seconds."""
    with suppress(RayError):  # GetTimeoutError is one, too
        ray.get([feeder.close.remote() for feeder in feeders], timeout=_CLOSE_S)
    for feeder in feeders:
        ray.kill(feeder)  # pyright: ignore[reportArgumentType] ; Ray types a handle as handle or class


# Limits per order of what plain tasks read while Ray Data starts, which takes seconds.
_FIRST_BLOCKS, _FIRST_BYTES = 4, 64 << 20
_TURN_S = 0.01
_BLOCKS_PER_EXECUTION = 1024  # more would delay the first task: Ray Data plans all tasks of an execution before it
_workers_train = threading.Event()
"""Set once workers take blocks. Until then, only half as many processes read, so that workers can start faster."""


def block_refs(images: ImageSet, orders: Sequence[BlockOrder], cpus: DataCpus) -> Iterator[tuple[int, Any]]:
    """Have the blocks of all ``orders`` read, in turn; yield the index of a block's order, and a reference to it.

    Plain tasks read the first blocks, while Ray Data starts in a thread. It reads all others.
    """
    turns = interleave(orders)
    first_turns = list(islice(turns, images.num_blocks_in(_FIRST_BYTES, at_most=_FIRST_BLOCKS) * len(orders)))
    by_ray_data = Prefetch(_blocks_by_ray_data(images, orders, turns, cpus), depth=2)  # starts now
    try:
        # Plain tasks ask for no CPUs: Ray Data has those for reading already, and the workers need all others.
        yield from blocks_by_tasks(images, orders, first_turns, cpus.num_tasks, task_cpus=0)
        yield from by_ray_data
    finally:
        by_ray_data.close(_CLOSE_S)  # otherwise its thread might use a cluster that has ended


def _blocks_by_ray_data(
    images: ImageSet, orders: Sequence[BlockOrder], turns: Iterator[BlockRef], cpus: DataCpus
) -> Iterator[tuple[int, Any]]:
    """Have the blocks of ``turns`` read by Ray Data, which limits the memory of blocks that are read and not yet used.

    Yields the index of each block's order in ``orders``, and a reference to the block.
    """

    def read_row(row: Any) -> Any:  # a batch of one row, as arrays of length 1
        return read_block(images, orders[int(row["order"][0])], int(row["number"][0]))

    # Memory for two blocks per task and two per order: Ray Data starts no task while finished blocks that wait for
    # their turn fill the memory. With half as much, cores were idle 6 % of the time while photographs were read.
    num_blocks = 2 * TASKS_PER_CPU * cpus.num_tasks + 2 * len(orders)
    num_bytes = num_blocks * images.block_bytes
    while chunk := list(islice(turns, _BLOCKS_PER_EXECUTION)):
        # Set the context for each execution: it is one for the process, and another stream may have changed it.
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are reported once, by our own code
        context = DataContext.get_current()
        context.enable_progress_bars = False
        if _pause_api:
            context.custom_execution_callback_classes = [_Pause]
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = ExecutionResources(
            cpu=cpus.all / TASKS_PER_CPU, object_store_memory=num_bytes
        )

        # from_items has its rows at once; those of ray.data.range would be made by tasks.
        items = [{"order": order, "number": number} for order, number in chunk]
        rows = ray.data.from_items(items, override_num_blocks=len(items))
        blocks = rows.map_batches(
            read_row, batch_size=1, batch_format="numpy", num_cpus=cpus.streamed_task, zero_copy_batch=True
        )
        refs = (ref for bundle in blocks.iter_internal_ref_bundles() for ref in bundle.block_refs)
        for (order, _), ref in zip(chunk, refs, strict=True):
            yield order, ref


# The base class of _Pause, which is not used if this Ray has no such class.
_pause_api = PAUSE.find()
_ExecutionCallback: Any = _pause_api[0] if _pause_api else object


class _Pause(_ExecutionCallback):
    """Keeps Ray Data's scheduling loop from spinning when there is nothing to do, which would take a whole core.

    Once workers take blocks, it also lets Ray Data use all CPUs for reading instead of half of them.
    """

    def __init__(self) -> None:
        self._last_turn_at = 0.0
        self._limit_is_raised = False

    def on_execution_step(self, executor: Any) -> None:
        """Sleep so that each turn of Ray Data's loop takes at least 10 ms; Ray Data calls this after each turn."""
        if _workers_train.is_set() and not self._limit_is_raised:
            self._limit_is_raised = True
            if (options := getattr(executor, "_options", None)) is not None:  # see PAUSE in private_api.py
                limits: ExecutionResources = options.resource_limits
                options.resource_limits = limits.copy(cpu=limits.cpu * TASKS_PER_CPU)
        time.sleep(max(0.0, self._last_turn_at + _TURN_S - time.monotonic()))
        self._last_turn_at = time.monotonic()
