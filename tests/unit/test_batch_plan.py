"""Every epoch is a permutation of the samples, and its global batches use each sample once."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.permutation import mix, permute

sizes = st.integers(1, 1000)
batch_sizes = st.integers(1, 400)
seeds = st.integers(0, 2**64 - 1)


@given(sizes, seeds)
def test_every_epoch_is_a_permutation(num_samples: int, seed: int) -> None:
    order = permute(np.arange(num_samples), num_samples, key=seed)
    assert sorted(order.tolist()) == list(range(num_samples))


@given(st.integers(10**6, 10**15), seeds, st.integers(0, 10**15))
def test_a_position_of_a_huge_epoch_is_found_without_an_array(num_samples: int, seed: int, start: int) -> None:
    positions = (start + np.arange(100)) % num_samples
    tracemalloc.start()
    order = permute(positions, num_samples, key=seed)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert order.min() >= 0 and order.max() < num_samples and len(set(order.tolist())) == len(set(positions.tolist()))
    assert peak_bytes < 100_000


def test_orders_of_different_epochs_and_seeds_are_independent() -> None:
    plans = [
        (seed, epoch, BatchPlan(1000, 10, 2, seed).draws(epoch, np.arange(1000))) for seed in (0, 1) for epoch in (0, 1)
    ]
    for i, (_, _, one) in enumerate(plans):
        for _, _, other in plans[i + 1 :]:
            assert (one == other).sum() < 12  # The expectation for independent orders is 1.


def test_all_orders_of_few_samples_are_equally_frequent() -> None:
    drawn = [tuple(permute(np.arange(4), 4, key=mix(seed)).tolist()) for seed in range(4800)]
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == 24
    assert (
        (counts - 200) ** 2 / 200
    ).sum() < 55  # Chi-square with 23 degrees of freedom: exceeded by chance 1 time in 5,000.


@given(sizes, batch_sizes, seeds, st.integers(1, 3))
def test_the_batches_of_an_epoch_use_each_sample_once(
    num_samples: int, batch_size: int, seed: int, epochs: int
) -> None:
    plan = BatchPlan(num_samples, batch_size, epochs, seed)
    last = range((epochs - 1) * plan.steps_per_epoch, plan.num_steps)
    used = np.concatenate([plan.batch_draws(plan.batch(step)) for step in last])
    assert sorted(used.tolist()) == list(range(num_samples))


@given(sizes, batch_sizes, seeds, st.integers(0, 3), st.data())
def test_a_position_has_the_same_sample_alone_and_among_others(
    num_samples: int, batch_size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    plan = BatchPlan(num_samples, batch_size, 4, seed)
    whole = plan.draws(epoch, np.arange(num_samples))
    some = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), max_size=20)), np.int64)
    assert plan.draws(epoch, some).tolist() == whole[some].tolist()


@given(sizes, batch_sizes, seeds, st.integers(1, 5), st.integers(1, 5), st.integers(1, 10**4))
def test_a_longer_run_starts_with_the_batches_of_a_shorter_one(
    num_samples: int, batch_size: int, seed: int, epochs: int, more: int, max_steps: int
) -> None:
    short = BatchPlan(num_samples, batch_size, epochs, seed, max_steps=max_steps)
    long = BatchPlan(num_samples, batch_size, epochs + more, seed)
    assert short.num_steps == min(max_steps, epochs * short.steps_per_epoch)
    for step in {0, short.num_steps // 2, short.num_steps - 1}:
        assert short.batch(step) == long.batch(step)
        assert short.batch_draws(short.batch(step)).tolist() == long.batch_draws(long.batch(step)).tolist()


@given(sizes, batch_sizes, st.integers(0, 10**6))
def test_each_batch_begins_where_the_one_before_ended(num_samples: int, batch_size: int, step: int) -> None:
    plan = BatchPlan(num_samples, batch_size, 10**9, 0)
    before, after = plan.batch(step), plan.batch(step + 1)
    assert (after.epoch - before.epoch) * num_samples + after.start - before.start == before.size
    assert 0 <= after.start < num_samples and plan.batch(0).start == 0
