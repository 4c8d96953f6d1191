"""What more workers gain, computed from histories with known results."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import pytest

from raytrain.experiments.scaling import Scaling, Size, curve, images_per_s, per_doubling, scaling, seconds_to
from raytrain.runs.metric_row import MetricRow
from tests.helpers.scaling_histories import history


def compare(histories: Mapping[int, Sequence[MetricRow]], target: float | None = None) -> Scaling:
    """Compare runs by their number of workers."""
    sizes = [Size(run=f"sizes-{workers}", workers=workers, status="finished") for workers in histories]
    rows = {f"sizes-{workers}": rows for workers, rows in histories.items()}
    return scaling(sizes, rows, target)


def test_the_gain_per_doubling_is_reported_for_each_size_and_for_all() -> None:
    histories = {size: history(100 * 1.7**number, [0.5, 0.8, 0.9]) for number, size in enumerate((1, 2, 4, 8))}
    compared = compare(histories, target=0.8)
    assert [size.workers for size in compared.sizes] == [1, 2, 4, 8]
    assert [size.images_per_s for size in compared.sizes] == pytest.approx([100, 170, 289, 491.3])
    assert [size.images_per_s_gain for size in compared.sizes] == [None, *[pytest.approx(0.7)] * 3]
    assert [size.seconds_to_target for size in compared.sizes] == pytest.approx(
        [2000 / 100, 2000 / 170, 2000 / 289, 2000 / 491.3]
    )
    assert [size.time_gain for size in compared.sizes] == [None, *[pytest.approx(1 / 1.7 - 1)] * 3]
    assert (compared.images_per_s_gain, compared.time_gain) == (pytest.approx(0.7), pytest.approx(1 / 1.7 - 1))


def test_worker_counts_may_be_any_numbers_in_any_order() -> None:
    compared = compare({9: history(900, [0.5]), 3: history(500, [0.5])})
    assert [size.workers for size in compared.sizes] == [3, 9]
    assert compared.sizes[1].images_per_s_gain == pytest.approx((900 / 500) ** (1 / 1.5849625) - 1)
    assert per_doubling([1, 4], [100, 400]) == pytest.approx(1.0)
    assert per_doubling([1, 2, 4], [100, None, 100]) == pytest.approx(0.0)
    assert per_doubling([1, 2], [100, None]) is None


def test_the_target_is_95_percent_of_the_best_final_accuracy_if_none_is_given() -> None:
    compared = compare({1: history(100, [0.4, 0.8]), 2: history(170, [0.3, 0.6]), 4: history(290, [0.7, 0.72])})
    assert compared.target == pytest.approx(0.76)
    assert [size.value for size in compared.sizes] == [0.8, 0.6, 0.72]
    assert [size.seconds_to_target for size in compared.sizes] == [pytest.approx(10 + 0.9 * 10), None, None]
    assert compared.time_gain is None
    assert compared.spread == pytest.approx(0.2)


def test_evaluations_and_interruptions_do_not_count_as_training_time() -> None:
    rows = history(100, [0.4, 0.8], log_every=4)  # The first epoch ends between two rows.
    assert curve(rows, "evaluation").seconds == pytest.approx([10, 20])
    assert curve(rows, "step").seconds == pytest.approx([4, 8, 12, 16, 20])
    again = [  # Interrupted overnight.
        dataclasses.replace(row, elapsed_s=row.elapsed_s + 36_000) if row.step > 6 else row for row in rows
    ]
    assert curve(again, "evaluation") == curve(rows, "evaluation")


def test_the_time_to_an_accuracy_is_interpolated_between_evaluations() -> None:
    measured = curve(history(100, [0.2, 0.6, 0.5, 0.9]), "evaluation")
    assert seconds_to(0.5, measured) == pytest.approx(17.5)
    assert seconds_to(0.1, measured) == 10
    assert seconds_to(0.9, measured) == 40
    assert seconds_to(0.91, measured) is None


def test_the_speed_is_the_median_after_the_first_tenth_of_the_steps() -> None:
    chance = random.Random(0)
    rows = [MetricRow(kind="step", step=step, epoch=1, images_per_s=chance.uniform(95, 105)) for step in range(11, 101)]
    warm_up = [MetricRow(kind="step", step=step, epoch=1, images_per_s=1e6) for step in range(1, 11)]
    middle = images_per_s(rows)
    assert middle is not None and 97 < middle < 103
    assert images_per_s(warm_up + rows) == middle
    assert images_per_s(warm_up[:1]) == 1e6
    assert images_per_s([]) is None


def test_unknown_values_are_none() -> None:
    nothing = compare({})
    assert (nothing.sizes, nothing.target, nothing.images_per_s_gain) == ((), None, None)
    untested = compare({1: [row for row in history(100, [0.5]) if row.kind == "step"]})
    (size,) = untested.sizes
    assert (size.images_per_s, size.value, size.seconds_to_target, untested.target) == (
        100,
        None,
        None,
        None,
    )
