"""Intervals of an accuracy: those of Wilson, and those of groups."""

from __future__ import annotations

import numpy as np
import pytest

from raytrain.inference.classification_metrics import grouped_interval, wilson_interval


@pytest.mark.parametrize(
    ("num_right", "num_images", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0)],
)
def test_wilsons_interval_is_the_published_one(num_right: int, num_images: int, low: float, high: float) -> None:
    """Examples of Newcombe 1998, table I, method 3."""
    assert wilson_interval(num_right, num_images) == pytest.approx((low, high), abs=5e-5)


def test_images_of_few_groups_say_less_than_as_many_single_ones() -> None:
    """Patients of whom all images are right or all are wrong: 40 of them know as much as 40 images."""
    is_right = np.repeat(np.arange(40) % 4 > 0, 25)
    together = grouped_interval(is_right, np.repeat(np.arange(40), 25))
    apart = grouped_interval(is_right, np.arange(1000))
    assert apart == pytest.approx(wilson_interval(750, 1000), abs=0.003)
    assert together == pytest.approx(wilson_interval(30, 40), abs=0.02)


def test_the_interval_covers_the_true_accuracy_as_often_as_it_says() -> None:
    random, num_covered = np.random.default_rng(1), 0
    for num_right in random.binomial(200, 0.83, 2000):
        low, high = wilson_interval(int(num_right), 200)
        num_covered += low <= 0.83 <= high
    assert num_covered / 2000 == pytest.approx(0.95, abs=0.02)
