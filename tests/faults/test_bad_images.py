"""A run skips images that it cannot read, and stops if there are too many of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.monitor.monitor import RunMonitor
from raytrain.runs.metric_row import SkipLimit, SkippedImage
from raytrain.runs.metrics_history import History
from raytrain.storage.open import open_store

Make = Callable[[SkipLimit], RunMonitor]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a monitor of the same run, as each start and resume does."""
    return lambda limit: RunMonitor("first", 100, 40, History(open_store(str(tmp_path))), skip_limit=limit)


def bad(*numbers: int) -> list[SkippedImage]:
    return [SkippedImage(f"cat/{number}.jpg", "the file is empty") for number in numbers]


def test_a_run_continues_while_at_most_the_allowed_fraction_of_images_is_bad(make: Make) -> None:
    monitor = make(SkipLimit(num_images=300, max_bad_fraction=0.01))
    monitor.note_skipped(bad(1, 2))
    monitor.note_skipped(bad(2, 3))
    monitor.note_skipped(bad(1, 2, 3))  # In the next epoch.
    assert monitor.failure is None and monitor.wait_for_stop_request(0) is None
    monitor.finish("finished")


def test_a_run_with_too_many_bad_images_is_stopped_with_the_numbers(make: Make) -> None:
    monitor = make(SkipLimit(num_images=300, max_bad_fraction=0.01))
    monitor.note_skipped(bad(1, 2, 3, 4))
    request = monitor.wait_for_stop_request(30)
    assert request is not None
    assert (
        request.detail
        == monitor.failure
        == (
            "4 of 300 images (1.33 %) cannot be used, such as cat/1.jpg (the file is empty), and --max-bad-fraction is "
            "0.01; skipped.jsonl lists them: repair or remove them and start a new run, or allow more"
        )
    )
    monitor.finish("failed")


def test_images_skipped_before_a_resume_count_towards_the_limit(make: Make) -> None:
    before = make(SkipLimit(num_images=300))
    before.note_skipped(bad(1, 2, 3, 4))
    before.finish("failed")
    after = make(SkipLimit(num_images=300))
    after.note_skipped(bad(2))
    assert after.failure and after.failure.startswith("4 of 300 images")
    after.finish("failed")
    allowed = make(SkipLimit(num_images=300, max_bad_fraction=0.02))
    allowed.note_skipped(bad(2))
    assert allowed.failure is None
    allowed.finish("finished")


def test_the_share_of_bad_images_is_a_plain_number_if_all_are_bad() -> None:
    sentence = SkipLimit(num_images=8).exceeded([SkippedImage("a", "the file is empty")] * 8)
    assert sentence is not None and sentence.startswith("8 of 8 images (100 %) cannot be used")


def test_with_a_fraction_of_0_a_run_stops_at_the_first_bad_image(make: Make) -> None:
    monitor = make(SkipLimit(num_images=10**6, max_bad_fraction=0.0))
    monitor.note_skipped(bad(7))
    assert monitor.stop_request is not None
    assert (
        monitor.failure
        == monitor.stop_request.detail
        == (
            "1 of 1,000,000 images (0.0001 %) cannot be used, such as cat/7.jpg (the file is empty), and "
            "--max-bad-fraction is 0; skipped.jsonl lists them: repair or remove them and start a new run, or allow "
            "more"
        )
    )
    monitor.finish("failed")


def test_the_skip_limit_is_a_fraction() -> None:
    for fraction in (-0.1, 1.5):
        with pytest.raises(UsageError, match=f"--max-bad-fraction is {fraction}; it must be at least 0 and at most 1"):
            TrainConfig(batch_size=1, learning_rate=1, max_bad_fraction=fraction)
