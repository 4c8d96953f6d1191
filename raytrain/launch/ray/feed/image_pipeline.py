"""Reading images with Ray Data: plan rows in, blocks of decoded images out, in order.

A row of the pipeline is the number of a block, which its map stage reads. So the pipeline has no listing, shuffle or
barrier, and one execution spans epochs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import ray.data
from ray.data import DataContext, ExecutionResources

from raytrain.data.local_batch import Prefetch
from raytrain.data.plan.block_order import BlockOrder, BlockRef, interleave
from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet, blocks_by_tasks, read_block
from raytrain.launch.ray.private_api import EXECUTION_CALLBACK

_HEAD_BLOCKS, _HEAD_BYTES = 4, 64 << 20  # per order, read by plain tasks while a pipeline starts, which takes seconds
_TURN_S = 0.01
_CLOSE_S = 10.0
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
        bundles = _pipeline(images, orders, chunk, cpus).iter_internal_ref_bundles()  # REF_BUNDLES in private_api.py
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


_ExecutionCallback: Any = EXECUTION_CALLBACK.load()


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
    context.custom_execution_callback_classes = [_Pause]
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(cpu=cpus, object_store_memory=object_store_bytes)
