"""Reading images by tasks: each fetches and decodes a block of the plan. Imports no Ray Data, which takes a second."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray

from raytrain.data.blocks import Buffers, to_table
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageFormat
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.partition import BlockOrder, BlockRef
from raytrain.launch.ray.coordinator import CoordinatorHandle
from raytrain.launch.ray.private_api import is_repeated_task
from raytrain.storage.retries_and_hedges import take_num_retries
from raytrain.storage.store import Store


@dataclass(frozen=True)
class ImageSet:
    """The images of one manifest, in the form in which data tasks read them."""

    store: Store
    format: ImageFormat
    manifest: Any  # ObjectRef[Manifest]: one copy per node, however many tasks there are
    rows_per_block: int  # images in one block
    coordinator: CoordinatorHandle  # gets reports of unreadable images and of retried requests
    file_bytes: int | None = None  # mean size of a file, if workers get files instead of pixels

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of pixels, or of a block of files of mean size."""
        return self.rows_per_block * (self.file_bytes or self.format.shape.num_bytes)

    def num_blocks_in(self, num_bytes: int, *, at_most: int) -> int:
        """Return how many blocks fit into ``num_bytes``: at least 1, and no more than ``at_most``."""
        return max(1, min(at_most, num_bytes // self.block_bytes))


TASKS_PER_CPU = 2  # of Ray Data: one fetches while another decodes, and Ray Data notices the end of a task 0.1 s late


@dataclass(frozen=True)
class DataCpus:
    """CPUs for reading, ``all`` of them together, and how many of them one plain ``task`` takes."""

    all: float
    task: float

    @property
    def num_tasks(self) -> int:
        """Number of plain tasks that run at the same time, at least 1."""
        return max(1, round(self.all / self.task))

    @property
    def streamed_task(self) -> float:
        """CPUs that a task of Ray Data takes.

        Rounded down to the smallest fraction of a CPU in Ray, which might round it up: all tasks together would then
        need more CPUs than there are.
        """
        return math.floor(10_000 * self.task / TASKS_PER_CPU) / 10_000


_POLL_S = 0.5


def blocks_by_tasks(
    images: ImageSet,
    orders: Sequence[BlockOrder],
    turns: Iterable[BlockRef],
    max_running: int,
    task_cpus: float,
    is_closed: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Any]]:
    """Have the blocks of ``turns`` read by plain tasks; yield them as they are read, in turn.

    Yields the index of the block's order in ``orders``, and a reference to the block. The first block comes sooner than
    from Ray Data, but nothing limits how many blocks are read and not yet used. At most ``max_running`` tasks of
    ``task_cpus`` each run at the same time. The blocks lie on all nodes; a lost one is read again.

    The generator ends at most half a second after ``is_closed`` returns True, because a process that leaves Ray while
    one of its threads waits in it dies of a segmentation fault.
    """

    def wait_for_one(refs: list[Any]) -> list[Any]:
        """Wait until one of these blocks is read, and return the others; once ``is_closed``, return all at once."""
        ready: list[Any] = []
        while not (ready or is_closed()):
            ready, refs = ray.wait(refs, num_returns=1, timeout=_POLL_S, fetch_local=False)
        return refs

    read = ray.remote(read_block).options(num_cpus=task_cpus, max_retries=-1, scheduling_strategy="SPREAD")
    waiting: deque[tuple[int, Any]] = deque()  # begun, and not yielded yet
    running: list[Any] = []
    for order, number in turns:
        if len(running) >= max_running:  # further tasks would compete for CPUs with starting workers
            running = wait_for_one(running)
        if is_closed():
            return
        ref = read.remote(images, orders[order], number)
        waiting.append((order, ref))
        running.append(ref)
        # Blocks are yielded in turn: a block that is read early waits for those before it. The one just begun is
        # running, so that this stops before ``waiting`` is empty.
        while waiting[0][1] not in running:
            yield waiting.popleft()
    for order, ref in waiting:
        wait_for_one([ref])
        if is_closed():
            return
        yield order, ref


_buffers = Buffers()  # of this process, reused, because all blocks have the same size


def read_block(images: ImageSet, order: BlockOrder, number: int, reader: ImageReader | None = None) -> pa.Table:
    """Fetch and decode block ``number`` of ``order``, and report unreadable images to the coordinator.

    Returns a table with a row for each image, and the columns image (H*W*C bytes, or a file), label (below 0 if the
    image is unreadable) and draw; of files also length. A data task needs no ``reader``; whoever reads several blocks
    gives one, whose decoding process is kept. Requests that had to be repeated are reported to the coordinator, too.
    """
    # The manifest is not kept between two blocks, because that would keep its shared memory in use.
    manifest: Manifest = ray.get(images.manifest)

    # A buffer has the size of a full block, so that the last block of an epoch, which is smaller, can use it, too.
    buffer = None if images.format.as_files else _buffers.take((images.block_bytes,))

    # If Ray repeats a task, an image may have killed its process: then images are decoded in a process beside this one.
    reading = nullcontext(reader) if reader else ImageReader(images.store, *images.format, isolated=is_repeated_task())
    with reading as opened:
        block, skipped = opened.read_draws(manifest, order.draws(number), order.epoch(number), buffer)

    # Calls of the coordinator are not awaited, because nothing here depends on their answers.
    if num_retries := take_num_retries():
        images.coordinator.note_retries.remote(num_retries)
    if skipped:
        images.coordinator.note_skipped.remote(skipped)
    return to_table(block)
