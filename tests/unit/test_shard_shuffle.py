"""The order of packed samples is an exact permutation too, and reads shard by shard."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder, Partition, WorkerOrder
from raytrain.data.plan.permutation import NUM_LANES, WINDOW_SHARDS, ShardShuffle, lane_positions, permute
from tests.helpers.worker_orders import assert_reads_only_its_local_batches

layouts = st.lists(st.integers(1, 60), min_size=1, max_size=50)
batch_sizes = st.integers(1, 400)
seeds = st.integers(0, 2**64 - 1)
loads = st.lists(st.sampled_from([0, 0.5, 1, 2, 3]), min_size=1, max_size=6).filter(any)


def packed_plan(sizes: list[int], batch_size: int, seed: int, *, epochs: int = 2, shuffle: bool = True) -> BatchPlan:
    return BatchPlan(
        sum(sizes), batch_size, epochs, seed, shuffle=shuffle, shard_shuffle=ShardShuffle(np.array(sizes, np.int64))
    )


def shard_of_sample(sizes: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


def epoch_of(plan: BatchPlan, epoch: int = 0) -> np.ndarray:
    return plan.draws(epoch, np.arange(plan.num_samples))


@given(layouts, batch_sizes, seeds, st.booleans())
def test_every_epoch_is_a_permutation_for_any_shard_sizes(
    sizes: list[int], batch_size: int, seed: int, shuffle: bool
) -> None:
    plan = packed_plan(sizes, batch_size, seed, shuffle=shuffle)
    for epoch in (0, 1):
        assert sorted(epoch_of(plan, epoch).tolist()) == list(range(plan.num_samples))


@given(layouts, batch_sizes, seeds, st.data())
def test_a_position_has_the_same_sample_alone_and_among_others_and_in_another_process(
    sizes: list[int], batch_size: int, seed: int, data: st.DataObject
) -> None:
    plan = packed_plan(sizes, batch_size, seed)
    position = data.draw(st.integers(0, plan.num_samples - 1))
    elsewhere: BatchPlan = pickle.loads(pickle.dumps(plan))
    assert elsewhere.draws(1, np.array([position])).tolist() == [epoch_of(plan, 1)[position]]


@given(layouts, batch_sizes, seeds, loads)
def test_any_number_of_workers_gets_the_same_batches(
    sizes: list[int], batch_size: int, seed: int, loads: list[float]
) -> None:
    plan = packed_plan(sizes, batch_size, seed)
    for step in {0, plan.steps_per_epoch - 1, plan.num_steps - 1}:
        batch = plan.batch(step)
        together = np.concatenate([Partition(plan, rank, loads).local_draws(batch) for rank in range(len(loads))])
        assert together.tolist() == plan.batch_draws(batch).tolist()


@given(layouts, batch_sizes, seeds, loads, st.integers(1, 700), st.data())
def test_a_worker_that_starts_in_the_middle_reads_only_its_local_batches(
    sizes: list[int], batch_size: int, seed: int, loads: list[float], rows_per_block: int, data: st.DataObject
) -> None:
    plan = packed_plan(sizes, batch_size, seed)
    assert_reads_only_its_local_batches(plan, loads, rows_per_block, data)


@given(layouts, batch_sizes, seeds, st.integers(1, 700), st.data())
def test_a_cache_holds_each_packed_sample_once(
    sizes: list[int], batch_size: int, seed: int, rows_per_block: int, data: st.DataObject
) -> None:
    plan = packed_plan(sizes, batch_size, seed)
    order = CacheOrder(plan, data.draw(st.integers(0, plan.num_steps - 1)), rows_per_block)
    assert sorted(np.concatenate([order.draws(number) for number in range(len(order))]).tolist()) == list(
        range(plan.num_samples)
    )


@given(layouts, batch_sizes)
def test_a_lane_continues_where_the_previous_batch_ended_and_has_the_same_columns_of_each(
    sizes: list[int], batch_size: int
) -> None:
    """The shorter last batch of an epoch is an exception: it is divided over the lanes anew."""
    num_samples = sum(sizes)
    num_full = num_samples // batch_size
    in_lanes = lane_positions(np.arange(num_full * batch_size), num_samples, batch_size).reshape(num_full, batch_size)
    num_lanes = min(NUM_LANES, batch_size)
    ends = np.arange(1, num_lanes + 1) * batch_size // num_lanes
    for lane in np.split(in_lanes, ends[:-1], axis=1):  # (steps, columns of the lane)
        assert (np.diff(lane.reshape(-1)) == 1).all()


@given(layouts, batch_sizes, seeds)
def test_a_window_holds_all_samples_of_its_shards_and_no_others(sizes: list[int], batch_size: int, seed: int) -> None:
    plan = packed_plan(sizes, batch_size, seed)
    laid_out = np.empty(plan.num_samples, np.int64)
    laid_out[lane_positions(np.arange(plan.num_samples), plan.num_samples, batch_size)] = epoch_of(plan)
    shards = shard_of_sample(sizes)[laid_out]
    _, firsts = np.unique(shards, return_index=True)
    order = np.argsort(firsts)  # The shards in reading order.
    for start in range(0, len(sizes), WINDOW_SHARDS):
        window, shards = np.split(shards, [sum(sizes[shard] for shard in order[start : start + WINDOW_SHARDS])])
        assert set(window.tolist()) == set(order[start : start + WINDOW_SHARDS].tolist())


@given(layouts, batch_sizes, st.integers(1, 40), st.integers(1, 3000), seeds, st.booleans(), st.data())
def test_a_block_touches_few_shards(
    sizes: list[int],
    batch_size: int,
    num_workers: int,
    rows_per_block: int,
    seed: int,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    """At most the windows that the block's samples can be in, for each lane of the worker, plus one."""
    plan = packed_plan(sizes, batch_size, seed, shuffle=shuffle)
    rank = data.draw(st.integers(0, num_workers - 1))
    order = WorkerOrder(Partition(plan, rank, [1] * num_workers), 0, rows_per_block)
    if len(order) == 0:
        return
    samples = order.draws(data.draw(st.integers(0, len(order) - 1)))
    local_batch_size = max(1, batch_size // num_workers)
    num_lanes = min(NUM_LANES, batch_size)
    lanes_of_worker = min(num_lanes, local_batch_size * num_lanes // batch_size + 3)
    steps = -(-rows_per_block // local_batch_size) + 1
    windows = 2 + steps * -(-batch_size // num_lanes) // (WINDOW_SHARDS * min(sizes))
    # The shorter last batch of an epoch may come from other lanes.
    last_local_batch_size = -(-(plan.num_samples % batch_size) // num_workers)
    assert (
        len(np.unique(shard_of_sample(sizes)[samples]))
        <= lanes_of_worker * windows * WINDOW_SHARDS + last_local_batch_size
    )


@given(st.integers(100, 300), st.integers(5, 30), st.sampled_from([2, 4, 8, 16]), seeds, st.booleans())
def test_each_worker_reads_mostly_its_own_shards(
    num_shards: int, shard_size: int, num_workers: int, seed: int, shuffle: bool
) -> None:
    sizes = [shard_size] * num_shards
    plan = packed_plan(sizes, 256, seed, shuffle=shuffle)
    orders = [WorkerOrder(Partition(plan, rank, [1] * num_workers), 0, 10**6) for rank in range(num_workers)]
    num_read = [len(np.unique(shard_of_sample(sizes)[order.draws(0)])) for order in orders]
    # In addition to its own: the window at each end, and samples of neighbouring lanes in the shorter last batch.
    assert max(num_read) <= num_shards / num_workers + 8 * WINDOW_SHARDS


@given(seeds)
def test_a_batch_is_mixed(seed: int) -> None:
    sizes = [50] * 200
    shards = shard_of_sample(sizes)[epoch_of(packed_plan(sizes, 256, seed))]
    for start in range(0, 9_800, 1_400):
        assert len(np.unique(shards[start : start + 256])) >= NUM_LANES - 2  # Two lanes may be in one window.


@given(seeds)
def test_other_epochs_and_seeds_have_other_orders(seed: int) -> None:
    sizes = [20] * 50
    plan = packed_plan(sizes, 64, seed)
    orders = [epoch_of(plan, 0), epoch_of(plan, 1), epoch_of(packed_plan(sizes, 64, seed ^ 1))]
    for i, one in enumerate(orders):
        for other in orders[i + 1 :]:
            assert (one == other).sum() < 15  # The expectation for independent orders is 1.


def test_all_orders_of_shards_and_of_samples_in_a_window_occur() -> None:
    sizes = [2, 2, 2]
    drawn = [tuple(epoch_of(packed_plan(sizes, 6, seed)).tolist()) for seed in range(3_000)]
    assert len(set(drawn)) == 3 * 24 * 2  # 3 last shards, 24 orders of the 4 samples before, 2 of its own.


@given(st.integers(1, 10**6), seeds, st.data())
def test_a_huge_epoch_needs_only_an_array_of_its_shards(
    num_samples_a_shard: int, seed: int, data: st.DataObject
) -> None:
    shard_shuffle = ShardShuffle(np.full(10_000, num_samples_a_shard, np.int64))
    plan = BatchPlan(10_000 * num_samples_a_shard, 1024, 1, seed, shard_shuffle=shard_shuffle)
    start = data.draw(st.integers(0, plan.num_samples - 100))
    tracemalloc.start()
    samples = plan.draws(0, np.arange(start, start + 100))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert samples.min() >= 0 and samples.max() < plan.num_samples and len(set(samples.tolist())) == 100
    assert peak_bytes < 2_000_000


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), seeds)
def test_each_range_is_permuted_within_itself(sizes: list[int], seed: int) -> None:
    positions = np.concatenate([np.arange(size) for size in sizes])
    ranges = np.repeat(np.arange(len(sizes)), sizes)
    permuted = permute(positions, np.array(sizes)[ranges], key=seed, tweak=ranges)
    for number, size in enumerate(sizes):
        assert sorted(permuted[ranges == number].tolist()) == list(range(size))
    assert permuted[: sizes[0]].tolist() == permute(np.arange(sizes[0]), sizes[0], key=seed).tolist()


def test_tweaks_give_independent_permutations() -> None:
    drawn = permute(np.tile(np.arange(4), 4_800), 4, key=0, tweak=np.repeat(np.arange(4_800), 4)).reshape(-1, 4)
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == 24
    assert (
        (counts - 200) ** 2 / 200
    ).sum() < 55  # Chi-square with 23 degrees of freedom: exceeded by chance 1 time in 5,000.
