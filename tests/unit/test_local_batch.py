"""For any workers, streamed or cached, the local batches together are the batches that one worker would get."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytrain.data.blocks import (
    Block,
    Buffers,
    CachedBlocks,
    LocalBatch,
    batches_from_cache,
    batches_from_stream,
    to_block,
    to_table,
)
from raytrain.data.images.image_format import ImageShape
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder, Partition, WorkerOrder
from raytrain.data.plan.permutation import Int64s

loads = st.lists(st.sampled_from([0, 0.5, 1, 2, 3]), min_size=1, max_size=5).filter(any)


def block(samples: Int64s) -> Block:
    """Make images whose pixels are their sample's number; one in five cannot be read."""
    images = (samples % 256).astype(np.uint8).reshape(-1, 1, 1, 1)
    return Block(images, np.where(samples % 5, samples, -1), samples)


def all_streamed(partition: Partition, first_step: int, rows_per_block: int) -> list[LocalBatch]:
    order = WorkerOrder(partition, first_step, rows_per_block)
    return list(
        batches_from_stream(partition, (block(order.draws(number)) for number in range(len(order))), first_step)
    )


def all_cached(partition: Partition, first_step: int, rows_per_block: int) -> list[LocalBatch]:
    order = CacheOrder(partition.plan, first_step, rows_per_block)
    blocks = CachedBlocks(lambda number: block(order.draws(number)), order)
    return list(batches_from_cache(partition, blocks, first_step))


@pytest.mark.not_quick
@given(st.integers(1, 150), st.integers(1, 60), st.integers(0, 2**64 - 1), loads, st.integers(1, 50), st.data())
def test_workers_together_get_the_same_batches_as_one(
    num_samples: int, batch_size: int, seed: int, loads: list[float], rows_per_block: int, data: st.DataObject
) -> None:
    plan = BatchPlan(num_samples, batch_size, 2, seed)
    first_step = data.draw(st.integers(0, plan.num_steps - 1))
    for batches_of in (all_streamed, all_cached):
        by_rank = [batches_of(Partition(plan, rank, loads), first_step, rows_per_block) for rank in range(len(loads))]
        assert {len(batches) for batches in by_rank} == {plan.num_steps - first_step}
        for step, together in enumerate(zip(*by_rank, strict=True), start=first_step):
            planned = plan.batch_draws(plan.batch(step))
            used = np.concatenate([local.samples for local in together])
            assert used.tolist() == planned[planned % 5 > 0].tolist()
            for local in together:
                assert local.batch == plan.batch(step)
                assert local.labels.tolist() == local.samples.tolist()
                assert local.images.reshape(-1).tolist() == (local.samples % 256).tolist()


def test_memory_of_a_batch_is_used_again_only_when_nobody_has_a_part_of_it() -> None:
    buffers = Buffers()
    first = buffers.take((4, 3))
    address = first.ctypes.data
    part, tensor = first[2:].reshape(-1)[1:], torch.from_numpy(first)[1:]
    del first
    assert buffers.take((4, 3)).ctypes.data != address
    del part
    assert buffers.take((4, 3)).ctypes.data != address
    tensor.fill_(7)
    del tensor
    again = [buffers.take((3, 3)) for _ in range(2)]  # a smaller one fits into it
    assert address in [each.ctypes.data for each in again]


def test_a_block_is_read_from_its_table_without_a_copy() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    table = to_table(Block(pixels, np.arange(2), np.arange(2)))
    assert np.shares_memory(to_block(table, ImageShape(2, 2, 3)).images, pixels)
    joined = to_block(pa.concat_tables([table, table.slice(1)]), ImageShape(2, 2, 3))
    assert joined.images.tolist() == [*pixels.tolist(), pixels[1].tolist()]
    assert joined.labels.tolist() == [0, 1, 1]
