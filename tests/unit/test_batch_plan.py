from __future__ import annotations

import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.data.batch_plan import BatchPlan, Cursor, GlobalBatch
from raytrain.data.block_order import CacheOrder, WorkerOrder
from raytrain.data.partition import Partition, partition_sizes
from raytrain.data.permutation import mix, permute

sizes = st.integers(1, 1000)
batch_sizes = st.integers(1, 400)
seeds = st.integers(0, 2**64 - 1)
loads = st.lists(st.sampled_from([0, 0.5, 1, 2, 3]), min_size=1, max_size=6).filter(any)


@given(sizes, seeds)
def test_every_epoch_is_a_permutation(num_samples: int, seed: int) -> None:
    order = permute(np.arange(num_samples), num_samples, key=seed)
    assert sorted(order.tolist()) == list(range(num_samples))


@given(st.integers(10**6, 10**15), seeds, st.integers(0, 10**15))
def test_a_position_of_a_huge_epoch_lies_inside_and_costs_no_array(num_samples: int, seed: int, start: int) -> None:
    positions = (start + np.arange(100)) % num_samples
    tracemalloc.start()
    order = permute(positions, num_samples, key=seed)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert order.min() >= 0 and order.max() < num_samples and len(set(order.tolist())) == len(set(positions.tolist()))
    assert peak_bytes < 100_000


def test_orders_of_different_epochs_and_seeds_share_nothing() -> None:
    plans = [
        (seed, epoch, BatchPlan(1000, 10, 2, seed).samples(epoch, np.arange(1000)))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for i, (_, _, one) in enumerate(plans):
        for _, _, other in plans[i + 1 :]:
            assert (one == other).sum() < 12  # 1 is expected of two independent orders


def test_small_orders_are_evenly_drawn() -> None:
    drawn = [tuple(permute(np.arange(4), 4, key=mix(seed)).tolist()) for seed in range(4800)]
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 55  # chi-square with 23 degrees of freedom: 1 in 5,000 by chance


@given(sizes, batch_sizes, seeds, loads)
def test_the_local_batches_of_a_global_batch_are_its_samples_in_order_for_any_workers(
    num_samples: int, batch_size: int, seed: int, loads: list[float]
) -> None:
    plan = BatchPlan(num_samples, batch_size, 2, seed)
    for step in {0, plan.steps_per_epoch - 1, plan.num_steps - 1}:
        batch = plan.batch(step)
        alone = plan.batch_samples(batch)
        together = np.concatenate([Partition(plan, rank, loads).local_samples(batch) for rank in range(len(loads))])
        assert alone.tolist() == together.tolist()
        assert 1 <= batch.size <= batch_size


@given(sizes, batch_sizes, seeds, loads, st.integers(1, 5))
def test_the_parts_of_a_batch_are_the_same_for_any_workers(
    num_samples: int, batch_size: int, seed: int, loads: list[float], accumulate: int
) -> None:
    plan = BatchPlan(num_samples, batch_size, 2, seed, accumulate=accumulate)
    for batch in {plan.batch(0), plan.batch(plan.num_steps - 1)}:
        alone = in_parts(Partition(plan, 0, [1.0]), batch)
        by_rank = [in_parts(Partition(plan, rank, loads), batch) for rank in range(len(loads))]
        assert [list(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)] == alone
        assert list(itertools.chain(*alone)) == plan.batch_samples(batch).tolist()
        assert (
            plan.batch_samples(batch).tolist()
            == BatchPlan(num_samples, batch_size, 2, seed).batch_samples(batch).tolist()
        )
        sizes = [len(part) for part in alone]
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1 and len(sizes) == min(accumulate, batch.size)


def in_parts(partition: Partition, batch: GlobalBatch) -> list[list[int]]:
    """A worker's samples in each part of a batch."""
    ends = np.cumsum(partition.part_sizes(batch))
    samples = partition.local_samples(batch)
    assert len(samples) == ends[-1]
    return [part.tolist() for part in np.split(samples, ends[:-1])]


@given(sizes, batch_sizes, seeds, st.integers(1, 3))
def test_the_batches_of_an_epoch_use_each_sample_once(
    num_samples: int, batch_size: int, seed: int, epochs: int
) -> None:
    plan = BatchPlan(num_samples, batch_size, epochs, seed)
    last = range((epochs - 1) * plan.steps_per_epoch, plan.num_steps)
    used = np.concatenate([plan.batch_samples(plan.batch(step)) for step in last])
    assert sorted(used.tolist()) == list(range(num_samples))


@given(st.integers(1, 60), st.integers(1, 30), seeds, loads, loads, st.data())
def test_an_epoch_that_resumes_with_other_workers_uses_each_sample_once(
    num_samples: int, batch_size: int, seed: int, before: list[float], after: list[float], data: st.DataObject
) -> None:
    plan = BatchPlan(num_samples, batch_size, 1, seed)
    stopped = data.draw(st.integers(0, plan.num_steps))
    workers = [(step, before if step < stopped else after) for step in range(plan.num_steps)]
    used = [
        Partition(plan, rank, loads).local_samples(plan.batch(step))
        for step, loads in workers
        for rank in range(len(loads))
    ]
    assert sorted(np.concatenate(used).tolist()) == list(range(num_samples))
    first = np.concatenate([np.empty(0, np.int64), *used[: stopped * len(before)]])
    assert len(first) == (plan.cursor(stopped).position if stopped < plan.num_steps else num_samples)


@given(sizes, batch_sizes, st.integers(0, 10**6))
def test_the_cursor_after_a_step_is_where_the_next_batch_begins(num_samples: int, batch_size: int, step: int) -> None:
    plan = BatchPlan(num_samples, batch_size, 10**9, 0)
    cursor, batch = plan.cursor(step), plan.batch(step)
    assert (cursor.epoch, cursor.position, cursor.step) == (batch.epoch, batch.start, step)


@given(st.integers(0, 10**6), loads)
def test_each_worker_gets_samples_by_its_load_and_the_remainder_goes_to_the_first(
    num_samples: int, loads: list[float]
) -> None:
    counts = partition_sizes(num_samples, loads)
    assert sum(counts) == num_samples
    whole = [math.floor(num_samples * Fraction(load) / Fraction(sum(loads))) for load in loads]
    more = [count - due for count, due, load in zip(counts, whole, loads, strict=True) if load]
    assert more == [1] * sum(more) + [0] * (len(more) - sum(more))
    assert not any(count for count, load in zip(counts, loads, strict=True) if not load)


def test_the_remainder_goes_to_the_first_workers() -> None:
    assert partition_sizes(10, [1, 1, 1, 1]) == [3, 3, 2, 2]
    assert partition_sizes(10, [1, 0, 2]) == [4, 0, 6]
    assert partition_sizes(2, [0, 1, 1, 1]) == [0, 1, 1, 0]


@pytest.mark.parametrize("loads", [[0, 0], [-1, 2]])
def test_loads_without_a_positive_one_or_with_a_negative_one_are_refused(loads: list[float]) -> None:
    with pytest.raises(ValueError, match="Worker loads"):
        partition_sizes(10, loads)


@given(sizes, batch_sizes, seeds, loads, st.integers(1, 700), st.data())
def test_a_worker_reads_just_its_local_batches_in_blocks_of_any_length(
    num_samples: int, batch_size: int, seed: int, loads: list[float], rows_per_block: int, data: st.DataObject
) -> None:
    plan = BatchPlan(num_samples, batch_size, 2, seed, accumulate=data.draw(st.integers(1, 4)))
    rank = data.draw(st.integers(0, len(loads) - 1))
    first_step = data.draw(st.integers(0, plan.num_steps - 1))
    partition = Partition(plan, rank, loads)
    order = WorkerOrder(partition, first_step, rows_per_block)
    read = np.concatenate([np.empty(0, np.int64), *(order.samples(number) for number in range(len(order)))])
    wanted = [partition.local_samples(plan.batch(step)) for step in range(first_step, plan.num_steps)]
    assert read.tolist() == np.concatenate(wanted).tolist()


def test_a_worker_that_resumes_with_nothing_left_in_the_epoch_reads_all_of_the_next() -> None:
    plan = BatchPlan(913, 228, 2, 0)  # the last batch of an epoch has one sample, which is worker 0's
    order = WorkerOrder(Partition(plan, 1, [1, 1]), 4, rows_per_block=1)
    read = np.concatenate([order.samples(number) for number in range(len(order))])
    assert (
        read.tolist()
        == np.concatenate(
            [Partition(plan, 1, [1, 1]).local_samples(plan.batch(step)) for step in range(4, 10)]
        ).tolist()
    )


@given(sizes, batch_sizes, seeds, st.integers(1, 700), st.data())
def test_a_cache_holds_each_sample_once_and_begins_at_the_cursor(
    num_samples: int, batch_size: int, seed: int, rows_per_block: int, data: st.DataObject
) -> None:
    plan = BatchPlan(num_samples, batch_size, 2, seed)
    step = data.draw(st.integers(0, plan.num_steps - 1))
    order = CacheOrder(plan, plan.cursor(step), rows_per_block)
    rows = np.concatenate([order.samples(number) for number in range(len(order))])
    assert sorted(rows.tolist()) == list(range(num_samples))
    first = plan.batch_samples(plan.batch(step))
    assert rows[: len(first)].tolist() == first.tolist()


@given(sizes, batch_sizes, seeds, st.integers(0, 3), st.data())
def test_a_position_has_the_same_sample_alone_and_among_others(
    num_samples: int, batch_size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    plan = BatchPlan(num_samples, batch_size, 4, seed)
    whole = plan.samples(epoch, np.arange(num_samples))
    some = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), max_size=20)), np.int64)
    assert plan.samples(epoch, some).tolist() == whole[some].tolist()


@given(sizes, batch_sizes, seeds, st.integers(1, 5), st.integers(1, 5), st.integers(1, 10**4))
def test_a_longer_run_begins_with_the_batches_of_a_shorter_one(
    num_samples: int, batch_size: int, seed: int, epochs: int, more: int, max_steps: int
) -> None:
    short = BatchPlan(num_samples, batch_size, epochs, seed, max_steps=max_steps)
    long = BatchPlan(num_samples, batch_size, epochs + more, seed)
    assert short.num_steps == min(max_steps, epochs * short.steps_per_epoch)
    for step in {0, short.num_steps // 2, short.num_steps - 1}:
        assert short.batch(step) == long.batch(step) and short.cursor(step) == long.cursor(step)
        assert short.batch_samples(short.batch(step)).tolist() == long.batch_samples(long.batch(step)).tolist()


@given(sizes, batch_sizes, st.integers(0, 10**6))
def test_a_step_moves_the_cursor_by_its_batch(num_samples: int, batch_size: int, step: int) -> None:
    plan = BatchPlan(num_samples, batch_size, 10**9, 0)
    before, after = plan.cursor(step), plan.cursor(step + 1)
    assert (after.epoch - before.epoch) * num_samples + after.position - before.position == plan.batch(step).size
    assert 0 <= after.position < num_samples


@given(st.integers(0, 10**6), loads, st.sampled_from([0.25, 0.5, 2, 1024]))
def test_only_the_ratio_of_the_loads_matters(num_samples: int, loads: list[float], factor: float) -> None:
    assert partition_sizes(num_samples, [load * factor for load in loads]) == partition_sizes(num_samples, loads)


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_equal_workers_differ_by_one_sample_at_most(num_samples: int, num_workers: int) -> None:
    counts = partition_sizes(num_samples, [1] * num_workers)
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


def test_a_cursor_starts_at_nothing() -> None:
    assert Cursor() == BatchPlan(10, 3, 1, 0).cursor(0)
