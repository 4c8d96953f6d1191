"""A run leaves out what it cannot read, up to a point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.runs.bad_images import BadImageLimit
from raytrain.runs.history import History, Row
from raytrain.runs.monitor import RunMonitor
from raytrain.storage.base import open_store

Make = Callable[[BadImageLimit], RunMonitor]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A monitor of the same run, as often as it is begun."""
    return lambda limit: RunMonitor("first", 100, 40, History(open_store(str(tmp_path))), bad_images=limit)


def bad(*numbers: int) -> list[Row]:
    return [{"key": f"cat/{number}.jpg", "reason": "the file is empty"} for number in numbers]


def test_up_to_the_fraction_bad_images_do_not_end_a_run(make: Make) -> None:
    monitor = make(BadImageLimit(num_images=300, max_bad_fraction=0.01))
    monitor.skipped(bad(1, 2))
    monitor.skipped(bad(2, 3))
    monitor.skipped(bad(1, 2, 3))  # the next epoch
    assert monitor.failure is None and monitor.wait_for_stop(0) is None
    monitor.finish("finished", {})


def test_beyond_the_fraction_the_run_is_stopped_with_the_numbers(make: Make) -> None:
    monitor = make(BadImageLimit(num_images=300, max_bad_fraction=0.01))
    monitor.skipped(bad(1, 2, 3, 4))
    sentence = monitor.wait_for_stop(30)
    assert (
        sentence
        == monitor.failure
        == (
            "4 of 300 images (1.3 %) cannot be used, such as cat/1.jpg (the file is empty), and --max-bad-fraction is 0.01; skipped.jsonl "
            "lists them: mend or remove them and start a new run, or allow more"
        )
    )
    monitor.finish("failed", {})


def test_what_was_skipped_before_a_resume_counts(make: Make) -> None:
    before = make(BadImageLimit(num_images=300))
    before.skipped(bad(1, 2, 3, 4))
    before.finish("failed", {})
    after = make(BadImageLimit(num_images=300))
    after.skipped(bad(2))
    assert after.failure and after.failure.startswith("4 of 300 images")
    after.finish("failed", {})
    allowed = make(BadImageLimit(num_images=300, max_bad_fraction=0.02))
    allowed.skipped(bad(2))
    assert allowed.failure is None
    allowed.finish("finished", {})


def test_a_run_that_must_not_skip_ends_at_the_first_bad_image(make: Make) -> None:
    monitor = make(BadImageLimit(num_images=10**6, on_bad_image="fail"))
    monitor.skipped(bad(7))
    assert (
        monitor.failure
        == monitor.snapshot().stop_reason
        == (
            "cat/7.jpg (the file is empty) cannot be used, and --on-bad-image is fail; mend or remove it and start a new run, or give "
            "--on-bad-image skip"
        )
    )
    monitor.finish("failed", {})


def test_the_options_decide() -> None:
    config = TrainConfig(batch_size=1, learning_rate=1)
    assert BadImageLimit.of(config, 100) == BadImageLimit(num_images=100, on_bad_image="skip", max_bad_fraction=0.01)
    for fraction in (-0.1, 1.5):
        with pytest.raises(UsageError, match=f"--max-bad-fraction is {fraction}; it must lie between 0 and 1"):
            TrainConfig(batch_size=1, learning_rate=1, max_bad_fraction=fraction)
