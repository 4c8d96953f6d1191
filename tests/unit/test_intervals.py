"""Intervals of an accuracy: those of Wilson, and those of groups."""

from __future__ import annotations

import numpy as np
import pytest

from raytrain.data.labels.label_pattern import groups_in_names
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


@pytest.mark.parametrize("is_right", [True, False])
def test_groups_that_are_equally_accurate_have_an_interval_nevertheless(is_right: bool) -> None:
    groups = np.repeat(["a", "b", "c"], [1, 5, 20])
    assert grouped_interval(np.full(26, is_right), groups) == wilson_interval(3 * is_right, 3)
    assert grouped_interval(np.full(1, is_right), groups[:1]) == wilson_interval(1 * is_right, 1)
    low, high = grouped_interval(np.arange(10) % 2 == 0, np.full(10, "a"))  # one group says little
    assert (low, high) == wilson_interval(0.5, 1) and high - low > 0.8


def test_groups_of_unequal_size_count_by_their_images() -> None:
    """Two groups, of 1 and of 9 images: a resample has the one twice, the other twice, or both."""
    interval = grouped_interval(np.array([True] + [False] * 9), np.repeat(["a", "b"], [1, 9]))
    assert interval == (0.0, 1.0)
    is_right, groups = np.repeat([True, False], [90, 10]), np.repeat([0, 1], [90, 10])
    many = np.concatenate([groups + 2 * number for number in range(200)])
    low, high = grouped_interval(np.tile(is_right, 200), many)
    # The deviation of a ratio of sums, sqrt(sum of (right - accuracy * images)²) / images, over the 400 groups.
    residuals = np.tile([90 - 0.9 * 90, 0 - 0.9 * 10], 200)
    deviation = np.sqrt((residuals**2).sum()) / 20_000
    assert (low, high) == pytest.approx((0.9 - 1.96 * deviation, 0.9 + 1.96 * deviation), abs=0.002)


def test_groups_are_found_in_names_of_files() -> None:
    pattern = r"(?P<patient>p\d+)_(?P<label>[a-z]+)_"
    groups = groups_in_names(["x/p1_cat_3.jpg", "p22_dog_1.jpg"], pattern, "patient")
    assert groups is not None and groups.tolist() == ["p1", "p22"]
    assert groups_in_names(["p1_cat_3.jpg", "cat_3.jpg"], pattern, "patient") is None
