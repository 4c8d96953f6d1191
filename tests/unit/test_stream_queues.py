"""Stream queues: each worker gets its blocks in order, queues are bounded, and an ended worker group gets none."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import Partition, WorkerOrder, interleave
from raytrain.errors import RaytrainError
from raytrain.launch.ray.feed.streaming import Stream, StreamQueues

STREAM = Stream(attempt=0, number=0, dataset="train", first_step=0, num_workers=2)


def opened(*streams: Stream) -> StreamQueues:
    queues = StreamQueues()
    for stream in streams:
        assert queues.open(stream, range(stream.num_workers))
    return queues


@pytest.mark.not_quick
@given(
    st.integers(1, 300),
    st.integers(1, 60),
    st.lists(st.sampled_from([0, 0.5, 1, 2, 3]), min_size=1, max_size=5).filter(any),
    st.integers(1, 50),
    st.integers(0, 600),
)
@example(num_samples=55, batch_size=54, loads=[0.5, 0.5], rows_per_block=2, first=3)
def test_the_read_order_never_runs_more_than_a_block_ahead_of_any_worker(
    num_samples: int, batch_size: int, loads: list[float], rows_per_block: int, first: int
) -> None:
    """Otherwise a full queue could block the reader before the block for which all workers wait."""
    plan = BatchPlan(num_samples, batch_size, 2, seed=3)
    first_step = first % plan.num_steps
    orders = [WorkerOrder(Partition(plan, rank, loads), first_step, rows_per_block) for rank in range(len(loads))]
    turns = interleave(orders)
    read: Counter[int] = Counter()
    rows_there = [0] * len(loads)
    rows_used = [0] * len(loads)
    for step in range(first_step, plan.num_steps):
        for rank, order in enumerate(orders):
            rows_used[rank] += sum(order.partition.microbatch_sizes(plan.batch(step)))
            while rows_there[rank] < rows_used[rank]:
                which, number = next(turns)
                assert number == read[which]
                rows_there[which] += len(orders[which].draws(number))
                read[which] += 1
        ahead = [-(-(there - used) // rows_per_block) for there, used in zip(rows_there, rows_used, strict=True)]
        assert max(ahead) <= 1  # The rest of the block that the worker is using.
    assert all(read[rank] == len(order) for rank, order in enumerate(orders) if order.partition.loads[rank])


def test_a_worker_gets_its_own_blocks_in_order() -> None:
    streams = opened(STREAM)
    for number in range(3):
        assert streams.push(STREAM, 0, number, depth=8)
        assert streams.push(STREAM, 1, -number, depth=8)
    assert streams.take(STREAM, 0, timeout_s=0) == [0, 1, 2]
    assert streams.take(STREAM, 1, timeout_s=0) == [0, -1, -2]
    assert streams.take(STREAM, 0, timeout_s=0) == []


def test_a_full_queue_blocks_its_producer() -> None:
    streams = opened(STREAM)
    streams.push(STREAM, 0, 1, depth=1)
    with ThreadPoolExecutor() as pool:
        pushed = pool.submit(streams.push, STREAM, 0, 2, 1)
        assert streams.take(STREAM, 0, timeout_s=10) == [1]
        assert pushed.result(timeout=60)
    assert streams.take(STREAM, 0, timeout_s=0) == [2]


def test_a_stream_is_read_once_for_all_workers_that_open_it() -> None:
    streams = opened(STREAM)
    assert not streams.open(STREAM, range(2))


def test_a_new_worker_group_ends_the_streams_of_the_previous_one() -> None:
    streams = opened(STREAM)
    again = Stream(attempt=1, number=0, dataset="test", first_step=0, num_workers=3)
    assert streams.open(again, range(3))
    assert not streams.push(STREAM, 0, 1, depth=1)
    assert streams.push(again, 2, 1, depth=1)
    with pytest.raises(RuntimeError, match="another worker group"):
        streams.take(STREAM, 0, timeout_s=0)
    with pytest.raises(RuntimeError, match="another worker group"):
        streams.open(STREAM, range(2))
    assert streams.take(again, 2, timeout_s=0) == [1]


def test_what_is_read_ahead_for_more_workers_than_there_are_is_given_up() -> None:
    fewer = replace(STREAM, num_workers=1)
    streams = opened(STREAM, fewer)
    assert not streams.push(STREAM, 0, 1, depth=1)
    assert streams.push(fewer, 0, 1, depth=1)


def test_test_images_can_be_streamed_repeatedly_during_training() -> None:
    first, second = (Stream(0, number, "test", 0, 2) for number in range(2))
    streams = opened(STREAM, first)
    assert streams.push(STREAM, 0, 1, depth=1)
    assert streams.open(second, range(2))
    assert not streams.push(first, 0, 1, depth=1)
    with pytest.raises(RuntimeError):
        streams.open(first, range(2))
    assert streams.take(STREAM, 0, timeout_s=0) == [1]


def test_a_failure_is_raised_after_the_blocks_before_it() -> None:
    streams = opened(STREAM)
    streams.push(STREAM, 0, 1, depth=1)
    streams.fail(STREAM, "The bucket is gone.")
    assert streams.take(STREAM, 0, timeout_s=10) == [1]
    with pytest.raises(RaytrainError, match="bucket is gone"):
        streams.take(STREAM, 0, timeout_s=10)


def test_closing_releases_blocked_producers() -> None:
    streams = opened(STREAM)
    streams.push(STREAM, 0, 1, depth=1)
    with ThreadPoolExecutor() as pool:
        pushed = pool.submit(streams.push, STREAM, 0, 2, 1)
        streams.close()
        assert not pushed.result(timeout=60)
