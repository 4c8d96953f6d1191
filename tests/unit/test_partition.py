"""For any workers, the local batches together are the global batches, and their sizes follow the loads."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.data.plan.batch_plan import BatchPlan, GlobalBatch
from raytrain.data.plan.partition import Partition, partition_sizes

sizes = st.integers(1, 1000)
batch_sizes = st.integers(1, 400)
seeds = st.integers(0, 2**64 - 1)
loads = st.lists(st.sampled_from([0, 0.5, 1, 2, 3]), min_size=1, max_size=6).filter(any)


@given(sizes, batch_sizes, seeds, loads)
def test_the_local_batches_of_a_global_batch_are_its_samples_in_order_for_any_workers(
    num_samples: int, batch_size: int, seed: int, loads: list[float]
) -> None:
    plan = BatchPlan(num_samples, batch_size, 2, seed)
    for step in {0, plan.steps_per_epoch - 1, plan.num_steps - 1}:
        batch = plan.batch(step)
        alone = plan.batch_draws(batch)
        together = np.concatenate([Partition(plan, rank, loads).local_draws(batch) for rank in range(len(loads))])
        assert alone.tolist() == together.tolist()
        assert 1 <= batch.size <= batch_size


@given(sizes, batch_sizes, seeds, loads, st.integers(1, 5))
def test_the_microbatches_of_a_batch_are_the_same_for_any_workers(
    num_samples: int, batch_size: int, seed: int, loads: list[float], accumulate: int
) -> None:
    plan = BatchPlan(num_samples, batch_size, 2, seed, accumulate=accumulate)
    for batch in {plan.batch(0), plan.batch(plan.num_steps - 1)}:
        alone = in_microbatches(Partition(plan, 0, [1.0]), batch)
        by_rank = [in_microbatches(Partition(plan, rank, loads), batch) for rank in range(len(loads))]
        assert [list(itertools.chain(*slices)) for slices in zip(*by_rank, strict=True)] == alone
        assert list(itertools.chain(*alone)) == plan.batch_draws(batch).tolist()
        assert (
            plan.batch_draws(batch).tolist() == BatchPlan(num_samples, batch_size, 2, seed).batch_draws(batch).tolist()
        )
        sizes = [len(microbatch) for microbatch in alone]
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1 and len(sizes) == min(accumulate, batch.size)


def in_microbatches(partition: Partition, batch: GlobalBatch) -> list[list[int]]:
    """Return a worker's samples in each microbatch."""
    ends = np.cumsum(partition.microbatch_sizes(batch))
    samples = partition.local_draws(batch)
    assert len(samples) == ends[-1]
    return [microbatch.tolist() for microbatch in np.split(samples, ends[:-1])]


@given(st.integers(1, 60), st.integers(1, 30), seeds, loads, loads, st.data())
def test_an_epoch_resumed_on_other_workers_uses_each_sample_once(
    num_samples: int, batch_size: int, seed: int, before: list[float], after: list[float], data: st.DataObject
) -> None:
    plan = BatchPlan(num_samples, batch_size, 1, seed)
    stopped = data.draw(st.integers(0, plan.num_steps))
    workers = [(step, before if step < stopped else after) for step in range(plan.num_steps)]
    used = [
        Partition(plan, rank, loads).local_draws(plan.batch(step))
        for step, loads in workers
        for rank in range(len(loads))
    ]
    assert sorted(np.concatenate(used).tolist()) == list(range(num_samples))
    first = np.concatenate([np.empty(0, np.int64), *used[: stopped * len(before)]])
    assert len(first) == (plan.batch(stopped).start if stopped < plan.num_steps else num_samples)


@given(st.integers(0, 10**6), loads)
def test_sizes_follow_the_loads_and_the_first_workers_get_the_remainder(num_samples: int, loads: list[float]) -> None:
    counts = partition_sizes(num_samples, loads)
    assert sum(counts) == num_samples
    whole = [math.floor(num_samples * Fraction(load) / Fraction(sum(loads))) for load in loads]
    more = [count - due for count, due, load in zip(counts, whole, loads, strict=True) if load]
    assert more == [1] * sum(more) + [0] * (len(more) - sum(more))
    assert not any(count for count, load in zip(counts, loads, strict=True) if not load)


def test_the_first_workers_get_the_remainder() -> None:
    assert partition_sizes(10, [1, 1, 1, 1]) == [3, 3, 2, 2]
    assert partition_sizes(10, [1, 0, 2]) == [4, 0, 6]
    assert partition_sizes(2, [0, 1, 1, 1]) == [0, 1, 1, 0]


@pytest.mark.parametrize("loads", [[0, 0], [-1, 2]])
def test_loads_without_a_positive_one_or_with_a_negative_one_are_refused(loads: list[float]) -> None:
    with pytest.raises(ValueError, match="Worker loads"):
        partition_sizes(10, loads)


@given(st.integers(0, 10**6), loads, st.sampled_from([0.25, 0.5, 2, 1024]))
def test_only_the_ratio_of_the_loads_matters(num_samples: int, loads: list[float], factor: float) -> None:
    assert partition_sizes(num_samples, [load * factor for load in loads]) == partition_sizes(num_samples, loads)


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_equal_workers_differ_by_one_sample_at_most(num_samples: int, num_workers: int) -> None:
    counts = partition_sizes(num_samples, [1] * num_workers)
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


def test_a_batch_of_more_images_than_there_are_takes_no_memory_for_those_that_there_are_not() -> None:
    plan = BatchPlan(7, 10**15, 2, 0)
    partition = Partition(plan, 1, [1.0, 1.0])
    assert partition.rows_per_epoch == 3
    assert partition.row_draws(0, 0, 3).tolist() == partition.local_draws(plan.batch(0)).tolist()
    assert (partition.first_row(0), partition.step_of_row(2)) == (0, 0)
