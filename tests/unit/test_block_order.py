"""Blocks of any length contain exactly the samples that a worker or a cache needs, in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder, Partition, WorkerOrder
from tests.helpers.worker_orders import assert_reads_only_its_local_batches

sizes = st.integers(1, 1000)
batch_sizes = st.integers(1, 400)
seeds = st.integers(0, 2**64 - 1)
loads = st.lists(st.sampled_from([0, 0.5, 1, 2, 3]), min_size=1, max_size=6).filter(any)


@pytest.mark.not_quick
@given(sizes, batch_sizes, seeds, loads, st.integers(1, 700), st.data())
def test_a_worker_reads_only_its_local_batches_in_blocks_of_any_length(
    num_samples: int, batch_size: int, seed: int, loads: list[float], rows_per_block: int, data: st.DataObject
) -> None:
    plan = BatchPlan(num_samples, batch_size, 2, seed, accumulate=data.draw(st.integers(1, 4)))
    assert_reads_only_its_local_batches(plan, loads, rows_per_block, data)


def test_a_worker_that_has_no_samples_left_in_the_epoch_reads_all_of_the_next() -> None:
    plan = BatchPlan(913, 228, 2, 0)  # The last batch of an epoch has one sample, which belongs to worker 0.
    order = WorkerOrder(Partition(plan, 1, [1, 1]), 4, rows_per_block=1)
    read = np.concatenate([order.draws(number) for number in range(len(order))])
    assert (
        read.tolist()
        == np.concatenate([Partition(plan, 1, [1, 1]).local_draws(plan.batch(step)) for step in range(4, 10)]).tolist()
    )


@pytest.mark.not_quick
@given(sizes, batch_sizes, seeds, st.integers(1, 700), st.data())
def test_a_cache_holds_each_sample_once_and_starts_at_its_first_step(
    num_samples: int, batch_size: int, seed: int, rows_per_block: int, data: st.DataObject
) -> None:
    plan = BatchPlan(num_samples, batch_size, 2, seed)
    step = data.draw(st.integers(0, plan.num_steps - 1))
    order = CacheOrder(plan, step, rows_per_block)
    rows = np.concatenate([order.draws(number) for number in range(len(order))])
    assert sorted(rows.tolist()) == list(range(num_samples))
    first = plan.batch_draws(plan.batch(step))
    assert rows[: len(first)].tolist() == first.tolist()
